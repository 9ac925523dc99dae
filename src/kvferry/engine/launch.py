"""One instance as a process: load the engine, step it on a thread of its own, serve, end."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from kvferry.core.runtime.process_exit import ShutdownDeadline, shutdown_deadline
from kvferry.core.runtime.threads import Thread, run_server
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.engine.overrides import override_model, read_chat_template
from kvferry.engine.server.app import MakePage, serve
from kvferry.engine.server.config import ServerConfig
from kvferry.engine.stepped import SteppedEngine
from kvferry.http.registrar import RegistrarConfig
from kvferry.http.server.listen import authority

logger = logging.getLogger(__name__)


class AsyncEngine(SteppedEngine):
    """The engine on its own thread, for asyncio callers. Owns the thread."""

    join_s = 10.0
    """Max seconds that `close` waits for a step to end."""

    def __init__(self, engine: Engine, model_names: Sequence[str]) -> None:
        super().__init__(engine, model_names)
        self._wakeup = threading.Event()
        self._thread = Thread(self._run, name="kvferry-engine")

    def start(self) -> None:
        """Begin stepping. Call from the event loop that will listen."""
        super().start()
        self.engine.on_transfer(self.wake)
        self._thread.start()

    async def close(self) -> None:
        """End all requests, the thread and the engine. The engine stays open if its thread does not return from a
        step."""
        self._closing = True
        self.wake()
        await asyncio.to_thread(self._thread.join, self.join_s)
        if self._thread.is_alive():
            logger.error("a step of the engine does not end; the engine is left as it is")
        else:
            self.engine.close()

    @property
    def is_stepping(self) -> bool:
        """True if the thread is alive."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Wake the thread if it waits between two steps."""
        self._wakeup.set()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wakeup.clear()
                self._serve_calls()
                self._deliver(self.engine.step())
                if (rest_s := self._idle_timeout_s()) != 0.0:
                    self._wakeup.wait(rest_s)
        except BaseException as failure:  # noqa: BLE001 - the thread's outermost edge: all waiters must be woken
            self._on_failure(failure)
        finally:
            self._on_end()


Beside = Callable[[AsyncEngine], Coroutine[Any, Any, None]]
"""Serves the engine in another way than over HTTP, until it is cancelled."""


def run_instance(
    *,
    engine: EngineConfig,
    transfer: KVTransferConfig | None,
    served_model_names: tuple[str, ...] = (),
    server: ServerConfig,
    on_progress: Callable[[str, float], None] = lambda phase, share: None,
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
    with shutdown_deadline() as deadline:
        return run_server(
            deadline.run(_serve(AsyncEngine(loaded, names), server, on_ready, registrar, deadline, beside, page))
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
    deadline: ShutdownDeadline,
    beside: Beside | None,
    page: MakePage | None,
) -> int:
    description = engine_client.describe()
    if registrar is not None:
        registrar = replace(registrar, engine_id=description.engine_id)

    def listening(host: str, port: int) -> None:
        on_ready({"url": f"{server.scheme}://{authority(host, port)}", **msgspec.to_builtins(description)})

    engine_client.start()
    try:
        failed = asyncio.create_task(engine_client.failed())
        serving = asyncio.create_task(
            serve(engine_client, server, on_listening=listening, registrar=registrar, page=page)
        )
        also = [] if beside is None else [asyncio.create_task(beside(engine_client))]
        await asyncio.wait([failed, serving, *also], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            logger.error("the engine failed; this instance ends")
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
        deadline.begin()
        await engine_client.close()
