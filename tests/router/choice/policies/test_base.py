"""What every policy promises, and each by itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest

from kvferry.core.errors import ConfigError, UnknownName
from kvferry.router.choice.policies.base import Choice, LegPolicy, Options, Policy, PolicyContext, PromptTraits
from kvferry.router.choice.policies.table import POLICIES, find_policy, make_policy, policy_names, read_settings
from kvferry.testing.policy import Fleet, PolicyContract, PolicyInstance, prompt_traits


@pytest.fixture(params=sorted(POLICIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestEvery(PolicyContract):
    @pytest.fixture(autouse=True)
    def _set(self, name: str) -> None:
        self.policy = name


def test_round_robin_gives_everyone_a_turn_and_skips_nobody() -> None:
    fleet = Fleet("round_robin", 0, 3)
    names = [fleet.choose(prompt_traits(1)).decode.name for _ in range(6)]
    assert names == ["decode-0", "decode-1", "decode-2"] * 2
    first, second, third = fleet.decodes
    without = [fleet.choose(prompt_traits(1), Options([], [first, third])).decode for _ in range(3)]
    assert without == [first, third, first]
    assert fleet.choose(prompt_traits(1)).decode is second


def test_least_loaded_takes_the_one_with_the_least_to_do() -> None:
    fleet = Fleet("least_loaded", 3, 3)
    for place, one in enumerate(fleet.prefills + fleet.decodes):
        one.load.prefill_tokens, one.load.num_decodes = 1000 - place, 10 - place
    choice = fleet.choose(prompt_traits(1))
    assert choice.prefill is fleet.prefills[2]
    assert choice.decode is fleet.decodes[2]


def test_power_of_two_never_takes_the_busiest_and_not_always_the_idlest() -> None:
    fleet = Fleet("power_of_two", 0, 4)
    for place, one in enumerate(fleet.decodes):
        one.load.num_decodes = place
    names = {fleet.choose(prompt_traits(1)).decode.name for _ in range(200)}
    assert names == {"decode-0", "decode-1", "decode-2"}


def test_a_named_session_goes_back_on_both_legs_whatever_it_says() -> None:
    fleet = Fleet("session", 3, 3)
    first = fleet.choose(prompt_traits(1, 2, session="mine"))
    for number in range(10):
        fleet.choose(prompt_traits(1, 50 + number))
    again = fleet.choose(prompt_traits(99, 98, session="mine"))
    assert (again.prefill, again.decode) == (first.prefill, first.decode)
    others = [one for one in fleet.decodes if one is not first.decode]
    assert fleet.choose(prompt_traits(1, session="mine"), Options(fleet.prefills, others)).decode in others


def test_routers_agree_where_a_session_goes_and_one_less_moves_only_its_own() -> None:
    first, second = Fleet("session", 0, 8), Fleet("session", 0, 8)
    for number in range(50):
        second.choose(prompt_traits(number))  # of which the first knows nothing
    names = [f"session {number}" for number in range(800)]
    where = {name: first.choose(prompt_traits(1, session=name)).decode.name for name in names}
    assert where == {name: second.choose(prompt_traits(2, 3, session=name)).decode.name for name in names}
    counts = Counter(where.values())
    assert len(counts) == 8
    assert max(counts.values()) < 1.5 * len(names) / 8
    third = Fleet("session", 0, 8)
    left = Options([], third.decodes[1:])
    moved = {name: third.choose(prompt_traits(1, session=name), left).decode.name for name in names}
    assert {where[name] for name in names if moved[name] != where[name]} == {"decode-0"}


def test_a_new_session_goes_past_an_instance_that_is_too_busy() -> None:
    fleet = Fleet("session", 0, 4)
    usual = fleet.choose(prompt_traits(1, session="mine")).decode
    other = Fleet("session", 0, 4)
    busy = next(one for one in other.decodes if one.name == usual.name)
    busy.load.num_decodes = 17
    assert other.choose(prompt_traits(1, session="mine")).decode is not busy


def test_sessions_remembered_are_bounded() -> None:
    fleet = Fleet("session", 1, 4, "max_sessions=3")
    for number in range(10):
        fleet.choose(prompt_traits(number, session=str(number)))
    assert len(fleet.policy._last_instances) == 3


@pytest.mark.parametrize("name", ["cost", "prefix", "session"])
def test_the_next_turn_goes_to_where_its_beginning_is(name: str) -> None:
    fleet = Fleet(name, 4, 4)
    first = fleet.choose(prompt_traits(0, *range(100, 120)))
    for number in range(7):
        fleet.choose(prompt_traits(0, *range(1000 * number, 1000 * number + 10)))
    again = fleet.choose(prompt_traits(0, *range(100, 124)))
    assert (again.prefill, again.decode) == (first.prefill, first.decode)


def test_cost_goes_elsewhere_when_the_queue_is_dearer_than_the_cache() -> None:
    fleet = Fleet("cost", 2, 1)
    first = fleet.choose(prompt_traits(*range(10))).prefill
    assert fleet.choose(prompt_traits(*range(10))).prefill is first
    assert first is not None
    first.load.prefill_tokens = 1_000_000
    assert fleet.choose(prompt_traits(*range(10))).prefill is not first


def test_cost_prefers_the_faster_of_two() -> None:
    fleet = Fleet("cost", 2, 1)
    for tokens in range(100, 5000, 50):
        fleet.estimates.prefilled("prefill-0", tokens, tokens * 1e-3)
        fleet.estimates.prefilled("prefill-1", tokens, tokens * 1e-5)
    assert [fleet.choose(prompt_traits(number, -number)).prefill for number in range(1, 5)] == [fleet.prefills[1]] * 4


def test_cost_spreads_answers_over_decode_instances() -> None:
    fleet = Fleet("cost", 1, 2)
    fleet.decodes[0].load.num_decodes = 20
    assert fleet.choose(prompt_traits(1)).decode is fleet.decodes[1]


# By name.


class Last(LegPolicy):
    """A policy of somebody else's."""

    def score(self, asked: PromptTraits, leg: str, targets: list[PolicyInstance]) -> list[float]:  # type: ignore[override]
        return [-float(place) for place in range(len(targets))]


