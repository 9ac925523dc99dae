"""What is published of a store, as ranks report it one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connectors.caching import StoreEvents
from kvferry.core.clock import ManualClock
from kvferry.core.errors import LeakError
from kvferry.store.activity import Changes

pytestmark = pytest.mark.vllm

OURS = [bytes([index]) * 32 for index in range(3)]
THEIRS = [bytes([index]) * 32 for index in range(10, 13)]
NAMES = [int.from_bytes(name[-8:]) for name in THEIRS]
"""As vLLM publishes them, unless it is told otherwise."""
CLOCK = ManualClock(100.0)


@pytest.fixture
def events() -> Any:
    """Of blocks of 4 tokens, on two ranks."""
    from kvferry.adapters.vllm.events import VllmBlockEvents

    return VllmBlockEvents(4, 2, CLOCK)


@pytest.fixture
def view() -> Any:
    request = SimpleNamespace(
        block_hashes=THEIRS,
        all_token_ids=list(range(12)),
        lora_request=None,
        session_id="s",
        mm_features=[],
        cache_salt="salt",
        prompt_embeds=None,
    )
    return SimpleNamespace(request=request, block_hashes=OURS)


def stored(*names: bytes) -> StoreEvents:
    return StoreEvents(stored=list(names), changes=[Changes("STORAGE", list(names), [])])


def removed(*names: bytes) -> StoreEvents:
    return StoreEvents(changes=[Changes("STORAGE", [], list(names))])


def published(events: Any) -> list[tuple[str, int]]:
    return [(type(event).__name__, event.block_hashes[0]) for event in events.take()]


def test_all_that_is_said_of_a_block(events: Any, view: Any) -> None:
    events.expect_saves(view, OURS[:2])
    for _ in range(2):
        events.record(stored(*OURS[:2]))
    first, second = events.take()
    assert (first.parent_block_hash, second.parent_block_hash) == (None, NAMES[0])
    assert (first.token_ids, second.token_ids) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert (first.extra_keys, second.extra_keys) == ([("salt",)], [None])
    assert {event.medium for event in (first, second)} == {"STORAGE"}
    assert (first.block_size, first.session_id) == (4, "s")
    assert not events.has_work()


def test_a_block_is_there_when_all_ranks_have_it(events: Any, view: Any) -> None:
    events.expect_saves(view, OURS[1:2])
    events.record(stored(OURS[1]))
    assert published(events) == []
    assert events.has_work()
    with pytest.raises(LeakError):
        events.check()
    events.record(stored(OURS[1]))
    assert published(events) == [("BlockStored", NAMES[1])]
    events.check()


def test_a_block_that_one_rank_dropped_is_not_there(events: Any, view: Any) -> None:
    events.expect_saves(view, OURS[:1])
    events.record(StoreEvents(dropped=[OURS[0]]))
    events.record(stored(OURS[0]))
    events.record(removed(OURS[0]))
    assert published(events) == []
    assert not events.has_work()


def test_two_requests_save_the_same_block(events: Any, view: Any) -> None:
    for _ in range(2):
        events.expect_saves(view, OURS[:1])
    events.record(stored(OURS[0]))
    events.record(StoreEvents(stored=[OURS[0]]))  # it was there already, which changes nothing
    assert published(events) == []
    events.record(stored(OURS[0]))
    assert published(events) == [("BlockStored", NAMES[0])]
    assert events.has_work()
    events.record(StoreEvents(stored=[OURS[0]]))
    assert published(events) == []
    assert not events.has_work()


def test_a_block_is_gone_once(events: Any, view: Any) -> None:
    events.expect_saves(view, OURS[:1])
    for _ in range(2):
        events.record(stored(OURS[0]))
    events.record(removed(OURS[0], OURS[2]))
    events.record(removed(OURS[0]))
    assert published(events) == [("BlockStored", NAMES[0]), ("BlockRemoved", NAMES[0])]


def test_a_block_is_told_of_each_medium(events: Any, view: Any) -> None:
    events.expect_saves(view, OURS[:1])
    for _ in range(2):
        events.record(stored(OURS[0]))
    for _ in range(2):
        moved = [Changes("CPU", [OURS[0]], []), Changes("STORAGE", [], [OURS[0]])]
        events.record(StoreEvents(changes=moved))
    assert [(type(event).__name__, event.medium) for event in events.take()] == [
        ("BlockStored", "STORAGE"),
        ("BlockRemoved", "STORAGE"),
        ("BlockStored", "CPU"),
    ]


def test_blocks_of_which_nothing_is_reported_are_given_up_in_time(events: Any, view: Any) -> None:
    """Of several connectors one may be lost, and with it the word of what it was to keep."""
    events.expect_saves(view, OURS[:2])
    CLOCK.advance(40.0)
    events.record(stored(OURS[0]))
    CLOCK.advance(40.0)
    assert events.has_work()
    CLOCK.advance(40.0)
    assert not events.has_work()
    events.check()
    for _ in range(3):
        events.record(stored(OURS[0]))  # late, and more often than is right
    assert published(events) == [("BlockStored", NAMES[0])]
    assert not events.has_work()
    events.expect_saves(view, OURS[2:])
    assert events.has_work()


def test_what_is_remembered_is_bounded(view: Any) -> None:
    from kvferry.adapters.vllm.events import VllmBlockEvents

    class BoundedEvents(VllmBlockEvents):
        max_blocks = 2

    events = BoundedEvents(4, 2, CLOCK)
    for name in OURS:
        events.expect_saves(view, [name])
        for _ in range(2):
            events.record(stored(name))
    events.record(removed(*OURS))
    assert [name for kind, name in published(events) if kind == "BlockRemoved"] == NAMES[1:]
