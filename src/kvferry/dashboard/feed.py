"""The stream of changes that all open pages get: one snapshot each, then the same deltas for all.

Nothing is computed while no page is open. With one, each tick asks the source for its instances, its last requests and
(more rarely, the more instances there are) the instances' metrics, and sends what has changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.messages.traffic import FleetPlan, TrafficReport
from kvferry.dashboard.figures import Figures, gauges, increase, read_figures, tiers_of, total
from kvferry.dashboard.series import Point, history, make_point

logger = logging.getLogger(__name__)


class PageSource(Protocol):
    """A server's own view of itself: a router with its instances, or one instance."""

    kind: str
    """`router` or `instance`."""

    async def instances(self) -> list[dict[str, Any]]:
        """All instances as GET /kvferry/instances shows them."""

    async def traffic(self, seconds: float) -> TrafficReport:
        """The requests of the last `seconds`."""

    async def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The last requests as GET /kvferry/decisions shows them, the newest first."""

    async def metrics(self) -> Mapping[str, bytes | None]:
        """The metrics of each instance by its name; None: it did not answer in time."""

    async def plan(self) -> FleetPlan | None:
        """The plan of the fleet's controller, if there is one."""

    async def models(self) -> list[str]:
        """The names under which clients ask for models."""


class FeedSettings(msgspec.Struct, frozen=True):
    """Update interval and size limits of pages. Times in seconds."""

    tick_s: float = 2.0
    history_s: float = 600.0
    max_pages: int = 64
    max_requests: int = 512
    """Requests that a page is shown when it opens."""
    max_changes: int = 64
    """Requests in one tick; at a higher rate, a page shows the newest of them."""
    max_events: int = 200
    max_lag: int = 8
    """Deltas that wait for a slow page before it is disconnected; it then connects again."""
    metrics_per_s: float = 10.0
    """Instances whose metrics are read in a second, at most; at least one tick passes in between."""
    verdict_s: float = 20.0
    has_chat: bool = True
    """False where the page's listener serves no models."""


