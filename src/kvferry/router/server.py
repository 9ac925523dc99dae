"""The router as a process: a listening socket, signals, an orderly end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from kvferry.core.errors import ConfigError
from kvferry.router.app import build_app, build_router
from kvferry.router.config import RouterConfig

_BACKLOG = 2048
_IDLE_CONNECTION_S = 75
"""Longer than clients keep theirs, so that they are the ones to close, and never send into a closing connection."""


def run_router(
    config: RouterConfig,
    *,
    host: str,
    port: int,
    on_ready: Callable[[dict[str, Any]], None],
    grace_s: float = 5.0,
) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    `on_ready` is called with {"url": …} when requests are answered. At the end, requests under way have `grace_s`
    seconds. Raises `ConfigError` when the address cannot be had or the instances named make no router.
    """
    app = build_app(build_router(config))
    with listen(host, port) as listener:
        url = f"http://{_authority(host, listener.getsockname()[1])}"
        server = _Server(_server_config(app, grace_s), lambda: on_ready({"url": url}))
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(server.serve(sockets=[listener]))
    return 0


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that listens. Raises `ConfigError` when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only on connections whose socket says TCP; without it,
    # each small chunk of a stream waits for the client's delayed acknowledgement, 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        address = _authority(host, port)
        raise ConfigError(f"cannot listen on {address}: {reason}; choose another --host or --port") from error
    return listener


class _Server(uvicorn.Server):
    """uvicorn that says when it serves, and ends by itself on a signal rather than dying of it."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def _server_config(app: Any, grace_s: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_keep_alive=_IDLE_CONNECTION_S,
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
