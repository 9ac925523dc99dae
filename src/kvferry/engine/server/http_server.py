"""Serves an application over HTTP with uvicorn, and ends in stages.

    drain   no new connection or request is taken; running requests may end
    abort   after the grace period, or at a second signal: running requests end with an error that says why
    close   connections that are still open are cut

uvicorn's own signal handling raises the signal anew once it is done, which would end the process before the engine
has given back what it holds; so signals are handled here.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from kvferry.core.errors import ConfigError
from kvferry.engine.server.app import build_app
from kvferry.engine.server.config import ServerConfig
from kvferry.engine.server.engine_protocol import EngineFront
from kvferry.engine.server.lifecycle import Lifecycle

OnListening = Callable[[str, int], None]
"""Told the host and the real port once connections are accepted."""

_CLOSE_S = 5
"""Seconds between abort and close."""

_BACKLOG = 2048


async def serve(
    front: EngineFront,
    config: ServerConfig | None = None,
    *,
    seed: int | None = None,
    on_listening: OnListening | None = None,
    handle_signals: bool = True,
) -> None:
    """Serve `front` until the process is told to end, then return; the engine is the caller's to close.

    SIGINT and SIGTERM begin the end when `handle_signals` (which needs the main thread); a second one cuts it short.
    Raises `ConfigError` when the address cannot be listened on.
    """
    config = config or ServerConfig()
    app = build_app(front, config, seed=seed)
    server = HttpServer(app, app.state.context.lifecycle, config)
    with signals_end(server) if handle_signals else _nothing():
        await server.run(on_listening)


class HttpServer:
    """One listening socket and the connections it brought. `run` once."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, config: ServerConfig) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._server = _StagedServer(_uvicorn_config(app, config), lifecycle, config.shutdown_grace_s)

    async def run(self, on_listening: OnListening | None = None) -> None:
        """Serve until `stop`, then end in stages."""
        listener = listen(self._config.host, self._config.port)
        try:
            serving = asyncio.create_task(self._server.serve(sockets=[listener]))
            try:
                await self._announce(serving, listener, on_listening)
                await serving
            finally:
                self.stop()
                await asyncio.wait([serving])
        finally:
            listener.close()

    def stop(self) -> None:
        """Begin the end. Called from the server's event loop, any number of times."""
        self._server.should_exit = True

    def abort(self) -> None:
        """End running requests now."""
        self.stop()
        self._lifecycle.abort()

    @property
    def stopping(self) -> bool:
        """Whether the end has begun."""
        return self._server.should_exit

    async def _announce(
        self, serving: asyncio.Task[None], listener: socket.socket, on_listening: OnListening | None
    ) -> None:
        host, port = listener.getsockname()[:2]
        started = asyncio.create_task(self._server.accepting.wait())
        await asyncio.wait([serving, started], return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if on_listening is not None and self._server.accepting.is_set():
            on_listening(str(host), int(port))


class _StagedServer(uvicorn.Server):
    """uvicorn's server, with our stages and without its signals."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle, grace_s: float) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle
        self._grace_s = grace_s
        self.accepting = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._lifecycle.drain()
        alarm = asyncio.get_running_loop().call_later(self._grace_s, self._lifecycle.abort)
        try:
            await super().shutdown(sockets)
        finally:
            alarm.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one. Raises `ConfigError` with the reason."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    # Accepted connections inherit it: a token must not wait for the one before to be acknowledged.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener


@contextmanager
def signals_end(server: HttpServer) -> Iterator[None]:
    """SIGINT and SIGTERM stop `server`, a second one aborts what runs. Main thread only."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        (server.abort if server.stopping else server.stop)()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _uvicorn_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=config.access_log,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=int(config.shutdown_grace_s) + _CLOSE_S,
    )
