"""The router as an ASGI application: what answers at which path, and what lives as long as the app."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.core.clock import Clock, SystemClock
from kvferry.router.admission import Admission
from kvferry.router.completions import Completions
from kvferry.router.config import RouterConfig
from kvferry.router.exchange import Services
from kvferry.router.forward import Forward
from kvferry.router.gateway import Gateway, Handler
from kvferry.router.health import Health
from kvferry.router.instance import Instance, InstanceFacts, VllmFacts
from kvferry.router.metrics import CONTENT_TYPE, Metrics
from kvferry.router.plan import PROMPT_FIELDS
from kvferry.router.pools import Pools
from kvferry.router.releases import Releases
from kvferry.router.upstream import Upstream


@dataclass(frozen=True)
class Router:
    """The parts of one router. `app` is what a server serves."""

    services: Services
    admission: Admission
    health: Health

    async def show_health(self, request: Request) -> Response:
        """GET /health: 200 when a decode instance is alive, as of now; 503 otherwise."""
        pools = self.services.pools
        await self.health.look(pools.decode.instances)
        counts = {"prefill": pools.prefill.num_alive, "decode": pools.decode.num_alive}
        return _json({"alive": counts}, status=200 if pools.decode.num_alive else 503)

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self.services.metrics.expose(self.services.pools), media_type=CONTENT_TYPE)

    async def show_instances(self, request: Request) -> Response:
        """GET /kvferry/instances: all instances and what is known of them."""
        return _json({"instances": [_view(instance) for instance in self.services.pools]})

    def endpoint(self, handler: Handler) -> Gateway:
        """`handler` behind the bounds of this router."""
        services = self.services
        return Gateway(handler, self.admission, services.metrics, services.clock, services.config.max_body_bytes)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Connections to instances, the look-out for their health, and releases under way."""
        async with self.services.upstream, asyncio.TaskGroup() as group:
            self.services.releases.open(group)
            await self.health.first_look()
            watcher = group.create_task(self.health.watch())
            try:
                yield
            finally:
                watcher.cancel()


def build_router(config: RouterConfig, clock: Clock | None = None) -> Router:
    """All parts, joined. Raises `ConfigError` when the instances named make no router."""
    pools = Pools.from_config(config)
    upstream, metrics = Upstream(config.connect_timeout_s), Metrics()
    services = Services(
        config=config,
        clock=clock or SystemClock(),
        pools=pools,
        upstream=upstream,
        releases=Releases(upstream, metrics, config.release_timeout_s),
        metrics=metrics,
    )
    admission = Admission(config.max_in_flight, config.max_buffered_bytes)
    health = Health(pools, upstream, config.health_interval_s, protocol=config.protocol)
    return Router(services, admission, health)


def build_app(router: Router) -> Starlette:
    """The application that serves `router`."""
    forward = Forward(router.services)
    split = router.endpoint(Completions(router.services, forward).handle)
    app = Starlette(
        routes=[
            *(Route(path, split, methods=["POST"]) for path in PROMPT_FIELDS),
            Route("/health", router.show_health),
            Route("/metrics", router.show_metrics),
            Route("/kvferry/instances", router.show_instances),
            Route("/{path:path}", router.endpoint(forward.handle)),
        ],
        lifespan=router.lifespan,
    )
    # A path with a slash too many is the instance's to judge; a redirect would name the router's own address.
    app.router.redirect_slashes = False
    return app


_ENGINES: dict[type, str] = {InstanceFacts: "kvferry", VllmFacts: "vllm"}


def _view(instance: Instance) -> dict[str, object]:
    facts = instance.facts
    return {
        "role": instance.role,
        "url": instance.url,
        "alive": instance.alive,
        "in_flight": instance.in_flight,
        "engine": _ENGINES.get(type(facts)),
        "facts": msgspec.to_builtins(facts, str_keys=True) if type(facts) in _ENGINES else None,
    }


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
