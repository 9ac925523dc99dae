"""The page of one instance that serves by itself: its load and a chat. Requests are listed on a router's page."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kvferry.core.errors import Unavailable
from kvferry.core.messages.traffic import FleetPlan, TrafficReport
from kvferry.dashboard.feed import Feed
from kvferry.dashboard.page_state import FeedSettings
from kvferry.dashboard.routes import PageRoutes
from kvferry.engine.server.context import ServerContext
from kvferry.http.server.routes import Route

_NAME = "this instance"


class InstanceSource:
    """An instance's view of itself; its latencies and rates come from its metrics."""

    kind = "instance"

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def instances(self) -> list[dict[str, Any]]:
        """The instance."""
        is_alive = self._context.engine_client.healthy
        state = "up" if is_alive else "down"
        return [{"name": _NAME, "role": "both", "state": state, "alive": is_alive, "draining": False}]

    async def traffic(self, seconds: float) -> TrafficReport:
        """No requests, as an instance does not remember them."""
        return TrafficReport(self._context.clock.wall(), 0, 0, [])

    async def decisions(self, limit: int) -> list[dict[str, Any]]:
        """None: nothing is chosen here."""
        return []

    async def metrics(self) -> Mapping[str, bytes | None]:
        """The text of GET /metrics."""
        with suppress(Unavailable):
            statistics = await self._context.engine_client.statistics()
            return {_NAME: self._context.metrics.exposition(statistics, "")[0]}
        return {_NAME: None}

    async def plan(self) -> FleetPlan | None:
        """None, as no fleet's controller plans it."""
        return None

    async def models(self) -> list[str]:
        """The names under which clients ask for the model."""
        return list(self._context.engine_client.model_names)


def page_of_instance(context: ServerContext, tick_s: float) -> list[Route]:
    """The routes of an instance's page, which is updated every `tick_s` seconds."""
    settings = FeedSettings(tick_s=tick_s, has_chat=context.config.admin_port is None)
    return PageRoutes(Feed(InstanceSource(context), context.clock, settings)).routes()
