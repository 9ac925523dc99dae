"""The router as a process: from settings to a server, until a signal. It may share its port with other routers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.runtime.process_exit import ShutdownDeadline, shutdown_deadline
from kvferry.core.runtime.threads import run_server
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpConfig
from kvferry.http.server.http_server import HttpServer, signals_end
from kvferry.http.server.lifecycle import Lifecycle
from kvferry.http.server.listen import authority
from kvferry.http.server.routes import Route
from kvferry.router.app import Router, build_router
from kvferry.router.config import RouterConfig
from kvferry.router.instances.shared_state import SharedState
from kvferry.router.siblings import SiblingRouters

MakePage = Callable[[Router, SiblingRouters], list[Route]]
"""Makes the routes of the page. The page's package is above the router's, so the router gets this function."""

_GC_THRESHOLDS = (20_000, 20, 50)


def run_router(
    config: RouterConfig,
    http: HttpConfig,
    access: InstanceAccess | None = None,
    *,
    group: Path | None = None,
    page: MakePage | None = None,
    on_ready: Callable[[dict[str, Any]], None],
) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code.

    `page`: creates the routes of the page at `/`, which is served unless `config.page` is off. `group`: the folder that
    all `config.workers` routers of one port share; None: a single router. `on_ready` is called with {"url": …} once
    requests are answered; a router of a group also has its own "health_url". At the end, running requests have the
    grace period that `http` sets. Raises `ConfigError` if the address cannot be used, a file cannot be read, or the
    configured instances are not enough for a router.
    """
    http = msgspec.structs.replace(http, max_body_bytes=config.max_body_bytes)
    with shutdown_deadline() as deadline:
        return run_server(deadline.run(_serve(config, http, access, group, page, on_ready, deadline)))


def freeze_garbage_collector() -> None:
    """Exclude all current objects from garbage collection, and make it run rarely: requests leave hardly any cycles,
    and a collection every few hundred objects takes some percent of the CPU time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


async def _serve(
    config: RouterConfig,
    http: HttpConfig,
    access: InstanceAccess | None,
    group: Path | None,
    page: MakePage | None,
    on_ready: Callable[[dict[str, Any]], None],
    deadline: ShutdownDeadline,
) -> int:
    state = SharedState(group)
    http = msgspec.structs.replace(http, name=state.fact("name", http.name))
    router = build_router(divided(config), http, access, state=state)
    freeze_garbage_collector()
    siblings, ready_fields, listening = SiblingRouters(router, state), dict[str, Any](), asyncio.Event()
    page_routes = page(router, siblings) if page is not None and config.page else []
    server = HttpServer(siblings.routes(page_routes), http, Lifecycle("router"), router.guard)
    own_server = HttpServer(siblings.own_routes(), HttpConfig(port=0), Lifecycle("router"), router.guard)

    def serving(host: str, port: int) -> None:
        if group is not None:
            state.join(ready_fields["health_url"])
        on_ready({"url": f"{http.scheme}://{authority(http.host, port)}", **ready_fields})

    def reachable(host: str, port: int) -> None:
        ready_fields.update(health_url=f"http://{host}:{port}")
        listening.set()

    server.listen()
    with signals_end(server):
        async with router.running() as tasks, siblings:
            background = []
            if group is not None:
                background.append(tasks.create_task(own_server.run(reachable)))
                await listening.wait()
            await router.health.probe_all()
            await server.run(serving)
            state.leave()
            await server.within_grace(router.leave())
            own_server.abort()
            await asyncio.gather(*background)
            deadline.begin()
    state.close()
    return 0


def divided(config: RouterConfig) -> RouterConfig:
    """One router's share of the limits of all `workers`."""
    num = config.workers or 1
    return msgspec.structs.replace(
        config,
        max_in_flight=ceil(config.max_in_flight / num),
        max_waiting=ceil(config.max_waiting / num),
        max_buffered=str(max(config.max_body_bytes, config.max_buffered_bytes // num)),
    )
