"""What is decided, from what is measured. Several of these are bugs that scalers of other projects had."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from fleet.scaling.exact import even, poisson, simulate
from kvferry.core.messages.traffic import RequestObservation, TrafficReport
from kvferry.fleet.scaling.demand import Demand
from kvferry.fleet.scaling.predictor import LatencyTargets, Topology
from kvferry.fleet.scaling.scaler import (
    FleetSnapshot,
    Forecast,
    MeasuredTraffic,
    ScalingDecision,
    ScalingMemory,
    TargetShare,
    decide,
)
from kvferry.fleet.scaling.scaling_rules import NOTHING, Counts, ScalingRules
from kvferry.fleet.scaling.traffic import DecodeCapacity, PhaseTimes, Workload
from kvferry.fleet.scaling.traffic_meter import TrafficMeter

TIMES = PhaseTimes(0.02, 1e-4, 0.02, 5e-4, max_sequences=64, chunk_tokens=512)
LENGTHS = [(prompt, output) for _, prompt, output in poisson(1, 1.0, 300, prompt=2000, output=150)]
SWITCHES = frozenset({("prefill", "decode"), ("decode", "prefill")})
RULES = ScalingRules(
    targets=LatencyTargets(ttft_s=1.5, itl_s=0.045),
    min_counts=Counts(1, 1),
    max_counts=Counts(8, 8),
    budget=12,
    goal=0.95,
    cool_down_s=60.0,
    least_requests=20,
)
LONG_AGO = -1e6


def measured(rate: float, lengths: Any = LENGTHS, times: PhaseTimes = TIMES, for_s: float = 300.0) -> MeasuredTraffic:
    demand = Demand([round(rate * 5)] * round(for_s / 5), 5.0)
    return MeasuredTraffic(demand, num_known=200, workload=even(rate, lengths, 1500), times=times)


def memory(prefill: int, decode: int, **more: Any) -> ScalingMemory:
    return ScalingMemory(prefill, decode, **{"changed_at": LONG_AGO, **more})


def settled(
    rules: ScalingRules, state: ScalingMemory, told: MeasuredTraffic, now: float = 0.0, most: int = 20
) -> list[ScalingDecision]:
    """Decisions until nothing changes any more; what is wanted is there at once."""
    found = []
    for _ in range(most):
        found.append(decide(rules, state, told, FleetSnapshot(state.counts), now))
        if found[-1].memory.counts == state.counts:
            return found
        state, now = found[-1].memory, now + 2 * rules.cool_down_s
    raise AssertionError([one.reason for one in found])


def test_the_cheapest_that_keeps_the_goal_is_taken_and_really_keeps_it() -> None:
    for rate in (1.0, 4.0, 8.0, 12.0):
        rules = RULES
        counts = settled(rules, memory(1, 1), measured(rate))[-1].memory.counts
        requests = poisson(7, rate, 3000, prompt=2000, output=150)
        exact = {
            one: simulate(TIMES, rules.targets, Topology(one.prefill, one.decode), requests)[0]
            for one in (counts, Counts(counts.prefill - 1, counts.decode), Counts(counts.prefill, counts.decode - 1))
            if one.prefill and one.decode
        }
        assert exact.pop(counts) >= rules.goal - 0.02
        assert all(share < rules.goal + 0.02 for share in exact.values())


def test_nothing_is_started_for_prompts_that_decode_computes_in_time() -> None:
    """With routers that know the targets, fewer instances keep the goal, and really do."""
    apart, rate = replace(RULES, targets=LatencyTargets(1.0, 0.06)), 2.0
    rules = replace(apart, overflows=True)
    alone = settled(apart, memory(1, 1), measured(rate))[-1].memory.counts
    counts = settled(rules, memory(1, 1), measured(rate))[-1].memory.counts
    assert counts.total < alone.total
    requests = poisson(7, rate, 3000, prompt=2000, output=150)
    topology = Topology(counts.prefill, counts.decode)
    assert simulate(TIMES, rules.targets, topology, requests)[0] < rules.goal
    assert simulate(TIMES, rules.targets, topology, requests, overflows=True)[0] >= rules.goal


def test_of_as_cheap_ones_that_change_as_much_the_one_that_attains_most_is_taken() -> None:
    rules = replace(RULES, overflows=True, goal=0.85)
    told, here = measured(4.0), memory(1, 1)
    outlook = Forecast(rules, [even(4.0, LENGTHS, 1500)], TIMES)
    other, best = outlook.best(Counts(1, 2)).attained, outlook.best(Counts(2, 1)).attained
    assert rules.goal <= other < best
    assert decide(rules, here, told, FleetSnapshot(Counts(1, 1)), 0.0).memory.counts == Counts(2, 1)


def test_the_order_is_role_then_start_then_release() -> None:
    rules = replace(RULES, switches=SWITCHES)
    state, taken, now = memory(1, 2), [], 0.0
    for rate in (2.0, 5.5, 9.0, 9.0, 1.0):
        made = decide(rules, state, measured(rate), FleetSnapshot(state.counts), now)
        taken.append(made.what)
        state, now = made.memory, now + 1000.0
    assert taken == ["hold", "role", "start", "hold", "release"]


def test_an_instance_changes_its_role_before_one_is_started() -> None:
    """Only where it can, and where that costs nothing that is needed."""
    rules = replace(RULES, switches=SWITCHES)
    made = decide(rules, memory(1, 3), measured(6.0), FleetSnapshot(Counts(1, 3)), 0.0)
    assert (made.what, made.memory.counts) == ("role", Counts(2, 2))
    fixed = decide(replace(rules, switches=frozenset()), memory(1, 3), measured(6.0), FleetSnapshot(Counts(1, 3)), 0.0)
    assert (fixed.what, fixed.memory.counts) == ("start", Counts(2, 3))


def test_no_instance_changes_its_role_while_enough_is_kept_as_it_is() -> None:
    """What is predicted knows nothing of prompts that decode instances compute; what was measured does."""
    rules, here = replace(RULES, switches=SWITCHES), FleetSnapshot(Counts(1, 3))

    def what(share: float, num: int = 500) -> str:
        return decide(rules, memory(1, 3), replace(measured(6.0), attained=TargetShare(share, num)), here, 0.0).what

    assert what(0.5) == "role"
    assert what(0.93) == "start"  # the goal is 95 %, and no change of a role is clearly better
    assert what(0.97) == "hold"
    assert what(0.97, RULES.least_requests - 1) == "role"  # not known yet


def test_what_starts_counts_as_there_and_is_not_started_twice() -> None:
    rules = RULES
    first = decide(rules, memory(1, 1), measured(8.0), FleetSnapshot(Counts(1, 1)), 0.0)
    assert first.what == "start"
    for now in (5.0, 10.0, 15.0):
        again = decide(rules, first.memory, measured(8.0), FleetSnapshot(Counts(1, 1)), now)
        assert (again.what, again.memory) == ("hold", first.memory)


def test_more_is_started_for_what_will_have_come_when_it_has_started() -> None:
    """A rate that grows is followed by as long as a start takes."""
    growing = Demand([20 + number for number in range(40)], 5.0)
    assert growing.growth(60.0, 60.0) > growing.growth(60.0, 5.0) > 1.0
    told = replace(measured(5.0), demand=growing)
    slow = decide(RULES, memory(2, 2), told, FleetSnapshot(Counts(2, 2), starts_s=120.0), 0.0).memory.counts
    quick = decide(RULES, memory(2, 2), told, FleetSnapshot(Counts(2, 2), starts_s=1.0), 0.0).memory.counts
    assert slow.total > quick.total


def test_neither_chance_nor_a_burst_nor_a_step_is_a_trend() -> None:
    random = Random(4)
    for _ in range(50):
        wobbling = Demand([sum(random.random() < 0.1 for _ in range(60)) for _ in range(36)], 5.0)
        assert wobbling.growth(60.0, 30.0) < 1.5
    bursts = Demand(([1] * 10 + [60] * 2) * 3, 5.0)
    assert bursts.growth(60.0, 30.0) == 1.0
    for since in range(2, 30):  # requests begin to come, as many as they stay
        came = Demand([0] * (36 - since) + [random.randint(24, 36) for _ in range(since)], 5.0)
        assert came.growth(30.0, 30.0) == 1.0
    assert Demand([], 5.0).growth(60.0, 30.0) == 1.0
    assert Demand([0] * 36, 5.0).growth(60.0, 30.0) == 1.0


def test_capacity_for_bursts_is_held_while_they_recur() -> None:
    """A burst that came a while ago counts as long as its requests do; without it, what it needed is released."""
    rules = RULES
    calm = even(1.0, LENGTHS, 200)
    burst = even(8.0, LENGTHS, 200).arrivals
    both = Workload(
        np.concatenate([burst, calm.arrivals + 60.0]),
        np.concatenate([calm.prompt_tokens, calm.prompt_tokens]),
        np.concatenate([calm.output_tokens, calm.output_tokens]),
        calm.lasts_s + 60.0,
    )
    told = replace(measured(1.0), workload=both)
    needed = settled(rules, memory(1, 1), told)[-1].memory.counts
    assert needed.total > settled(rules, memory(1, 1), measured(1.0))[-1].memory.counts.total
    state = memory(needed.prefill, needed.decode)
    assert decide(rules, state, told, FleetSnapshot(needed), 0.0).what == "hold"
    later = replace(told, workload=both.last(calm.lasts_s))
    assert decide(rules, state, later, FleetSnapshot(needed), 0.0).what == "release"
    young = replace(later, demand=Demand([5] * 6, 5.0))
    assert decide(rules, state, young, FleetSnapshot(needed), 0.0).what == "hold", "who knows what was needed before"
    soon_after = memory(needed.prefill, needed.decode, changed_at=-30.0)
    assert decide(rules, soon_after, later, FleetSnapshot(needed), 0.0).what == "hold"


def test_no_decision_flaps_while_the_same_comes() -> None:
    for rate in (1.0, 2.5, 3.0, 3.5, 5.0, 7.5, 10.0):
        state = settled(RULES, memory(2, 2), measured(rate))[-1].memory
        again = settled(RULES, state, measured(rate), now=1e6)
        assert [one.memory.counts for one in again] == [state.counts], rate


# Bugs that others had.


def test_those_that_stay_have_to_serve_what_the_released_one_served() -> None:
    """dynamo #9294: with N - 1 instances each has N / (N - 1) of what it had; N is not what is left."""
    rules = replace(RULES, goal=0.9)
    for rate in (1.0, 2.0, 4.0, 6.0, 8.0):
        told = measured(rate)
        assert told.times is not None
        outlook = Forecast(rules, [even(rate, LENGTHS, 1500)], told.times)
        for here in (Counts(2, 2), Counts(3, 2), Counts(4, 3)):
            made = decide(rules, memory(here.prefill, here.decode), told, FleetSnapshot(here), 0.0)
            if made.what == "release":
                there = made.memory.counts
                before, after = outlook.best(here), outlook.best(there)
                assert after.prefill_load == pytest.approx(before.prefill_load * here.prefill / there.prefill)
                assert after.attained >= rules.goal


