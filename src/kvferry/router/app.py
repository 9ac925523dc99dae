"""The router's routes, the checks that every client request passes, and the objects that live as long as the router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.api.dialects.response_store import ResponseStore
from kvferry.api.dialects.translator import TRANSLATED_PATHS, Translator
from kvferry.api.openapi import OPENAPI_PATH, openapi_document
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import QueueFull, RequestError
from kvferry.core.messages.openai import internal_error
from kvferry.core.messages.traffic import MAX_OBSERVED, PLAN_PATH, TRAFFIC_PATH
from kvferry.http.client.access import InstanceAccess
from kvferry.http.headers import KEY_HEADERS
from kvferry.http.server.config import HttpConfig
from kvferry.http.server.keys import Guard
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Route, Routes
from kvferry.http.server.stored_responses import StoredResponses, owner_of
from kvferry.router.body import RequestBody
from kvferry.router.choice.chooser import Chooser
from kvferry.router.choice.event_feeds import EventFeeds
from kvferry.router.client_request import ClientRequest
from kvferry.router.config import RouterConfig
from kvferry.router.edge.admin import INSTANCES_PATH, Admin, view_of_state
from kvferry.router.edge.admission import Admission, Slot
from kvferry.router.edge.endpoints import Endpoints
from kvferry.router.edge.fair_queue import FairQueue
from kvferry.router.edge.fleet_metrics import fleet_metrics
from kvferry.router.edge.tenants import Charge, Tenant, Tenants, count_tokens, priority_of
from kvferry.router.instances.connections import Connections
from kvferry.router.instances.dynamo import DynamoWorkers
from kvferry.router.instances.facts import RouterHealth
from kvferry.router.instances.health import Health
from kvferry.router.instances.instance import Instance, VllmFacts
from kvferry.router.instances.membership import Membership
from kvferry.router.instances.pools import Pools
from kvferry.router.instances.registrations import Registrations
from kvferry.router.instances.shared_state import SharedState
from kvferry.router.metrics import CONTENT_TYPE, Metrics
from kvferry.router.paths import PROMPT_FIELDS
from kvferry.router.protocols.choose import engine_of
from kvferry.router.request.leg import Legs
from kvferry.router.request.next_turn import NextTurns
from kvferry.router.request.relay import Relay
from kvferry.router.request.releases import Releases
from kvferry.router.request.services import Services

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""Status in metrics of requests whose client left before the answer began (as in nginx)."""


DECISIONS_PATH = "/kvferry/decisions"
DECISIONS, TRAFFIC_S = 100, 300
"""Default number of decisions, and default seconds of traffic."""


