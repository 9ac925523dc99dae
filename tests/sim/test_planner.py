"""Searches whose answers are known: where disaggregation pays, where it does not, and where nothing would do."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvferry.sim.engine import SimInstanceSpec
from kvferry.sim.network import NetworkSpec
from kvferry.sim.planner import (
    Candidate,
    Estimate,
    Planner,
    RouterSettings,
    SearchResult,
    busiest,
    candidates,
    estimate,
)
from kvferry.sim.targets import Targets
from kvferry.sim.times import FitError, KVSize, MachineTimes, StepTimes
from kvferry.sim.traffic import Arrival
from kvferry.sim.world import WorldSpec

STEP = StepTimes(base_s=0.01, prefill_token_s=1e-3, decode_sequence_s=0.001, context_token_s=0.0)
TIMES = MachineTimes(
    model="m",
    machine="none",
    measured="today",
    step=STEP,
    step_error=FitError(0, 0.0, 0.0, 0.0),
    kv=KVSize(2, 1000, 100_000),
)


def _world(candidate: Candidate) -> WorldSpec:
    instance = SimInstanceSpec(times=STEP, num_blocks=2048, max_num_batched_tokens=candidate.chunk)
    return WorldSpec(
        num_prefill=candidate.prefill,
        num_decode=candidate.decode,
        num_both=candidate.both,
        instance=instance,
        network=NetworkSpec(late_share=0.0),
    )


def _plan(
    arrivals: list[Arrival], targets: Targets, budget: int = 4, share: float = 0.95
) -> tuple[Planner, SearchResult]:
    planner = Planner(arrivals, TIMES, targets, _world, share=share)
    return planner, planner.search(budget)


def test_what_a_trace_asks_for() -> None:
    arrivals = [Arrival(float(second), 490, 11) for second in range(11)]
    needs = estimate(arrivals, TIMES, Targets(ttft=1.0, itl=0.02))
    assert needs.prefill_s == pytest.approx(11 * 0.5 / 11)
    assert needs.decode_s == pytest.approx(121 * (0.01 / 10 + 0.001) / 11)  # ten together take 20 ms
    assert needs.alone == 0.0
    assert estimate(arrivals, TIMES, Targets(ttft=0.4)).alone == 1.0


def test_blocks_that_were_there_before_are_not_asked_for_again() -> None:
    same = [Arrival(float(second), 1024, 2, (1, 2)) for second in range(11)]
    other = [replace(one, block_ids=(2 * place, 2 * place + 1)) for place, one in enumerate(same)]
    assert estimate(same, TIMES, Targets()).prefill_s < 0.15 * estimate(other, TIMES, Targets()).prefill_s


def test_only_what_may_keep_up_is_tried() -> None:
    needs = Estimate(prefill_s=2.5, decode_s=0.8, alone=0.0, min_instances=(2.5, 0.8, 3.3))
    assert needs.busy(Candidate(both=4)) == pytest.approx(0.825)
    assert needs.busy(Candidate(prefill=2, decode=2)) == pytest.approx(1.25)
    assert candidates(3, needs, TIMES) == []
    assert [str(one) for one in candidates(4, needs, TIMES)] == [
        "4 plain, chunks of 512",
        "4 plain, chunks of 2048",
        "3P + 1D, chunks of 2048",
    ]
    assert len(candidates(16, needs, TIMES)) == 2 + 3


def test_no_chunk_is_smaller_than_a_full_batch_of_decodes() -> None:
    times = msgspec.structs.replace(TIMES, settings={"max_num_seqs": "4096"})
    needs = estimate([Arrival(0.0, 100, 5)], times, Targets(ttft=1.0))
    assert {one.chunk for one in candidates(4, needs, times)} == {4096}


LONG_ANSWER = [Arrival(0.0, 100, 2000)]
BURST = [Arrival(0.0, 990, 1)] * 10
"""Each prompt takes a second."""


@pytest.mark.parametrize(
    ("arrivals", "targets", "share", "fewest"),
    [
        (LONG_ANSWER, Targets(ttft=1.0, itl=0.012), 0.99, 1),  # 22 s of steps, in 25 s
        (BURST, Targets(e2e=10.5), 0.99, 1),  # nobody waits for a first token
        (BURST, Targets(itl=1.0), 0.99, 1),
        (BURST, Targets(ttft=5.6), 0.5, 1),  # the others may be late
        (BURST, Targets(ttft=5.6), 0.99, 2),
    ],
)
def test_only_what_cannot_keep_the_share_is_ruled_out(
    arrivals: list[Arrival], targets: Targets, share: float, fewest: int
) -> None:
    needs = estimate(arrivals, TIMES, targets, share)
    assert bool(candidates(1, needs, TIMES)) == (fewest == 1)
    found = _plan(arrivals, targets, share=share)[1]
    assert found.holds
    assert found.chosen.candidate.num_instances == fewest


def test_one_instance_is_enough_and_cannot_be_divided() -> None:
    planner, found = _plan([Arrival(2.0 * number, 100, 5) for number in range(10)], Targets(ttft=1.0, itl=0.05))
    assert found.holds
    assert found.chosen.candidate.num_instances == 1
    assert found.reason().startswith("do not disaggregate: 1 plain")
    assert {one.num_instances for one in planner.tried} == {1}


def _mixed() -> list[Arrival]:
    """A prompt of 1.5 s each second, and answers of nearly a second beside them."""
    long = [Arrival(1.0 * number, 1500, 1) for number in range(8)]
    short = [Arrival(0.3 + 0.5 * number, 20, 70) for number in range(16)]
    return sorted([*long, *short], key=lambda one: one.at_s)


@pytest.fixture(scope="module")
def tight() -> SearchResult:
    """Answers that may not wait for the prompts of others."""
    return _plan(_mixed(), Targets(ttft=4.0, itl=0.02), budget=3)[1]


def test_where_prompts_stall_answers_disaggregation_pays(tight: SearchResult) -> None:
    assert str(tight.chosen.candidate) == "2P + 1D, chunks of 2048"
    assert tight.reason().startswith("disaggregate: 2P + 1D")
    assert tight.plain is not None
    assert tight.plain.figures.within < 0.95 <= tight.chosen.figures.within


def test_where_answers_may_wait_plain_instances_are_as_good() -> None:
    _, found = _plan(_mixed(), Targets(ttft=4.0, itl=1.0), budget=2)
    assert not found.chosen.candidate.is_split
    assert found.reason().startswith("do not disaggregate: ")


def test_targets_that_no_number_of_instances_reaches() -> None:
    _, found = _plan([Arrival(2.0 * number, 1000, 5) for number in range(10)], Targets(ttft=0.5), budget=2)
    assert not found.holds
    assert "100.0% of the requests would miss a target even on an idle instance" in found.unreachable()


@pytest.mark.parametrize("targets", [Targets(itl=0.0109), Targets(e2e=0.53)])
def test_no_instance_decodes_faster_than_alone(targets: Targets) -> None:
    assert estimate([Arrival(0.0, 490, 5)], TIMES, targets).alone == 1.0  # 0.5 s, and four steps of 11 ms


def test_requests_that_no_instance_takes() -> None:
    arrivals = [Arrival(2.0 * number, *((100, 2) if number % 2 else (70_000, 40_000))) for number in range(4)]
    needs = estimate(arrivals, TIMES, Targets())
    assert needs.too_long == 0.5
    _, found = _plan(arrivals, Targets(ttft=500.0), budget=1)
    assert not found.holds
    assert found.unreachable().startswith("50.0% of the requests are longer")
    none = _plan([Arrival(0.0, 70_000, 40_000)], Targets(ttft=500.0), budget=1)[1]
    assert "answer no request (refused 400" in none.reason()
    assert none.chosen.tail(none.targets) == float("inf")


def test_what_is_found_first_is_the_cheapest() -> None:
    """Three instances' worth of prefill: fewer are ruled out by the estimate, or fail in the simulator."""
    arrivals = [Arrival(0.15 * number, 400, 1) for number in range(60)]
    planner, found = _plan(arrivals, Targets(ttft=1.0, itl=1.0), budget=8)
    number = found.chosen.candidate.num_instances
    assert found.holds
    assert number in (3, 4)
    assert all(one.figures.within < 0.95 for one in found.tried if one.candidate.num_instances < number)
    assert planner.tried[found.chosen.candidate] is found.chosen


