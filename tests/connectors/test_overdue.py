"""Loads that do not end in their time."""

from __future__ import annotations

from kvferry.connectors.api import Failed, Loaded, Prefilled, Released
from kvferry.connectors.overdue import SPARE_S, OverdueLoads
from kvferry.connectors.ranks import RankReports
from kvferry.core.clock import ManualClock
from kvferry.core.errors import LeaseEnded, TransferTimeout
from kvferry.core.messages.hand_off import PrefillResult

LIMIT_S = 5.0


def overdue_load() -> tuple[OverdueLoads, ManualClock, Failed]:
    """One that has just been reported."""
    clock = ManualClock()
    loads = OverdueLoads(LIMIT_S, clock)
    loads.begin("r")
    assert loads.checked([]) == []
    clock.advance(LIMIT_S + SPARE_S + 1)
    [failed] = loads.checked([])
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, TransferTimeout)
    assert (failed.request_id, bool(failed.kept_as)) == ("r", True)
    return loads, clock, failed


def test_a_load_that_is_overdue_has_failed_and_its_blocks_are_released_when_it_ends() -> None:
    for late in (Loaded("r"), Failed("r", LeaseEnded("late")), Released("r")):
        loads, clock, failed = overdue_load()
        clock.advance(1000)
        assert loads.checked([Prefilled("r", PrefillResult(first_token=1))]) == []
        assert loads.checked([late]) == [Released(failed.kept_as)]
        assert loads.checked([late]) == [late], "it is forgotten"


def test_loads_that_end_in_time_or_are_given_up_are_never_overdue() -> None:
    clock = ManualClock()
    loads = OverdueLoads(LIMIT_S, clock)
    for name in "abc":
        loads.begin(name)
    report = [Loaded("a"), Failed("b", LeaseEnded("gone"))]
    assert loads.checked(report) == report
    loads.forget("c")
    clock.advance(1000)
    assert loads.checked([Released("c")]) == [Released("c")]
    loads, clock, _ = overdue_load()
    loads.forget("r")
    assert loads.checked([Released("r")]) == [Released("r")]


def test_of_several_ranks_those_whose_blocks_are_kept_release_them() -> None:
    ranks = RankReports(3)
    error = TransferTimeout("it does not return")
    ranks.add(0, [Loaded("r")])
    ranks.add(1, [Failed("r", error, "kept")])
    assert ranks.take() == []
    ranks.add(2, [Failed("r", error, "kept")])
    assert ranks.take() == [Failed("r", error, "kept")]
    ranks.add(2, [Released("kept")])
    assert ranks.take() == []
    ranks.add(1, [Released("kept")])
    assert ranks.take() == [Released("kept")]
    ranks.check()