class PageEvent(msgspec.Struct, frozen=True):
    """One line of what happened. `at`: seconds since 1970; `level`: `info`, `warn` or `error`."""

    at: float
    text: str
    level: str = "info"


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
        self._source, self._clock, self._settings, self._judge = source, clock, settings, judge
        self._pages: set[Page] = set()
        self._task: asyncio.Task[None] | None = None
        self._views: list[dict[str, Any]] = []
        self._instances: dict[str, dict[str, Any]] = {}
        self._figures: dict[str, Figures] = {}
        self._points: deque[Point] = deque(maxlen=max(1, round(settings.history_s / settings.tick_s)))
        self._requests: dict[str, dict[str, Any]] = {}
        self._sent: dict[str, bytes] = {}
        self._events: deque[PageEvent] = deque(maxlen=settings.max_events)
        self._plan: FleetPlan | None = None
        self._models: list[str] = []
        self._verdict = ""
        self._scraped_at = self._judged_at = self._updated_at = float("-inf")
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
                if self._clock.monotonic() - self._updated_at > 2 * self._settings.tick_s:
                    await self._begin()
                snapshot = self._snapshot()
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
                    delta = await self._update()
            except Exception:
                # A page must not end because one update failed; the next one comes in a moment.
                logger.exception("the page could not be updated")
                continue
            event = encode_event(delta)
            for page in self._pages:
                page.put(event)

    async def _begin(self) -> None:
        """Start again from empty state, as no page was open for a while."""
        settings = self._settings
        report = await self._source.traffic(settings.history_s)
        self._points.clear()
        self._points.extend(history(report.now, settings.history_s, settings.tick_s, report.requests))
        self._figures, self._requests, self._sent = {}, {}, {}
        self._instances = {}
        self._scraped_at = self._judged_at = float("-inf")
        self._models = await self._source.models()
        for decision in reversed(await self._source.decisions(settings.max_requests)):
            self._record_request(decision)
        await self._update(is_first=True)

    async def _update(self, *, is_first: bool = False) -> dict[str, Any]:
        """All changes since the last update."""
        settings, now = self._settings, self._clock.wall()
        seconds = settings.tick_s if is_first else max(0.001, self._clock.monotonic() - self._updated_at)
        self._updated_at = self._clock.monotonic()
        figures, figure_seconds = await self._scrape()
        changed, events = self._compare(await self._source.instances(), now, is_first=is_first)
        report = await self._source.traffic(settings.history_s)
        requests = []
        if not is_first:
            for decision in reversed(await self._source.decisions(settings.max_changes)):
                if self._record_request(decision):
                    requests.append(decision)
            point = make_point(report.now, seconds, report.requests, figures, figure_seconds, report.num_waiting)
            self._points.append(point)
        events += await self._compare_plan()
        self._events.extend(events)
        delta: dict[str, Any] = {"type": "delta", "now": now, "instances": changed}
        if requests:
            delta["requests"] = requests
        if events:
            delta["events"] = events
        if not is_first:
            delta["point"] = self._points[-1]
        if await self._update_verdict(report):
            delta["verdict"] = self._verdict
        return delta

    async def _scrape(self) -> tuple[Figures | None, float]:
        """Read the instances' metrics if it is time; by how much the counters of all grew, and in how many seconds."""
        now = self._clock.monotonic()
        pause_s = max(self._settings.tick_s, len(self._instances) / self._settings.metrics_per_s)
        since = now - self._scraped_at
        if since < pause_s * 0.99:
            return None, 0.0
        texts = await self._source.metrics()
        grown = []
        before, self._figures = self._figures, {}
        for name, text in texts.items():
            if text is None:
                continue
            self._figures[name] = read_figures(text)
            if name in before:
                grown.append(increase(before[name], self._figures[name]))
        self._scraped_at = now
        return (total(grown), since) if grown and since != float("inf") else (None, 0.0)

    def _compare(
        self, views: list[dict[str, Any]], now: float, *, is_first: bool
    ) -> tuple[dict[str, Any], list[PageEvent]]:
        """The changed fields of each instance by name (None: it is gone), and the events for them."""
        changed: dict[str, Any] = {}
        events: list[PageEvent] = []
        current: dict[str, dict[str, Any]] = {}
        self._views = views
        for view in views:
            name = str(view["name"])
            shown = {key: value for key, value in view.items() if key not in ("url", "facts")}
            if name in self._figures:
                shown |= {**gauges(self._figures[name]), "tiers": tiers_of(self._figures[name])}
            current[name] = shown
            before = self._instances.get(name)
            difference = (
                shown if before is None else {key: value for key, value in shown.items() if before.get(key) != value}
            )
            if difference:
                changed[name] = difference
            if not is_first:
                events += _events_of(name, before, shown, now)
        for name in self._instances.keys() - current.keys():
            changed[name] = None
            events.append(PageEvent(now, f"{name} was removed"))
        self._instances = current
        return changed, events

    def _record_request(self, decision: dict[str, Any]) -> bool:
        """Keep the record of a request; True if it has changed."""
        name, encoded = str(decision["request_id"]), msgspec.json.encode(decision)
        if self._sent.get(name) == encoded:
            return False
        self._requests.pop(name, None)
        self._requests[name], self._sent[name] = decision, encoded
        while len(self._requests) > self._settings.max_requests:
            oldest = next(iter(self._requests))
            del self._requests[oldest], self._sent[oldest]
        return True

    async def _compare_plan(self) -> list[PageEvent]:
        plan = await self._source.plan()
        before, self._plan = self._plan, plan
        if plan is None or plan == before:
            return []
        reported = set() if before is None else {(decided.at, decided.what) for decided in before.decisions}
        return [
            PageEvent(decided.at, f"scaling: {decided.what} ({decided.why})")
            for decided in plan.decisions
            if (decided.at, decided.what) not in reported
        ]

    async def _update_verdict(self, report: TrafficReport) -> bool:
        """Judge these minutes again if it is time; True if the sentence has changed."""
        now = self._clock.monotonic()
        if self._judge is None or now - self._judged_at < self._settings.verdict_s:
            return False
        self._judged_at = now
        before = self._verdict
        self._verdict = await asyncio.to_thread(self._judge, report, self._views, self._plan)
        return self._verdict != before

    def _snapshot(self) -> bytes:
        plan = self._plan
        targets = {"ttft_s": plan.ttft_s, "itl_s": plan.itl_s} if plan is not None and plan.ttft_s else None
        return encode_event(
            {
                "type": "snapshot",
                "kind": self._source.kind,
                "now": self._clock.wall(),
                "tick_s": self._settings.tick_s,
                "models": self._models,
                "chat": self._settings.has_chat,
                "targets": targets,
                "instances": self._instances,
                "points": list(self._points),
                "requests": list(self._requests.values()),
                "events": list(self._events),
                "verdict": self._verdict,
            }
        )


def _events_of(name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any], now: float) -> list[PageEvent]:
    """The events of an instance's change, in words."""
    if before is None:
        return [PageEvent(now, f"{name} was added ({after.get('role')})")]
    events = []
    if before.get("role") != after.get("role"):
        events.append(PageEvent(now, f"{name}: its role changed from {before.get('role')} to {after.get('role')}"))
    if before.get("state") != after.get("state"):
        level = "info" if after.get("alive") or after.get("draining") else "error"
        events.append(PageEvent(now, f"{name} is {after.get('state')} (before: {before.get('state')})", level))
    if before.get("no_hand_off") != after.get("no_hand_off") and after.get("no_hand_off"):
        events.append(PageEvent(now, f"{name} hands off nothing: {after.get('no_hand_off')}", "warn"))
    return events


def encode_event(content: dict[str, Any]) -> bytes:
    """A server-sent event with this content as JSON, in one line."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