def test_a_policy_of_ones_own_goes_by_module_and_class() -> None:
    assert isinstance(Last, type)
    fleet = Fleet(f"{__name__}:Last", 2, 2)
    choice: Choice[PolicyInstance] = fleet.choose(prompt_traits(1))
    assert (choice.prefill, choice.decode) == (fleet.prefills[1], fleet.decodes[1])


def test_all_names_are_found_and_others_told_of_the_nearest() -> None:
    assert {"cost", "round_robin"} <= set(policy_names())
    for name in policy_names():
        assert issubclass(find_policy(name), Policy)
    with pytest.raises(UnknownName, match="did you mean 'least_loaded'"):
        find_policy("least_load")
    with pytest.raises(ConfigError, match="must be a kvferry Policy"):
        find_policy("kvferry.router.instances.load:InstanceLoad")


class Patient(Last):
    @dataclass(frozen=True)
    class Settings:
        max_s: float = float("inf")


def test_a_policy_s_own_defaults_are_its_own_affair() -> None:
    assert read_settings("x", Patient, []).max_s == float("inf")
    with pytest.raises(ConfigError, match="max_s must be"):
        read_settings("x", Patient, ["max_s=inf"])


def test_options_are_checked() -> None:
    assert read_settings("cost", find_policy("cost"), ["pressure=0.5"]).pressure == 0.5
    assert read_settings("session", find_policy("session"), ["max-sessions=5"]).max_sessions == 5
    with pytest.raises(UnknownName, match="did you mean 'pressure'"):
        read_settings("cost", find_policy("cost"), ["presure=1"])
    with pytest.raises(ConfigError, match="pressure"):
        read_settings("cost", find_policy("cost"), ["pressure=much"])
    with pytest.raises(ConfigError, match="name=value"):
        read_settings("cost", find_policy("cost"), ["pressure"])
    with pytest.raises(UnknownName, match="known: none"):
        read_settings("random", find_policy("random"), ["seed=1"])


def test_a_context_is_all_that_a_policy_needs() -> None:
    fleet = Fleet("cost")
    assert isinstance(fleet.policy.context, PolicyContext)
    assert make_policy("random", fleet.policy.context).context is fleet.policy.context


def test_a_policy_with_the_former_name_of_on_choice_used_is_told() -> None:
    class Former(LegPolicy):
        used: ClassVar[list[str]] = []

        def score(self, traits: PromptTraits, leg: object, targets: object) -> list[float]:
            raise NotImplementedError

        def placed(self, traits: PromptTraits, choice: Choice[PolicyInstance]) -> None:  # type: ignore[override]
            super().placed(traits, choice)
            self.used.append(choice.decode.name)

    fleet = Fleet("round_robin", 0, 2)
    choice = fleet.choose(prompt_traits(1))
    policy = Former(fleet.policy.context, None)
    policy.on_choice_used(prompt_traits(1), choice)
    assert policy.used == [choice.decode.name]
    assert choice.decode.load.last_turn == 1