def test_cold_samples_decide_nothing() -> None:
    """dynamo #12430: the first requests of a fleet are slow, and few."""
    cold = replace(measured(8.0), num_known=RULES.least_requests - 1)
    made = decide(RULES, memory(1, 1), cold, FleetSnapshot(Counts(1, 1)), 0.0)
    assert (made.what, made.memory.counts, made.attained) == ("measure", Counts(1, 1), None)


def test_demand_counts_although_nothing_is_finished() -> None:
    """dynamo #8861: a fleet that is so slow that nothing ends looks idle, if ends are counted."""
    times = {"streams": True, "prefill": "p", "decode": "d", "prefill_s": 0.22, "prefill_tokens": 2000}
    ended = [
        RequestObservation(
            -200.0 + one, 2000, 2000, state="done", **times, first_s=0.3, answer_s=3.0, output_tokens=120.0, beside=2.0
        )
        for one in range(40)
    ]  # fmt: skip
    stuck = [RequestObservation(-60.0 + one / 8, 2000, 2000, **times, first_s=0.3) for one in range(480)]
    known = TrafficMeter(5.0, -200.0)
    known.record({"router": TrafficReport(0.0, 520, 0, [*ended, *stuck])}, {}, 0.0, 0.0)
    made = decide(RULES, memory(1, 1), known.measured(DecodeCapacity(), 0.0), FleetSnapshot(Counts(1, 1)), 0.0)
    assert made.what in ("start", "role")


