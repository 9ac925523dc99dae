"""Servers for tests: real sockets, on port 0."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvloop

from kvferry.engine.server.app import build_app
from kvferry.engine.server.config import ServerConfig


class Running:
    """A server in the test's own event loop."""

    def __init__(self, engine_client: Any, config: ServerConfig) -> None:
        app = build_app(engine_client, config)
        self.context = app.context
        self.server = app.server()
        self.listening = asyncio.Event()
        self.url = ""

    def on_listening(self, host: str, port: int) -> None:
        self.url = f"http://{host}:{port}"
        self.listening.set()


@asynccontextmanager
async def running(engine_client: Any, **settings: Any) -> AsyncIterator[Running]:
    """Serve `engine_client` beside the test, and end with it."""
    server = Running(engine_client, ServerConfig(**{"port": 0, "shutdown_grace_s": 0.0, **settings}))
    async with asyncio.TaskGroup() as group:
        group.create_task(server.server.run(server.on_listening))
        await server.listening.wait()
        yield server
        server.server.stop()
    server.server.check()


@contextmanager
def running_in_thread(engine_client: Any, **settings: Any) -> Iterator[str]:
    """Serve `engine_client` on a thread with uvloop, for clients that block; yields the base URL."""
    config = ServerConfig(**{"port": 0, "shutdown_grace_s": 0.0, **settings})
    listening, found = threading.Event(), {}

    async def main() -> None:
        app = build_app(engine_client, config)
        found["loop"], found["server"] = (
            asyncio.get_running_loop(),
            app.server(),
        )

        def on_listening(host: str, port: int) -> None:
            found["url"] = f"http://{host}:{port}"
            listening.set()

        await found["server"].run(on_listening)

    thread = threading.Thread(target=lambda: uvloop.run(main()), daemon=True)
    thread.start()
    assert listening.wait(30)
    try:
        yield found["url"]
    finally:
        found["loop"].call_soon_threadsafe(found["server"].stop)
        thread.join(30)
        assert not thread.is_alive()
