"""Counters of a store, and the blocks that came and went."""

from __future__ import annotations

import logging

import pytest

from kvferry.store.activity import Changes, CombinedActivity, StoreActivity


def test_counters_are_added() -> None:
    activity = StoreActivity("CPU")
    activity.count(stored_blocks=2)
    activity.count(stored_blocks=1, dropped_blocks=4)
    assert activity.counts() == {"stored_blocks": 3.0, "dropped_blocks": 4.0}


def test_changes_are_recorded_from_watch_on_and_taken_once() -> None:
    activity = StoreActivity("CPU")
    activity.stored([b"before"])
    assert activity.take_changes() == []
    activity.watch()
    activity.stored([b"a", b"b"])
    activity.removed([b"a", b"c"])
    assert activity.take_changes() == [Changes("CPU", [b"b"], [b"a", b"c"])]
    assert activity.take_changes() == []


def test_the_last_change_of_a_block_counts() -> None:
    activity = StoreActivity("CPU")
    activity.watch()
    activity.removed([b"a"])
    activity.stored([b"a"])
    assert activity.take_changes() == [Changes("CPU", [b"a"], [])]


def test_parts_report_their_own_changes() -> None:
    parts = [StoreActivity("CPU"), StoreActivity("STORAGE")]
    combined = CombinedActivity(parts)
    combined.watch()
    parts[1].stored([b"x"])
    combined.count(promoted_blocks=1)
    assert combined.take_changes() == [Changes("STORAGE", [b"x"], [])]
    assert combined.counts() == {"promoted_blocks": 1.0}


@pytest.mark.parametrize(("interval_s", "times"), [(1000.0, 1), (-1.0, 3)])
def test_a_full_store_is_told_of_now_and_then(caplog: pytest.LogCaptureFixture, interval_s: float, times: int) -> None:
    activity = StoreActivity("CPU", warning_interval_s=interval_s)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            activity.warn_full(OSError("no room"))
    assert caplog.messages == ["blocks are not kept: no room"] * times
