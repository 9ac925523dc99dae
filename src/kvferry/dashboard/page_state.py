"""The state of a deployment as pages show it: instances, last requests, history, events, read from a `PageSource`.

Nothing is read but by `begin` and `update`. It does not know how many pages are open, nor how they are sent what has
changed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.messages.traffic import FleetPlan, TrafficReport
from kvferry.dashboard.figures import Figures, gauges, increase, read_figures, tiers_of, total
from kvferry.dashboard.series import Point, history, make_point


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


class RecentRequests:
    """The last records of requests by id, at most `max_requests`."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._records: dict[str, tuple[dict[str, Any], bytes]] = {}

    def record(self, decision: dict[str, Any]) -> bool:
        """Keep the record of a request; True if it has changed."""
        name, encoded = str(decision["request_id"]), msgspec.json.encode(decision)
        before = self._records.get(name)
        if before is not None and before[1] == encoded:
            return False
        self._records.pop(name, None)
        self._records[name] = decision, encoded
        while len(self._records) > self._max_requests:
            del self._records[next(iter(self._records))]
        return True

    def list(self) -> list[dict[str, Any]]:
        """All records; the request that changed last comes last."""
        return [decision for decision, _ in self._records.values()]

    def clear(self) -> None:
        """Forget all records."""
        self._records.clear()


class InstanceMetrics:
    """The last metrics of each instance. The more instances there are, the less often they are read."""

    def __init__(self, source: PageSource, clock: Clock, settings: FeedSettings) -> None:
        self._source, self._clock, self._settings = source, clock, settings
        self._figures: dict[str, Figures] = {}
        self._read_at = float("-inf")

    async def read(self, num_instances: int) -> tuple[Figures | None, float]:
        """Read the instances' metrics if it is time; by how much the counters of all grew, and in how many seconds."""
        now = self._clock.monotonic()
        pause_s = max(self._settings.tick_s, num_instances / self._settings.metrics_per_s)
        since = now - self._read_at
        if since < pause_s * 0.99:
            return None, 0.0
        texts = await self._source.metrics()
        before = self._figures
        self._figures = {name: read_figures(text) for name, text in texts.items() if text is not None}
        grown = [increase(before[name], figures) for name, figures in self._figures.items() if name in before]
        self._read_at = now
        return (total(grown), since) if grown else (None, 0.0)

    def shown(self, name: str) -> dict[str, Any]:
        """An instance's gauges and tiers of stores; empty: its metrics were not read."""
        figures = self._figures.get(name)
        return {} if figures is None else {**gauges(figures), "tiers": tiers_of(figures)}


class PageState:
    """Owns the contents of a page's snapshot, and finds out what has changed of it."""

    def __init__(
        self,
        source: PageSource,
        clock: Clock,
        settings: FeedSettings,
        judge: Callable[[TrafficReport, list[dict[str, Any]], FleetPlan | None], str] | None = None,
    ) -> None:
        """`judge`: as in `Feed`."""
        self._source, self._clock, self._settings, self._judge = source, clock, settings, judge
        self._views: list[dict[str, Any]] = []
        self._instances: dict[str, dict[str, Any]] = {}
        self._metrics = InstanceMetrics(source, clock, settings)
        self._points: deque[Point] = deque(maxlen=max(1, round(settings.history_s / settings.tick_s)))
        self._requests = RecentRequests(settings.max_requests)
        self._events: deque[PageEvent] = deque(maxlen=settings.max_events)
        self._plan: FleetPlan | None = None
        self._models: list[str] = []
        self._verdict = ""
        self._judged_at = self._updated_at = float("-inf")

    @property
    def is_outdated(self) -> bool:
        """True if updates were left out, as no page was open."""
        return self._clock.monotonic() - self._updated_at > 2 * self._settings.tick_s

    async def begin(self) -> None:
        """Start again from empty state, as no page was open for a while."""
        settings = self._settings
        report = await self._source.traffic(settings.history_s)
        self._points.clear()
        self._points.extend(history(report.now, settings.history_s, settings.tick_s, report.requests))
        self._metrics = InstanceMetrics(self._source, self._clock, settings)
        self._requests.clear()
        self._instances = {}
        self._judged_at = float("-inf")
        self._models = await self._source.models()
        for decision in reversed(await self._source.decisions(settings.max_requests)):
            self._requests.record(decision)
        await self.update(is_first=True)

    async def update(self, *, is_first: bool = False) -> dict[str, Any]:
        """All changes since the last update."""
        settings, now = self._settings, self._clock.wall()
        seconds = settings.tick_s if is_first else max(0.001, self._clock.monotonic() - self._updated_at)
        self._updated_at = self._clock.monotonic()
        figures, figure_seconds = await self._metrics.read(len(self._instances))
        changed, events = self._compare(await self._source.instances(), now, is_first=is_first)
        report = await self._source.traffic(settings.history_s)
        requests = []
        if not is_first:
            for decision in reversed(await self._source.decisions(settings.max_changes)):
                if self._requests.record(decision):
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
            shown |= self._metrics.shown(name)
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

    async def _compare_plan(self) -> list[PageEvent]:
        plan = await self._source.plan()
        before, self._plan = self._plan, plan
        if plan is None or plan == before:
            return []
        reported = set() if before is None else {(decided.at, decided.what) for decided in before.decisions}
        return [
            PageEvent(decided.at, f"scaling: {decided.what} ({decided.reason})")
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

    def snapshot(self) -> dict[str, Any]:
        """All that a page shows when it opens."""
        plan = self._plan
        targets = {"ttft_s": plan.ttft_s, "itl_s": plan.itl_s} if plan is not None and plan.ttft_s else None
        return {
            "type": "snapshot",
            "kind": self._source.kind,
            "now": self._clock.wall(),
            "tick_s": self._settings.tick_s,
            "models": self._models,
            "chat": self._settings.has_chat,
            "targets": targets,
            "instances": self._instances,
            "points": list(self._points),
            "requests": self._requests.list(),
            "events": list(self._events),
            "verdict": self._verdict,
        }


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
