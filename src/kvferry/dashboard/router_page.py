"""The page of a router: its instances and requests, and a sentence about them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from kvferry.core.errors import TransferError
from kvferry.core.messages.traffic import FleetPlan, TrafficReport
from kvferry.dashboard.feed import Feed, FeedSettings
from kvferry.dashboard.routes import PageRoutes
from kvferry.http.server.routes import Route
from kvferry.router.app import Router
from kvferry.router.instances.instance import Instance
from kvferry.router.siblings import SiblingRouters

_DEFAULT_TTFT_S, _DEFAULT_ITL_S = 2.0, 0.05
"""The targets of the sentence where the fleet has none, as in `kvferry why`."""


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
        return self._router.services.pools.shared_plan.plan

    async def models(self) -> list[str]:
        """The models of the instances, each once."""
        names: dict[str, None] = {}
        for instance in self._router.services.pools:
            names |= dict.fromkeys(getattr(instance.facts, "model_names", ()))
        return list(names)


def judge(report: TrafficReport, views: list[dict[str, Any]], plan: FleetPlan | None) -> str:
    """The sentence of `kvferry why` about these requests; empty if too few of them have ended."""
    from kvferry.fleet.scaling.predictor import LatencyTargets  # NumPy's linear algebra, which routers do without
    from kvferry.fleet.scaling.scaling_rules import Counts
    from kvferry.fleet.scaling.traffic import DecodeCapacity
    from kvferry.fleet.scaling.verdict import judge as judge_report

    alive = [view for view in views if view.get("alive")]
    decoding = [view for view in alive if view.get("role") == "decode"]
    counts = Counts(len(alive) - len(decoding), len(decoding))
    facts = [view.get("facts") or {} for view in decoding]
    capacity = DecodeCapacity.smallest(
        (int(fact.get("num_kv_tokens") or 0), int(fact.get("max_num_seqs") or 0)) for fact in facts
    )
    ttft_s, itl_s = (plan.ttft_s, plan.itl_s) if plan is not None and plan.ttft_s and plan.itl_s else (0.0, 0.0)
    targets = LatencyTargets(ttft_s or _DEFAULT_TTFT_S, itl_s or _DEFAULT_ITL_S)
    verdict = judge_report(report, counts, targets, capacity=capacity)
    return "" if verdict is None else verdict.sentence()


def page_of_router(router: Router, siblings: SiblingRouters) -> list[Route]:
    """The routes of a router's page."""
    services = router.services
    settings = FeedSettings(tick_s=services.config.page_tick_s)
    feed = Feed(RouterSource(router, siblings), services.clock, settings, judge)
    return PageRoutes(feed).routes()
