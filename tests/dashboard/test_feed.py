"""The changes that open pages get."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.dashboard.feed import Feed
from kvferry.dashboard.page_state import FeedSettings
from support.page_source import FakeSource, record
from support.waiting import eventually

FAST = FeedSettings(tick_s=0.02, history_s=10.0)


def content(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    read: dict[str, Any] = json.loads(event[6:])
    return read


async def delta_with(queue: asyncio.Queue[bytes], name: str) -> Any:
    async with asyncio.timeout(10):
        while name not in (delta := content(await queue.get())):
            pass
    return delta[name]


async def test_a_page_gets_a_snapshot_and_then_only_what_changes() -> None:
    source = FakeSource(SYSTEM_CLOCK)
    source.records = [record("a", 1.0)]
    feed = Feed(source, SYSTEM_CLOCK, FAST)
    page, snapshot = await feed.open()
    first = content(snapshot)
    assert list(first["instances"]) == ["prefill-0", "decode-0"]
    assert [request["request_id"] for request in first["requests"]] == ["a"]
    assert len(first["points"]) == 500
    async with asyncio.timeout(10):
        delta = content(await page.queue.get())
    assert delta["instances"] == {}
    assert "requests" not in delta
    source.views[1] |= {"in_flight": 3}
    source.records.append(record("b", 2.0))
    async with asyncio.timeout(10):
        while not (delta := content(await page.queue.get())).get("requests"):
            pass
    assert [request["request_id"] for request in delta["requests"]] == ["b"]
    source.records[-1]["timings"] |= {"done": 9.0}
    assert (await delta_with(page.queue, "requests"))[0]["timings"]["done"] == 9.0
    feed.close(page)


async def test_ten_pages_cost_one_look_each_tick_and_none_costs_nothing() -> None:
    source = FakeSource(SYSTEM_CLOCK)
    feed = Feed(source, SYSTEM_CLOCK, FAST)
    pages = [(await feed.open())[0] for _ in range(10)]
    assert feed.num_pages == 10
    async with asyncio.timeout(10):
        events = [await page.queue.get() for page in pages]
    assert len(set(map(id, events))) == 1
    for page in pages:
        feed.close(page)
    looks = source.num_looks
    assert looks < 10
    await asyncio.sleep(5 * FAST.tick_s)
    assert source.num_looks == looks


async def test_a_page_that_does_not_read_is_behind_and_no_other_is() -> None:
    feed = Feed(FakeSource(SYSTEM_CLOCK), SYSTEM_CLOCK, FAST)
    slow, _ = await feed.open()
    quick, _ = await feed.open()
    for _ in range(FAST.max_lag + 3):
        async with asyncio.timeout(10):
            await quick.queue.get()
    assert slow.is_behind
    assert not quick.is_behind
    feed.close(slow)
    feed.close(quick)


async def test_a_look_that_fails_ends_no_page(caplog: pytest.LogCaptureFixture) -> None:
    source = FakeSource(SYSTEM_CLOCK)
    feed = Feed(source, SYSTEM_CLOCK, FAST)
    page, _ = await feed.open()
    source.failure = RuntimeError("planted")
    await eventually(lambda: "the page could not be updated" in caplog.text, interval_s=FAST.tick_s)
    source.failure = None
    while not page.queue.empty():
        page.queue.get_nowait()
    async with asyncio.timeout(10):
        assert content(await page.queue.get())["type"] == "delta"
    feed.close(page)


async def test_no_more_pages_than_the_limit() -> None:
    feed = Feed(FakeSource(SYSTEM_CLOCK), SYSTEM_CLOCK, FeedSettings(tick_s=0.02, max_pages=1))
    page, _ = await feed.open()
    assert feed.is_full
    feed.close(page)
    assert not feed.is_full
