"""When a prompt goes straight to decode."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.core.messages.traffic import FleetPlan
from kvferry.router.choice.disaggregation import Threshold
from kvferry.router.choice.policies.base import Options, PromptTraits
from kvferry.testing.policy import Fleet, prompt_traits

LONG = prompt_traits(*range(500, 580))


def measured(fleet: Fleet, *, token_s: float = 1e-4, hand_off_s: float = 0.05) -> Fleet:
    """After the router has seen enough."""
    for number in range(200):
        fleet.estimates.prefilled("prefill-0", 50 * number, 50 * number * token_s)
        fleet.estimates.hand_off.add(50 * number, hand_off_s)
    return fleet


@pytest.mark.parametrize("policy", ["cost", "round_robin", "session"])
def test_a_fixed_threshold_counts_what_decode_does_not_have(policy: str) -> None:
    fleet = Fleet(policy, 1, 1, threshold_tokens=150)
    assert fleet.choose(prompt_traits(1)).reason == "short_prompt"
    assert fleet.choose(prompt_traits(2, 3)).reason == "split"
    assert fleet.choose(prompt_traits(2, 3, 4)).reason == "short_prompt", "decode has all but 100 tokens"
    assert fleet.threshold.tokens == 150


def test_nothing_is_kept_together_before_enough_was_measured() -> None:
    fleet = Fleet("cost", 1, 1, threshold_tokens=None)
    assert fleet.threshold.tokens == 0
    assert fleet.choose(prompt_traits(1)).reason == "split"
    for number in range(Threshold.min_hand_offs):
        fleet.estimates.hand_off.add(number, 1.0)
    assert fleet.threshold.tokens > 0
    assert fleet.choose(prompt_traits(2)).reason == "short_prompt"


def test_the_threshold_follows_what_a_hand_off_costs_and_what_prefill_does() -> None:
    dear = measured(Fleet("cost", 1, 1, threshold_tokens=None), hand_off_s=0.5).threshold.tokens
    cheap = measured(Fleet("cost", 1, 1, threshold_tokens=None), hand_off_s=0.01).threshold.tokens
    slow = measured(Fleet("cost", 1, 1, threshold_tokens=None), hand_off_s=0.01, token_s=1e-3).threshold.tokens
    assert dear > 10 * cheap
    assert cheap > 5 * slow


def test_a_short_prompt_goes_straight_to_decode_and_a_long_one_does_not() -> None:
    fleet = measured(Fleet("cost", 1, 1, threshold_tokens=None))
    assert fleet.choose(prompt_traits(1)).reason == "short_prompt"
    assert fleet.choose(LONG).reason == "split"


def test_answers_under_way_weigh_against_computing_beside_them() -> None:
    fleet = measured(Fleet("cost", 1, 1, threshold_tokens=None))
    fleet.decodes[0].load.num_decodes = 30
    assert fleet.choose(prompt_traits(1)).reason == "split"


def test_a_busy_prefill_pool_is_passed_over() -> None:
    fleet = measured(Fleet("cost", 1, 1, threshold_tokens=None))
    assert fleet.choose(LONG, None).reason == "split"
    fleet.index.cleared(fleet.decodes[0])
    fleet.prefills[0].load.prefill_tokens = 500_000
    assert fleet.choose(LONG, None).reason == "prefill_busy"


def test_targets_decide_what_is_computed_beside_answers() -> None:
    """A prompt that would wait too long for prefill goes to decode, as long as the answers there keep their target."""
    fleet = measured(Fleet("cost", 1, 1, threshold_tokens=None))
    fleet.decodes[0].load.num_decodes = 10
    fleet.prefills[0].load.prefill_tokens = 30_000
    for _ in range(200):
        fleet.estimates.decoded(10, 200, 200 * 0.03)

    def reason(asked: PromptTraits, ttft_s: float, itl_s: float) -> str:
        fleet.fleet_plan.follow(msgspec.json.encode(FleetPlan({}, ttft_s=ttft_s, itl_s=itl_s)).decode())
        fleet.index.cleared(fleet.decodes[0])
        fleet.index.cleared(fleet.prefills[0])
        return fleet.choose(asked).reason

    assert reason(LONG, 0.0, 0.0) == "split", "ten answers would wait, which is longer than the queue"
    assert reason(LONG, 1.0, 0.1) == "prefill_busy"
    assert reason(LONG, 10.0, 0.1) == "split", "it is in time"
    assert reason(LONG, 0.5, 0.1) == "split", "it would be late there too"
    assert reason(LONG, 1.0, 0.032) == "split", (
        "one or more of ten answers with 0.4 s to spare would miss because of 0.8 s"
    )
    fleet.decodes[0].load.num_decodes = 0
    assert reason(prompt_traits(1), 0.0, 0.0) == "short_prompt"
    assert reason(prompt_traits(1), 1.0, 0.02) == "split", "answers are too slow there as it is"


def test_a_prefill_instance_answers_where_decode_would_miss_its_target_and_it_would_not() -> None:
    fleet = measured(Fleet("cost", 2, 2, threshold_tokens=None))
    for number in range(400):
        fleet.estimates.decoded(number % 20, 200, 200 * (0.01 + 0.001 * (number % 20)))

    def tell(ttft_s: float, itl_s: float, disaggregate_from: int | None = None) -> None:
        plan = FleetPlan({}, disaggregate_from, ttft_s=ttft_s, itl_s=itl_s)
        fleet.fleet_plan.follow(msgspec.json.encode(plan).decode())

    def choose(number: int, *, places: int = 64, may_aggregate: bool = True) -> tuple[str, str]:
        options = Options(fleet.prefills, fleet.decodes, may_aggregate, decode_max_num_seqs=places)
        choice = fleet.policy.choose(prompt_traits(*range(number, number + 80)), options)
        assert (choice.reason == "split") == (choice.prefill is not None)
        return choice.reason, choice.decode.name

    tell(2.0, 0.020)
    fleet.decodes[0].load.num_decodes, fleet.decodes[1].load.num_decodes = 20, 8
    assert choose(1000) == ("split", "decode-1"), "it keeps the target with one answer more"
    fleet.decodes[1].load.num_decodes = 10
    fleet.prefills[0].load.num_decodes = 5
    assert choose(1000) == ("decode_busy", "prefill-1")
    assert choose(1000, places=0) == ("split", "decode-1"), "it may be no instance that answers"
    assert choose(1000, may_aggregate=False) == ("split", "decode-1")
    tell(0.0, 0.0)
    assert choose(1000) == ("split", "decode-1"), "there are no targets"
    tell(2.0, 0.020, disaggregate_from=50)
    assert choose(1000) == ("split", "decode-1"), "the threshold is given"
    tell(0.5, 0.020)
    assert choose(1000) == ("split", "decode-1"), "its first token would be late"
    tell(2.0, 0.030)
    assert choose(1000) == ("split", "decode-1"), "decode keeps this target"
    assert choose(1000, places=11) == ("split", "decode-1"), "it has a place"
    assert choose(1000, places=10) == ("decode_busy", "prefill-1"), "it would wait for a place"
    for _ in range(60):
        fleet.estimates.hand_off.add(8000, 2.5)
    assert choose(1000) == ("decode_busy", "prefill-1"), "where the first token would wait for a place"
    tell(2.0, 0.020)
    fleet.prefills[0].load.prefill_tokens = fleet.prefills[1].load.prefill_tokens = 30_000
    assert choose(1000) == ("split", "decode-1"), "it would wait too long"
    tell(6.0, 0.020)
    assert choose(1000)[0] == "decode_busy", "it has no answer that would wait"
    fleet.prefills[1].load.num_decodes = 6
    assert choose(1000)[0] == "split", "its answers would wait for the prompts"
