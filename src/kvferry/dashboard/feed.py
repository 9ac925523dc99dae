"""The stream of changes that all open pages get: one snapshot each, then the same deltas for all.

Nothing is computed while no page is open. With one, each tick asks the source for its instances, its last requests and
(more rarely, the more instances there are) the instances' metrics, and sends what has changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.messages.traffic import FleetPlan, TrafficReport
from kvferry.dashboard.page_state import FeedSettings, PageSource, PageState

logger = logging.getLogger(__name__)


class Page:
    """One open page: its deltas, encoded as server-sent events. Made by `Feed.open`, ended by `Feed.close`."""

    def __init__(self, max_lag: int) -> None:
        self.queue: asyncio.Queue[bytes] = asyncio.Queue(max_lag)
        self.is_behind = False
        """True if deltas were lost: the page must connect anew."""

    def put(self, event: bytes) -> None:
        """Queue one delta."""
        if self.queue.full():
            self.is_behind = True
        else:
            self.queue.put_nowait(event)


class Feed:
    """Owns the task that collects changes while pages are open. Used from the server's event loop only."""

    def __init__(
        self,
        source: PageSource,
        clock: Clock,
        settings: FeedSettings = FeedSettings(),  # noqa: B008, frozen
        judge: Callable[[TrafficReport, list[dict[str, Any]], FleetPlan | None], str] | None = None,
    ) -> None:
        """`judge`: one sentence about whether to disaggregate, from requests, instances and plan; called in a
        thread."""
        self._settings, self._state = settings, PageState(source, clock, settings, judge)
        self._pages: set[Page] = set()
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    @property
    def num_pages(self) -> int:
        """Number of open pages."""
        return len(self._pages)

    @property
    def is_full(self) -> bool:
        """True if no further page can be opened."""
        return len(self._pages) >= self._settings.max_pages

    async def open(self) -> tuple[Page, bytes]:
        """A new page and its snapshot, which the page's deltas follow."""
        page = Page(self._settings.max_lag)
        self._pages.add(page)  # before the first await: `is_full` counts it
        try:
            async with self._lock:
                if self._state.is_outdated:
                    await self._state.begin()
                snapshot = encode_event(self._state.snapshot())
                page.queue = asyncio.Queue(self._settings.max_lag)  # what was sent before is in the snapshot
                page.is_behind = False
        except BaseException:
            self.close(page)
            raise
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return page, snapshot

    def close(self, page: Page) -> None:
        """Remove a page; with the last one, the task ends."""
        self._pages.discard(page)
        if not self._pages and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._settings.tick_s)
            try:
                async with self._lock:
                    delta = await self._state.update()
            except Exception:
                # A page must not end because one update failed; the next one comes in a moment.
                logger.exception("the page could not be updated")
                continue
            event = encode_event(delta)
            for page in self._pages:
                page.put(event)


def encode_event(content: dict[str, Any]) -> bytes:
    """A server-sent event with this content as JSON, in one line."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
