"""Bounds of a scaler: which counts are allowed, and which come nearest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.fleet.scaling.predictor import LatencyTargets
from kvferry.fleet.scaling.scaling_rules import NOTHING, Counts, ScalingRules, steps

RULES = ScalingRules(LatencyTargets(1.0, 0.1), Counts(1, 1), Counts(3, 4), budget=6)


@pytest.mark.parametrize(
    ("counts", "allowed"),
    [
        (Counts(1, 1), True),
        (Counts(3, 3), True),
        (Counts(3, 4), False),
        (Counts(0, 2), False),
        (Counts(2, 0), False),
        (Counts(4, 1), False),
        (Counts(1, 5), False),
        (NOTHING, False),
    ],
)
def test_counts_are_within_all_bounds(counts: Counts, allowed: bool) -> None:
    assert RULES.allows(counts) == allowed


def test_some_rules_allow_more() -> None:
    assert replace(RULES, aggregate=True, min_counts=Counts(0, 1)).allows(Counts(0, 2))
    assert replace(RULES, min_counts=NOTHING, idle_s=60.0).allows(NOTHING)
    assert not replace(RULES, idle_s=60.0).allows(NOTHING)
    assert not replace(RULES, cost=Counts(4, 1)).allows(Counts(2, 1)), "ranks count"
    assert not replace(RULES, most_per_decode=1.0).allows(Counts(2, 1))


def test_topologies_are_all_that_is_allowed_the_cheapest_first() -> None:
    prices = [RULES.price(counts) for counts in RULES.topologies]
    assert prices == sorted(prices)
    assert set(RULES.topologies) == {
        Counts(p, d) for p in range(1, 4) for d in range(1, 5) if RULES.allows(Counts(p, d))
    }
    in_units = replace(RULES, unit=Counts(1, 2), budget=100.0)
    assert in_units.topologies == (Counts(1, 2), Counts(2, 4))


def test_the_largest_are_exceeded_by_none() -> None:
    assert RULES.largest([Counts(1, 3), Counts(2, 2), Counts(1, 2), Counts(2, 1)]) == [Counts(2, 2), Counts(1, 3)]


def test_the_nearest_allowed_is_found() -> None:
    assert RULES.nearest(Counts(2, 2)) == Counts(2, 2)
    assert RULES.nearest(Counts(0, 2)) == Counts(1, 2)
    assert RULES.nearest(Counts(9, 9)) in RULES.topologies


def test_roles_change_in_one_step_only_where_instances_can() -> None:
    assert RULES.can_become(Counts(1, 1), Counts(2, 3))
    assert not RULES.can_become(Counts(2, 1), Counts(1, 2))
    switching = replace(RULES, switches=frozenset({("prefill", "decode")}))
    assert switching.can_become(Counts(2, 1), Counts(1, 2))
    assert not switching.can_become(Counts(1, 2), Counts(2, 1))


def test_steps_are_fine_at_first_and_reach_the_end() -> None:
    assert steps(1, 5) == [1, 2, 3, 4, 5]
    assert steps(3, 2) == []
    long = steps(1, 1000)
    assert long[-1] == 1000
    assert len(long) < 120
    assert long[:32] == [*range(1, 33)]
