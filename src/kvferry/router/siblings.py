"""The other routers of one port, which are asked for what operators want to know of all of them together.

Each of them answers others on a listener of its own, on loopback, for whoever knows their secret.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Self

import msgspec

from kvferry.core.errors import TransferError
from kvferry.core.messages.openai import UnknownRoute
from kvferry.core.messages.traffic import MAX_OBSERVED, TRAFFIC_PATH, TrafficReport
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.headers import find_header
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Handler, Route, Routes
from kvferry.router.app import DECISIONS, DECISIONS_PATH, TRAFFIC_S, Router
from kvferry.router.edge.admin import INSTANCES_PATH
from kvferry.router.edge.summed import summed
from kvferry.router.instances.shared_state import SharedState
from kvferry.router.metrics import CONTENT_TYPE

_SECRET = b"x-kvferry-router"
_TIMEOUT_S = 2.0
_LONGEST = 64 * 2**20


class SiblingRouters:
    """Wraps what one router answers about itself. Owns the connections to the others."""

    def __init__(self, router: Router, state: SharedState) -> None:
        self._router, self._state, self._secret = router, state, state.secret()
        self._client = HttpClient()

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._client.__aexit__(None, None, None)

    def routes(self, page: Iterable[Route] = ()) -> Routes:
        """The routes for clients and operators. `page`: those of the page, if one is served."""
        of_all = {
            "/metrics": self.show_metrics,
            DECISIONS_PATH: self.show_decisions,
            INSTANCES_PATH: self.show_instances,
            TRAFFIC_PATH: self.show_traffic,
        }
        table = self._router.table()
        return Routes(
            [
                replace(one, handler=of_all[one.path]) if one.path in of_all and one.method == "GET" else one
                for one in [*table, *page]
            ],
            self._router.fallback(),
        )

    def own_routes(self) -> Routes:
        """The routes for the other routers, and for whoever looks after this process: about this router alone, and what
        the fleet's controller declares."""
        table = self._router.table()
        reads = [replace(one, handler=self._for_others(one), access="open") for one in table if one.method == "GET"]
        return Routes([*reads, *(one for one in table if one.method == "PUT")])

    def _for_others(self, route: Route) -> Handler:
        async def handle(request: HttpRequest, response: Response) -> None:
            told = find_header(request.headers, _SECRET) or b""
            if not (request.caller.is_operator or hmac.compare_digest(told, self._secret)):
                raise UnknownRoute(f"Invalid URL ({request.method} {request.path[:200]})")
            await route.handler(request, response)

        return route.handler if route.access == "open" else handle

    async def show_metrics(self, request: HttpRequest, response: Response) -> None:
        """GET /metrics: of all routers together."""
        texts = await self._ask_all("/metrics")
        text = self._router.metrics_text()
        if texts:
            text = await asyncio.to_thread(summed, [text, *texts])
        response.send(
            200, text + await self._router.instances_metrics(request), [(b"content-type", CONTENT_TYPE.encode())]
        )

    async def show_decisions(self, request: HttpRequest, response: Response) -> None:
        """GET /kvferry/decisions?limit=100: the last of all routers, the newest first."""
        response.send_json(json.dumps({"decisions": await self.decisions(request.number("limit", DECISIONS))}).encode())

    async def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The records of the last requests of all routers, the newest first."""
        own = self._router.services.chooser.decisions.encode(limit)
        found = [
            decision
            for text in (own, *await self._ask_all(f"{DECISIONS_PATH}?limit={limit}"))
            for decision in json.loads(text)["decisions"]
        ]
        found.sort(key=lambda decision: decision["timings"].get("routed") or 0.0, reverse=True)
        return found[:limit]

    async def show_traffic(self, request: HttpRequest, response: Response) -> None:
        """GET /kvferry/traffic?seconds=300: of all routers together."""
        limit, seconds = request.number("limit", MAX_OBSERVED), request.number("seconds", TRAFFIC_S)
        response.send_json(msgspec.json.encode(await self.traffic(seconds, limit)))

    async def traffic(self, seconds: float, limit: int = MAX_OBSERVED) -> TrafficReport:
        """The requests of all routers in the last `seconds`, at most `limit`, the oldest first."""
        services = self._router.services
        own = services.chooser.traffic.encode(services.clock.wall(), seconds, limit)
        texts = [own, *await self._ask_all(f"{TRAFFIC_PATH}?seconds={int(seconds)}&limit={limit}")]
        reports = [msgspec.json.decode(one, type=TrafficReport) for one in texts]
        requests = sorted((one for each in reports for one in each.requests), key=lambda one: one.arrived)
        return TrafficReport(
            now=reports[0].now,
            num_arrived=sum(report.num_arrived for report in reports),
            num_waiting=sum(report.num_waiting for report in reports),
            requests=requests[max(0, len(requests) - limit) :],
        )

    async def show_instances(self, request: HttpRequest, response: Response) -> None:
        """GET /kvferry/instances: as this router sees them, with the requests of all."""
        views = await self.instances(with_addresses=request.caller.is_operator)
        response.send_json(json.dumps({"instances": views}).encode())

    async def instances(self, *, with_addresses: bool = False) -> list[dict[str, Any]]:
        """All instances as this router sees them, with the requests of all routers."""
        in_flight = Counter[str]()
        for text in await self._ask_all(INSTANCES_PATH):
            in_flight.update({one["name"]: one["in_flight"] for one in json.loads(text)["instances"]})
        self._router.membership.catch_up()
        views = self._router.views(with_addresses=with_addresses)
        for view in views:
            view["in_flight"] += in_flight[view["name"]]
        return views

    async def _ask_all(self, target: str) -> list[bytes]:
        """The bodies of those other routers that answer with 200 in time."""
        answers = await asyncio.gather(*(self._ask(url, target) for url in self._state.others().values()))
        return [one for one in answers if one is not None]

    async def _ask(self, url: str, target: str) -> bytes | None:
        try:
            status, _, body = await self._client.ask(
                Origin.parse(url),
                "GET",
                target,
                timeout_s=_TIMEOUT_S,
                headers=[(_SECRET, self._secret)],
                max_bytes=_LONGEST,
            )
        except TransferError:
            return None
        return body if status == 200 else None
