"""The page of a router: its instances and requests, and a sentence about them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.core.errors import TransferError
from kvferry.core.messages.traffic import FleetPlan, TrafficReport
from kvferry.dashboard.feed import Feed
from kvferry.dashboard.page_state import FeedSettings
from kvferry.dashboard.routes import PageRoutes
from kvferry.http.server.routes import Route
from kvferry.router.app import Router
from kvferry.router.instances.instance import Instance
from kvferry.router.siblings import SiblingRouters

Judge = Callable[[TrafficReport, list[dict[str, Any]], FleetPlan | None], str]
"""A sentence about requests, by the views of the instances and the fleet's plan; empty if there is none to say."""


class RouterSource:
    """`siblings`: asks the other routers of the port too."""

    kind = "router"

    def __init__(self, router: Router, siblings: SiblingRouters) -> None:
        self._router, self._siblings = router, siblings

    async def instances(self) -> list[dict[str, Any]]:
        """All instances, with the requests of all routers."""
        return await self._siblings.instances(with_addresses=True)

    async def traffic(self, seconds: float) -> TrafficReport:
        """The requests of all routers in the last `seconds`."""
        return await self._siblings.traffic(seconds)

    async def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The last requests of all routers, the newest first."""
        return await self._siblings.decisions(limit)

    async def metrics(self) -> Mapping[str, bytes | None]:
        """The metrics of the instances that are up."""
        services = self._router.services
        instances = [instance for instance in services.pools if instance.usable]

        async def ask(instance: Instance) -> bytes | None:
            try:
                status, text = await services.connections.metrics(instance, services.config.health_timeout_s)
            except TransferError:
                return None
            return text if status == 200 else None

        texts = await asyncio.gather(*(ask(instance) for instance in instances))
        return {instance.name: text for instance, text in zip(instances, texts, strict=True)}

    async def plan(self) -> FleetPlan | None:
        """The plan of the fleet's controller."""
        return self._router.services.pools.fleet_plan.plan

    async def models(self) -> list[str]:
        """The models of the instances, each once."""
        names: dict[str, None] = {}
        for instance in self._router.services.pools:
            names |= dict.fromkeys(getattr(instance.facts, "model_names", ()))
        return list(names)


def page_of_router(router: Router, siblings: SiblingRouters, judge: Judge, *, has_chat: bool) -> list[Route]:
    """The routes of a router's page, which shows what `judge` says. `has_chat`: its listener serves models."""
    services = router.services
    settings = FeedSettings(tick_s=services.config.page_tick_s, has_chat=has_chat)
    feed = Feed(RouterSource(router, siblings), services.clock, settings, judge)
    return PageRoutes(feed).routes()