@pytest.mark.parametrize(
    "targets",
    [LatencyTargets(ttft_s=0.01, itl_s=0.045), LatencyTargets(ttft_s=1.5, itl_s=0.001), LatencyTargets(0.01, 0.001)],
)
def test_a_target_out_of_reach_does_not_grow_the_fleet_for_ever(targets: LatencyTargets) -> None:
    """dynamo #6145, #11624: one step takes longer than the target, however many there are."""
    rules = replace(RULES, targets=targets, budget=1000, max_counts=Counts(500, 500))
    made = settled(rules, memory(1, 1), measured(2.0))
    assert made[-1].what == "unreachable"
    assert "95 % cannot be kept within the limits; the best is " in made[-1].reason
    assert made[-1].memory.counts.total <= 6
    enough = settled(replace(rules, targets=RULES.targets), memory(1, 1), measured(2.0))[-1]
    assert made[-1].memory.counts.total <= 2 * enough.memory.counts.total


def test_a_goal_that_the_budget_does_not_allow_is_said_and_approached() -> None:
    rules = replace(RULES, budget=3)
    made = settled(rules, memory(1, 1), measured(9.0))
    assert made[-1].what == "unreachable"
    assert rules.price(made[-1].memory.counts) == 3


def test_one_role_is_no_measure_of_the_other() -> None:
    """aibrix #1211: what is asked of P and of D is never added up or averaged."""
    long_answers = [(50.0, 900.0)] * 50
    made = settled(RULES, memory(3, 1), measured(3.0, long_answers))[-1].memory.counts
    assert made.prefill == 1
    assert made.decode > 1
    long_prompts = [(9000.0, 8.0)] * 50
    rules = replace(RULES, targets=LatencyTargets(3.0, 0.045))
    made = settled(rules, memory(1, 3), measured(3.0, long_prompts))[-1].memory.counts
    assert made.decode == 1
    assert made.prefill > 2