@dataclass(frozen=True)
class Router:
    """The parts of one router."""

    services: Services
    admission: Admission
    tenants: Tenants
    turns: FairQueue
    health: Health
    endpoints: Endpoints
    responses: ResponseStore
    feeds: EventFeeds
    membership: Membership
    registrations: Registrations
    dynamo: DynamoWorkers
    guard: Guard
    """Guards the servers of this router. Tenants' keys are API keys."""
    state: SharedState

    async def show_health(self, request: HttpRequest, response: Response) -> None:
        """GET /health: 200 if a decode instance was alive at the last check, 503 otherwise."""
        pools = self.services.pools
        counts = {"prefill": pools.prefill.num_usable, "decode": pools.decode.num_usable}
        status, code = ("ok", 200) if pools.decode.num_usable else ("unavailable", 503)
        response.send_json(msgspec.json.encode(RouterHealth(status, counts)), code)

    async def show_metrics(self, request: HttpRequest, response: Response) -> None:
        """GET /metrics: the router's own metrics; with ?instances=all, all instances' metrics too."""
        text = self.metrics_text() + await self.instances_metrics(request)
        response.send(200, text, [(b"content-type", CONTENT_TYPE.encode())])

    def metrics_text(self) -> bytes:
        """The router's own metrics, in Prometheus' text format."""
        pools, chooser, plan = self.services.pools, self.services.chooser, self.services.pools.fleet_plan.plan
        return self.services.metrics.expose(
            pools,
            threshold=chooser.threshold.tokens,
            num_index_entries=chooser.index.statistics().num_entries,
            desired=None if plan is None else plan.desired,
        )

    async def instances_metrics(self, request: HttpRequest) -> bytes:
        """The metrics of all instances, if the request asks for them; else empty."""
        services = self.services
        if request.parameter("instances") != "all":
            return b""
        return await fleet_metrics(services.pools, services.connections, services.config.health_timeout_s)

    async def show_instances(self, request: HttpRequest, response: Response) -> None:
        """GET /kvferry/instances: all instances. Operators also see their addresses and what they report about
        themselves."""
        self.membership.refresh()
        response.send_json(msgspec.json.encode({"instances": self.views(with_addresses=request.caller.is_operator)}))

    def views(self, *, with_addresses: bool = False) -> list[dict[str, Any]]:
        """All instances as clients see them, or with their addresses as operators do."""
        view, pairing = _view_with_addresses if with_addresses else _view, self.services.chooser.pairing
        return [
            view(instance) | {"no_hand_off": pairing.no_hand_off_reason(instance)} for instance in self.services.pools
        ]

    async def show_decisions(self, request: HttpRequest, response: Response) -> None:
        """GET /kvferry/decisions?limit=100: the decisions of the last requests, the newest first."""
        response.send_json(self.services.chooser.decisions.encode(request.number("limit", DECISIONS)))

    async def show_traffic(self, request: HttpRequest, response: Response) -> None:
        """GET /kvferry/traffic?seconds=300: number of requests, their lengths, and the durations of their phases."""
        limit, seconds = request.number("limit", MAX_OBSERVED), request.number("seconds", TRAFFIC_S)
        response.send_json(self.services.chooser.traffic.encode(self.services.clock.wall(), seconds, limit))

    async def show_plan(self, request: HttpRequest, response: Response) -> None:
        """GET /kvferry/plan: the desired instances of the fleet's controller, and its last decisions; {}: no
        controller."""
        self.membership.refresh()
        response.send_json(self.services.pools.fleet_plan.text.encode() or b"{}")

    async def show_api(self, request: HttpRequest, response: Response) -> None:
        """GET /openapi.json: the API of kvferry's engine, as available through this router; vLLM's servers describe
        themselves."""
        if any(isinstance(instance.facts, VllmFacts) for instance in self.services.pools):
            await self.serve(request, response)
        else:
            response.send_json(openapi_document(of_router=True))

    async def serve(self, request: HttpRequest, response: Response) -> None:
        """Serve a client's request on the instances."""
        services, arrived, begun = self.services, self.services.clock.wall(), self.services.clock.monotonic()
        path, _, query = request.target.partition("?")
        slot, admitted = Slot(self.admission, request.client), None
        try:
            public = self.endpoints.admit(request.method, path, query)
            if request.body.complete:
                slot.take(request.body.num_bytes)
                body = request.body.take()
            else:
                body = await request.body.read(slot.grow)
                slot.mark_complete()
            headers = request.headers
            if request.caller.is_known:  # the router's keys are not valid at instances, and are not forwarded
                headers = [header for header in headers if header[0] not in KEY_HEADERS]
            client_request = ClientRequest(
                request.method, request.target, path, headers, request.first, body, request.id.encode(), arrived
            )
            parsed = self.endpoints.read(client_request, public)
            if (renamed := self.endpoints.named(client_request, parsed)) is not client_request:
                client_request, request.id = renamed, renamed.request_id.decode()
            if path in TRANSLATED_PATHS and isinstance(parsed, RequestBody):
                owner = owner_of(request, services.config.tenant_header)
                client_request, parsed = await self.endpoints.translate(client_request, parsed, response, owner)
                slot.take(max(0, len(client_request.body) - len(body)))  # earlier turns are in the store of responses
            if client_request.path in PROMPT_FIELDS:
                services.chooser.traffic.arrive()
            tenant = self.tenants.find(request.caller.name, request.headers, parsed)
            if tenant.is_limited or not self.turns.begin(tenant):
                await self.take_turn(tenant, client_request.path, parsed)
            admitted = tenant
            await self.endpoints.handle(client_request, parsed, response)
        except RequestError as error:
            response.fail(error)
        except Exception:
            # A fault in one request ends this request only.
            logger.exception("request %s failed", request.id)
            response.fail(internal_error(request.id))
        finally:
            if admitted is not None:
                self.turns.end(admitted)
            slot.close()
            seconds = services.clock.monotonic() - begun
            services.metrics.request_done(path, response.status or CLIENT_GONE, seconds)

    async def take_turn(self, tenant: Tenant, path: str, body: RequestBody | bytes | None) -> None:
        """Charge a request to its tenant, and wait until it may be served. Call `turns.end` when it ends. Raises
        `OverLimit`; raises `QueueFull`, and then refunds the charge."""
        charge = self._charge(tenant, path, body) if tenant.is_limited else None
        if self.turns.begin(tenant):
            return
        try:
            await self.turns.wait(tenant, priority_of(body))
        except QueueFull:
            if charge is not None:
                charge.refund()
            raise

    def _charge(self, tenant: Tenant, path: str, body: RequestBody | bytes | None) -> Charge:
        """Charge a request to its tenant. Raises `OverLimit`, and `InvalidRequest` if its tokens cannot be counted."""
        num_tokens = 0.0
        if tenant.tokens is not None:
            num_tokens = count_tokens(body, path, self.services.chooser.estimates.bytes_per_token)
        return self.tenants.charge(tenant, num_tokens)

    def table(self) -> list[Route]:
        """The paths that the router answers itself."""
        return [
            Route("GET", "/health", self.show_health, "open"),
            Route("GET", OPENAPI_PATH, self.show_api, "open"),
            Route("GET", "/metrics", self.show_metrics, "probe"),
            Route("GET", INSTANCES_PATH, self.show_instances, "probe"),
            Route("GET", DECISIONS_PATH, self.show_decisions, "probe"),
            Route("GET", TRAFFIC_PATH, self.show_traffic, "probe"),
            Route("GET", PLAN_PATH, self.show_plan, "probe"),
            *(Route("POST", path, self.serve) for path in TRANSLATED_PATHS),
            *StoredResponses(self.responses, self.services.config.tenant_header).routes(),
            *Admin(self.membership, self.show_instances).routes(),
            *self.registrations.routes(),
        ]

    def fallback(self) -> Route:
        """The route for all other paths."""
        return Route("*", "*", self.serve)

    def routes(self) -> Routes:
        """All routes, for a server."""
        return Routes(self.table(), fallback=self.fallback())

    async def leave(self) -> None:
        """Let instances free the KV that they keep for conversations. Called when the last router of its port shuts
        down, while it is still `running`. Waits for the instances."""
        if self.services.next_turns is not None and not self.state.siblings():
            await self.services.next_turns.release_all()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.TaskGroup]:
        """Run the connections to instances, the health checks, releases, and everything else that is started in the
        task group."""
        try:
            async with self.services.connections, asyncio.TaskGroup() as group:
                self.services.releases.open(group)
                services = self.services
                watching: list[Any] = [self.health, services.legs, self.feeds, self.membership, self.registrations]
                watching.append(self.dynamo)
                if services.next_turns is not None:
                    watching.append(services.next_turns)
                watchers = [group.create_task(owner.watch()) for owner in watching]
                try:
                    yield group
                finally:
                    for watcher in watchers:
                        watcher.cancel()
                    self.responses.close()
                    if services.chooser.tracer is not None:
                        await asyncio.to_thread(services.chooser.tracer.close)
        except ExceptionGroup as errors:  # background tasks do not raise, so this is the error of the body
            raise errors.exceptions[0] from None


