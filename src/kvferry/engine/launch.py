"""One instance as a process: load, serve, end."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import msgspec

from kvferry.core.runtime.process_exit import ShutdownDeadline, shutdown_deadline
from kvferry.core.runtime.threads import run_server
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.async_engine import AsyncEngine
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.engine.overrides import override_model, read_chat_template
from kvferry.engine.server.app import MakePage, serve
from kvferry.engine.server.config import ServerConfig
from kvferry.http.registrar import RegistrarConfig
from kvferry.http.server.listen import authority

log = logging.getLogger(__name__)

Beside = Callable[[AsyncEngine], Coroutine[Any, Any, None]]
"""Serves the engine in another way than over HTTP, until it is cancelled."""


def run_instance(
    *,
    engine: EngineConfig,
    transfer: KVTransferConfig | None,
    served_model_names: tuple[str, ...] = (),
    server: ServerConfig,
    on_progress: Callable[[str, float], None] = lambda what, share: None,
    on_ready: Callable[[dict[str, Any]], None] = lambda ready: None,
    auth_token: str = "",
    registrar: RegistrarConfig | None = None,
    beside: Beside | None = None,
    page: MakePage | None = None,
) -> int:
    """Serve one engine until SIGTERM or SIGINT; returns the exit code, 1 when the engine failed meanwhile.

    `on_ready` gets the URL and the instance's `InstanceFacts` once requests are accepted; the instance is then
    registered at the routers that `registrar` names, until the end. `beside` serves the
    engine in another way too; its end is the instance's. `page`: creates the routes of its page. Main thread only.
    Raises `ConfigError` and `UnsupportedModel` for errors that the user can correct.
    """
    names = served_model_names or (engine.model,)
    parsers = {"tool_call_parser": engine.tool_call_parser, "reasoning_parser": engine.reasoning_parser}
    server = msgspec.structs.replace(
        server, **parsers, default_chat_template_kwargs=engine.default_chat_template_kwargs
    )
    template = None if engine.chat_template is None else read_chat_template(engine.chat_template)
    loaded = Engine(engine, transfer, auth_token=auth_token, on_progress=on_progress)
    override_model(loaded.model, template, engine.override_generation_config)
    _freeze()
    with shutdown_deadline() as limit:
        return run_server(
            limit.run(_serve(AsyncEngine(loaded, names), server, on_ready, registrar, limit, beside, page))
        )


def _freeze() -> None:
    """Exempt all loaded objects from garbage collection, as imported ones are: a full collection, which any large
    request can cause, stops every thread for 0.2 s."""
    gc.collect()
    gc.freeze()


async def _serve(
    engine_client: AsyncEngine,
    server: ServerConfig,
    on_ready: Callable[[dict[str, Any]], None],
    registrar: RegistrarConfig | None,
    limit: ShutdownDeadline,
    beside: Beside | None,
    page: MakePage | None,
) -> int:
    about = engine_client.describe()
    if registrar is not None:
        registrar = replace(registrar, engine_id=about.engine_id)

    def listening(host: str, port: int) -> None:
        on_ready({"url": f"{server.scheme}://{authority(host, port)}", **msgspec.to_builtins(about)})

    engine_client.start()
    try:
        failed = asyncio.create_task(engine_client.failed())
        serving = asyncio.create_task(
            serve(engine_client, server, on_listening=listening, registrar=registrar, page=page)
        )
        also = [] if beside is None else [asyncio.create_task(beside(engine_client))]
        await asyncio.wait([failed, serving, *also], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            log.error("the engine failed; this instance ends")
        if not serving.done():
            serving.cancel()
        for task in (failed, *also):
            task.cancel()
        await asyncio.gather(failed, serving, *also, return_exceptions=True)
        for task in (serving, *also):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        return 0 if engine_client.healthy else 1
    finally:
        limit.begin()
        await engine_client.close()
