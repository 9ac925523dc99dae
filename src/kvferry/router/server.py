"""The router as a process: from settings to a server, until a signal."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import uvloop

from kvferry.core.process_end import EndLimit, end_limit
from kvferry.http.config import HttpConfig, InstanceAccess
from kvferry.http.lifecycle import Lifecycle
from kvferry.http.listen import authority
from kvferry.http.server import HttpServer, signals_end
from kvferry.router.app import build_router
from kvferry.router.config import RouterConfig
from kvferry.router.workers import Workers

_GC_THRESHOLDS = (20_000, 20, 50)


def run_router(
    config: RouterConfig,
    http: HttpConfig,
    access: InstanceAccess | None = None,
    *,
    on_ready: Callable[[dict[str, Any]], None],
) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    `on_ready` is called with {"url": …} once requests are answered, by all of `workers`; if there are several, their
    process ids are included. At the end, running requests have the grace period that `http` sets. Raises `ConfigError`
    if the address cannot be used, a file cannot be read, or the given instances are not enough for a router.
    """
    http = replace(http, max_body_bytes=config.max_body_bytes)
    if config.workers > 1:
        return asyncio.run(Workers(config, http, access or InstanceAccess(), on_ready).run())
    with end_limit() as limit:
        return uvloop.run(_serve(config, http, access, on_ready, limit))


def spare_the_collector() -> None:
    """Exclude all current objects from garbage collection, and make it run rarely: requests leave hardly any cycles,
    and looking for them every few hundred objects takes some percent of the CPU time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


async def _serve(
    config: RouterConfig,
    http: HttpConfig,
    access: InstanceAccess | None,
    on_ready: Callable[[dict[str, Any]], None],
    limit: EndLimit,
) -> int:
    router = build_router(config, http, access)
    spare_the_collector()
    server = HttpServer(router.routes(), http, Lifecycle("router"), router.guard)

    async def announce(port: int) -> None:
        await router.health.first_look()
        on_ready({"url": f"{http.scheme}://{authority(http.host, port)}"})

    with signals_end(server):
        async with router.running() as group:
            await server.run(lambda host, port: group.create_task(announce(port)))
            await server.within_grace(router.leave())
            limit.begin()
    return 0