def test_the_grid_has_the_targets_in_its_middle(tight: SearchResult) -> None:
    rows = dict(tight.grid())
    middle = {itl: (plain, split) for itl, plain, split in rows[1.0]}
    assert tight.split is not None
    assert middle[1.0][1] == pytest.approx(tight.split.figures.within)
    for row in rows.values():
        shares = [split for _, _, split in row if split is not None]
        assert shares == sorted(shares)


def test_settings_of_the_router_are_tried_for_what_is_chosen(tight: SearchResult) -> None:
    chosen = tight.by_router[0]
    assert chosen is tight.by_kind
    tried = [one.candidate.router for one in tight.by_router]
    assert tried == [
        RouterSettings(),
        RouterSettings(policy="least_loaded"),  # not `prefix`: no prompt is known to begin like another
        RouterSettings(disaggregate_from="0"),
        RouterSettings(disaggregate_from="20"),
    ]
    assert {replace(one.candidate, router=RouterSettings()) for one in tight.by_router} == {chosen.candidate}
    for one in tight.by_router:
        assert f"({one.figures.within:.1%}, P99" in tight.router_reason()


def test_other_settings_are_taken_only_if_they_are_clearly_better(tight: SearchResult) -> None:
    default, other = tight.by_router[:2]

    def choose(within: float, ttft_p99: float) -> Candidate:
        ttft = msgspec.structs.replace(default.figures.ttft, p99=ttft_p99)
        figures = msgspec.structs.replace(default.figures, within=within, ttft=ttft)
        return replace(tight, by_router=[default, replace(other, figures=figures)]).chosen.candidate

    within, p99 = default.figures.within, default.figures.ttft.p99
    assert choose(within + 0.01, p99) == other.candidate
    assert choose(within - 0.01, p99 / 100) == default.candidate
    assert choose(within, p99) == default.candidate


