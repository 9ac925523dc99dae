"""Answers operators' requests for all routers of a port together, by requests to the sibling routers.

Each router answers its siblings, with which it shares a secret, on a separate listener on loopback.
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


class SiblingRouters:
    """Merges a router's answers with its siblings'. Owns the connections to them."""

    max_answer_bytes = 64 * 2**20
    timeout_s = 2.0

    def __init__(self, router: Router, state: SharedState) -> None:
        self._router, self._state, self._secret = router, state, state.secret()
        self._client = HttpClient()

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._client.__aexit__(None, None, None)

    def routes(self, page: Iterable[Route] = ()) -> Routes:
        """The routes for clients and operators. `page`: the page's routes, if it is served."""
        merged = {
            "/metrics": self.show_metrics,
            DECISIONS_PATH: self.show_decisions,
            INSTANCES_PATH: self.show_instances,
            TRAFFIC_PATH: self.show_traffic,
        }
        table = self._router.table()
        return Routes(
            [
                replace(route, handler=merged[route.path]) if route.path in merged and route.method == "GET" else route
                for route in [*table, *page]
            ],
            self._router.fallback(),
        )

    def own_routes(self) -> Routes:
        """The routes for siblings and for the process's supervisor: this router's own state, and the declarations of
        the fleet's controller."""
        table = self._router.table()
        reads = [
            replace(route, handler=self._guarded(route), access="open") for route in table if route.method == "GET"
        ]
        return Routes([*reads, *(route for route in table if route.method == "PUT")])

    def _guarded(self, route: Route) -> Handler:
        async def handle(request: HttpRequest, response: Response) -> None:
            secret = find_header(request.headers, _SECRET) or b""
            if not (request.caller.is_operator or hmac.compare_digest(secret, self._secret)):
                raise UnknownRoute(f"Invalid URL ({request.method} {request.path[:200]})")
            await route.handler(request, response)

        return route.handler if route.access == "open" else handle

    async def show_metrics(self, request: HttpRequest, response: Response) -> None:
        """GET /metrics: the sums over all routers."""
        texts = await self._fetch_all("/metrics")
        text = self._router.metrics_text()
        if texts:
            text = await asyncio.to_thread(summed, [text, *texts])
        response.send(
            200, text + await self._router.instances_metrics(request), [(b"content-type", CONTENT_TYPE.encode())]
        )

    async def show_decisions(self, request: HttpRequest, response: Response) -> None:
        """GET /kvferry/decisions?limit=100: the last decisions of all routers, the newest first."""
        response.send_json(json.dumps({"decisions": await self.decisions(request.number("limit", DECISIONS))}).encode())

    async def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The records of the last requests of all routers, the newest first."""
        own_decisions = self._router.services.chooser.decisions.encode(limit)
        decisions = [
            decision
            for text in (own_decisions, *await self._fetch_all(f"{DECISIONS_PATH}?limit={limit}"))
            for decision in json.loads(text)["decisions"]
        ]
        decisions.sort(key=lambda decision: decision["timings"].get("routed") or 0.0, reverse=True)
        return decisions[:limit]

    async def show_traffic(self, request: HttpRequest, response: Response) -> None:
        """GET /kvferry/traffic?seconds=300: the traffic of all routers."""
        limit, seconds = request.number("limit", MAX_OBSERVED), request.number("seconds", TRAFFIC_S)
        response.send_json(msgspec.json.encode(await self.traffic(seconds, limit)))

    async def traffic(self, seconds: float, limit: int = MAX_OBSERVED) -> TrafficReport:
        """The requests of all routers in the last `seconds`, at most `limit`, the oldest first."""
        services = self._router.services
        own_traffic = services.chooser.traffic.encode(services.clock.wall(), seconds, limit)
        texts = [own_traffic, *await self._fetch_all(f"{TRAFFIC_PATH}?seconds={int(seconds)}&limit={limit}")]
        reports = [msgspec.json.decode(text, type=TrafficReport) for text in texts]
        requests = sorted(
            (request for report in reports for request in report.requests), key=lambda request: request.arrived
        )
        return TrafficReport(
            now=reports[0].now,
            num_arrived=sum(report.num_arrived for report in reports),
            num_waiting=sum(report.num_waiting for report in reports),
            requests=requests[max(0, len(requests) - limit) :],
        )

    async def show_instances(self, request: HttpRequest, response: Response) -> None:
        """GET /kvferry/instances: this router's view, with the running requests of all routers."""
        views = await self.instances(with_addresses=request.caller.is_operator)
        response.send_json(json.dumps({"instances": views}).encode())

    async def instances(self, *, with_addresses: bool = False) -> list[dict[str, Any]]:
        """All instances in this router's view, with the running requests of all routers."""
        in_flight = Counter[str]()
        for text in await self._fetch_all(INSTANCES_PATH):
            in_flight.update({view["name"]: view["in_flight"] for view in json.loads(text)["instances"]})
        self._router.membership.refresh()
        views = self._router.views(with_addresses=with_addresses)
        for view in views:
            view["in_flight"] += in_flight[view["name"]]
        return views

    async def _fetch_all(self, target: str) -> list[bytes]:
        """The bodies of the siblings that answer with 200 in time."""
        answers = await asyncio.gather(*(self._fetch(url, target) for url in self._state.siblings().values()))
        return [answer for answer in answers if answer is not None]

    async def _fetch(self, url: str, target: str) -> bytes | None:
        try:
            status, _, body = await self._client.ask(
                Origin.parse(url),
                "GET",
                target,
                timeout_s=self.timeout_s,
                headers=[(_SECRET, self._secret)],
                max_bytes=self.max_answer_bytes,
            )
        except TransferError:
            return None
        return body if status == 200 else None
