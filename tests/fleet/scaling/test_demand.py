"""The rate of requests, and its trend."""

from __future__ import annotations

import pytest

from kvferry.fleet.scaling.demand import Demand


def test_nothing_is_known_of_no_bins() -> None:
    demand = Demand([], 10.0)
    assert (demand.known_s, demand.mean(60.0), demand.growth(60.0, 60.0)) == (0.0, 0.0, 1.0)


def test_the_mean_is_of_the_last_bins_that_are_known() -> None:
    demand = Demand([100, 0, 10, 20], 10.0)
    assert demand.known_s == 40.0
    assert demand.mean(20.0) == 1.5
    assert demand.mean(1.0) == 2.0, "at least the last bin"
    assert demand.mean(1e6) == 3.25


def test_a_steady_rate_does_not_grow() -> None:
    assert Demand([50, 52, 49, 51, 50, 48, 51, 50, 49, 52, 50, 51], 15.0).growth(60.0, 60.0) == 1.0


def test_a_rise_is_followed_for_as_long_as_it_is_looked_ahead() -> None:
    rising = Demand([100 + 40 * number for number in range(12)], 15.0)
    near, far = rising.growth(30.0, 30.0), rising.growth(30.0, 120.0)
    assert 1.0 < near < far <= Demand.max_growth


def test_growth_is_bounded() -> None:
    assert Demand([10 + 400 * number for number in range(12)], 15.0).growth(150.0, 3600.0) == Demand.max_growth


@pytest.mark.parametrize("counts", [[100] * 6 + [400] * 6, [0] * 6 + [300] * 6])
def test_a_step_is_no_trend(counts: list[float]) -> None:
    assert Demand(counts, 15.0).growth(60.0, 60.0) == 1.0


def test_a_fall_is_no_growth_and_half_of_the_time_must_be_known() -> None:
    assert Demand([600 - 40 * number for number in range(12)], 15.0).growth(60.0, 60.0) == 1.0
    assert Demand([100, 200, 300, 400, 500], 15.0).growth(60.0, 60.0) == 1.0
    assert Demand([0] * 12, 15.0).growth(60.0, 60.0) == 1.0