def test_what_keeps_the_share_is_better_than_what_does_not(tight: SearchResult) -> None:
    plain, split = tight.plain, tight.split
    assert plain is not None
    assert split is not None

    def choose(plain_within: float, split_within: float, split_p99: float) -> bool:
        ttft = msgspec.structs.replace(split.figures.ttft, p99=split_p99)
        itl = msgspec.structs.replace(split.figures.itl, p99=0.0)
        one = replace(plain, figures=msgspec.structs.replace(plain.figures, within=plain_within))
        other = replace(split, figures=msgspec.structs.replace(split.figures, within=split_within, ttft=ttft, itl=itl))
        found = replace(tight, plain=one, split=other, by_router=[])
        assert found.holds
        return found.chosen is other

    assert not choose(0.951, 0.949, 0.0)  # shorter tails do not make up for it
    assert choose(0.949, 0.951, 1e9)


def test_the_busiest_part_of_a_trace() -> None:
    arrivals = [Arrival(at_s, 1, 1) for at_s in (5.0, 10.0, 20.0, 20.1, 20.2)]
    start_s, part = busiest(arrivals, 3)
    assert start_s == 20.0
    assert [one.at_s for one in part] == pytest.approx([0.0, 0.1, 0.2])
    start_s, part = busiest(arrivals, 10)
    assert (start_s, len(part), part[-1].at_s) == (5.0, 5, pytest.approx(15.2))
    assert busiest([Arrival(7.0, 1, 1)] * 9, 4) == (7.0, [Arrival(0.0, 1, 1)] * 4)