def test_nothing_is_released_while_something_drains_or_starts() -> None:
    """kthena #1589: what drains still has tickets that others need."""
    here = Counts(3, 3)
    assert decide(RULES, memory(3, 3), measured(1.0), FleetSnapshot(here), 0.0).what == "release"
    assert decide(RULES, memory(3, 3), measured(1.0), FleetSnapshot(here, draining=1), 0.0).what == "hold"
    assert decide(RULES, memory(3, 3), measured(1.0), FleetSnapshot(Counts(2, 3)), 0.0).what == "hold"


def test_no_role_is_without_the_other() -> None:
    """grove #676: zero is for both at once, or for none."""
    rules = replace(RULES, min_counts=NOTHING, idle_s=300.0)
    for rate in (0.01, 0.5, 2.0):
        for made in settled(rules, memory(3, 3), measured(rate)):
            counts = made.memory.counts
            assert (counts.prefill > 0) == (counts.decode > 0)
    idle = replace(measured(0.01), idle_s=301.0)
    made = decide(rules, memory(2, 1), idle, FleetSnapshot(Counts(2, 1)), 0.0)
    assert (made.what, made.memory.counts) == ("zero", NOTHING)
    asleep = decide(rules, made.memory, idle, FleetSnapshot(NOTHING), 10.0)
    assert (asleep.what, asleep.memory.counts) == ("hold", NOTHING)
    woken = decide(rules, made.memory, replace(idle, idle_s=0.0, num_waiting=1), FleetSnapshot(NOTHING), 20.0)
    assert (woken.what, woken.memory.counts) == ("wake", Counts(1, 1))
    kept = replace(rules, min_counts=Counts(0, 1))
    assert decide(kept, memory(1, 1), idle, FleetSnapshot(Counts(1, 1)), 0.0).memory.counts != NOTHING


# Limits.


def test_ratios_costs_and_units_are_kept() -> None:
    rules = replace(RULES, fewest_per_decode=0.5, most_per_decode=2.0, cost=Counts(1, 4), budget=20)
    for one in rules.topologies:
        assert 0.5 <= one.prefill / one.decode <= 2.0
        assert one.prefill + 4 * one.decode <= 20
    prices = [rules.price(one) for one in rules.topologies]
    assert prices == sorted(prices)
    units = replace(RULES, unit=Counts(1, 2), min_counts=Counts(0, 0), max_counts=Counts(4, 8), budget=9)
    assert units.topologies == (Counts(1, 2), Counts(2, 4), Counts(3, 6))


def test_counts_beyond_changed_limits_come_back_within() -> None:
    rules = replace(RULES, max_counts=Counts(2, 2))
    made = decide(rules, memory(5, 1), measured(1.0), FleetSnapshot(Counts(5, 1)), 0.0)
    assert (made.what, made.memory.counts) == ("limits", Counts(2, 1))


def test_instances_for_both_phases_are_scaled_alone() -> None:
    rules = replace(RULES, min_counts=Counts(0, 1), max_counts=Counts(0, 8), aggregate=True, goal=0.9)
    found = settled(rules, memory(0, 1), measured(3.0))[-1].memory.counts
    assert found.prefill == 0
    assert found.decode > 1
    requests = poisson(7, 3.0, 3000, prompt=2000, output=150)
    assert simulate(TIMES, rules.targets, Topology(0, found.decode), requests)[0] >= 0.88


def test_a_line_says_what_and_why() -> None:
    made = decide(RULES, memory(1, 1), measured(8.0), FleetSnapshot(Counts(1, 1)), 0.0)
    assert "\n" not in made.reason
    assert made.reason.startswith("1 P + 1 D → ")
    for part in ("TTFT 1.5 s", "ITL 45 ms", "requests/s with 3 P + 2 D", "%"):
        assert part in made.reason