def build_router(
    config: RouterConfig,
    http: HttpConfig | None = None,
    access: InstanceAccess | None = None,
    clock: Clock | None = None,
    *,
    state: SharedState | None = None,
    fast_path: bool = True,
) -> Router:
    """Build and connect all parts. `state`: shared with sibling routers; None: a single router. `fast_path`: compiled
    code relays streams where it can. Raises `ConfigError` if the configured instances are not enough for a router, or a
    file cannot be used."""
    http, access = http or HttpConfig(), access or InstanceAccess()
    clock = clock or SYSTEM_CLOCK
    state, pools = state or SharedState(), Pools.empty(clock)
    connections, metrics = Connections(access, http, fast_path=fast_path), Metrics()
    releases = Releases(connections, metrics, config.release_timeout_s)
    services = Services(
        config=config,
        clock=clock,
        pools=pools,
        connections=connections,
        legs=Legs(config, clock, connections),
        relay=Relay(pools, clock),
        releases=releases,
        next_turns=NextTurns(pools, state, clock, releases, keep_while_draining_s=config.keep_while_draining_s)
        if config.keep_for_next_turn
        else None,
        metrics=metrics,
        chooser=Chooser(config, clock, pools),
    )
    admission = Admission(config.max_buffered_bytes, min_unfinished_bytes=config.max_body_bytes)
    turns = FairQueue(config.max_in_flight, config.max_waiting, config.waiting_timeout_s)
    tenants = Tenants.from_config(config, clock)
    health = Health(pools, connections, config, clock)
    membership = Membership(config, pools, connections, state)
    registrations = Registrations(config, pools, connections, clock, membership, state)
    feeds = EventFeeds(pools, services.chooser.index, metrics, config.instance_kv_events)
    responses = ResponseStore(
        None if state.folder is None else state.folder / "responses.sqlite",
        clock,
        max_responses=config.max_stored_responses,
        max_bytes=config.max_stored_responses_bytes,
        ttl_s=config.stored_response_ttl_s,
    )
    endpoints = Endpoints(services, Translator(responses, clock, config.max_body_bytes))
    return Router(
        services=services,
        admission=admission,
        tenants=tenants,
        turns=turns,
        health=health,
        endpoints=endpoints,
        responses=responses,
        feeds=feeds,
        membership=membership,
        registrations=registrations,
        dynamo=DynamoWorkers(config, membership, state, clock, folder=state.folder),
        guard=Guard.from_config(http, tenants.api_keys(), state if state.is_shared else None),
        state=state,
    )


def _view(instance: Instance) -> dict[str, Any]:
    return {
        "name": instance.name,
        "role": instance.role,
        "alive": instance.usable,
        "state": instance.state.value,
        "in_flight": instance.load.num_legs,
        "unit": instance.unit,
        "revision": instance.settings_revision,
        **view_of_state(instance),
        "engine": engine_of(instance.facts) or None,
    }


def _view_with_addresses(instance: Instance) -> dict[str, Any]:
    facts = instance.facts
    shown = msgspec.to_builtins(facts, str_keys=True) if engine_of(facts) else None
    return {**_view(instance), "url": instance.url, "facts": shown}
