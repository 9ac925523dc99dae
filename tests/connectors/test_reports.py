"""What a worker side reports, and loads that do not end in their time."""

from __future__ import annotations

from kvferry.connectors.api import Failed, Loaded, Prefilled, Released, TransferEvent, TransferReport
from kvferry.connectors.ranks import RankReports
from kvferry.connectors.reports import Reports
from kvferry.core.clock import ManualClock
from kvferry.core.errors import LeaseEnded, TransferTimeout
from kvferry.core.messages.hand_off import PrefillResult

LIMIT_S = 5.0


def overdue_load() -> tuple[Reports, ManualClock, Failed]:
    """One that has just been reported."""
    clock = ManualClock()
    reports = Reports(LIMIT_S, clock)
    reports.begin("r")
    assert reports.take() == []
    clock.advance(LIMIT_S + Reports.grace_s + 1)
    [failed] = reports.take()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, TransferTimeout)
    assert (failed.request_id, bool(failed.held_under)) == ("r", True)
    return reports, clock, failed


def taken(reports: Reports, *events: TransferEvent) -> TransferReport:
    """What is reported when these events have happened."""
    reports.add(*events)
    return reports.take()


def test_a_load_that_is_overdue_has_failed_and_its_blocks_are_released_when_it_ends() -> None:
    for late in (Loaded("r"), Failed("r", LeaseEnded("late")), Released("r")):
        reports, clock, failed = overdue_load()
        clock.advance(1000)
        assert taken(reports, Prefilled("r", PrefillResult(first_token=1))) == []
        assert taken(reports, late) == [Released(failed.held_under)]
        assert taken(reports, late) == [late], "it is forgotten"


def test_loads_that_end_in_time_or_are_given_up_are_never_overdue() -> None:
    clock = ManualClock()
    reports = Reports(LIMIT_S, clock)
    for name in "abc":
        reports.begin(name)
    ended = [Loaded("a"), Failed("b", LeaseEnded("gone"))]
    assert taken(reports, *ended) == ended
    reports.forget("c")
    clock.advance(1000)
    assert taken(reports, Released("c")) == [Released("c")]
    reports, clock, _ = overdue_load()
    reports.forget("r")
    assert taken(reports, Released("r")) == [Released("r")]


def test_who_waits_for_reports_is_woken() -> None:
    reports, heard = Reports(LIMIT_S, ManualClock()), list[int]()
    reports.wake = lambda: heard.append(len(reports))
    reports.add(Loaded("a"), Loaded("b"))
    assert heard == [2], "when they are there"


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
