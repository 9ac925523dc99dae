"""A server: its listeners, its connections, and its shutdown in stages.

    drain   no new connections are accepted; idle ones are closed; running requests may finish, and those on their way
    abort   after the grace period, or at a second signal: running requests end with an error that gives the reason
    close   connections that are still open are cut, and handlers awaited

Owns the listeners and the stages of the end; its `Service` counts connections and running handlers, and `check()`
proves that none of them is left. One periodic tick, rather than a timer for each wait, enforces the deadlines of all
connections.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from kvferry.core.errors import LeakError
from kvferry.core.process_exit import shutdown_signals
from kvferry.http.server.acceptor import Acceptor
from kvferry.http.server.config import HttpConfig
from kvferry.http.server.keys import Guard, Side
from kvferry.http.server.lifecycle import Lifecycle
from kvferry.http.server.listen import listen
from kvferry.http.server.routes import Routes
from kvferry.http.server.service import Service

logger = logging.getLogger(__name__)

OnListening = Callable[[str, int], object]
"""Called with the host and the actual port once connections are accepted."""

Bind = Callable[[str, int], socket.socket]
"""Creates a listening socket for an address. A simulation has its own."""

_CLOSE_S = 5.0
"""Seconds between abort and close."""
_LAST_S = 2.0
"""Seconds for the final cleanup, even if requests have used up the grace period."""
_TICK_S = 0.25


class HttpServer:
    """Serves `routes` as `config` says. Call `run` once, on the event loop that it was made for."""

    def __init__(
        self, routes: Routes, config: HttpConfig, lifecycle: Lifecycle | None = None, guard: Guard | None = None
    ) -> None:
        self.config = config
        self.lifecycle = lifecycle or Lifecycle()
        self.service = Service(routes, config, self.lifecycle, guard or Guard.from_config(config))
        self._listeners: list[tuple[socket.socket, Side]] = []
        self._doors: list[Acceptor] = []
        self.ports: tuple[int, ...] = ()
        """The real ports while it serves: the clients', then the admin's if there is one."""
        self._ending, self._aborting = asyncio.Event(), asyncio.Event()
        self._ticking: asyncio.TimerHandle | None = None
        self._grace_until = 0.0

    # Serving.

    def listen(self, bind: Bind = listen) -> None:
        """Take the addresses; connections wait until `run`, which does this itself if it was not done before. `bind`
        makes a listening socket. Raises `ConfigError` if an address cannot be used."""
        config = self.config
        sides: tuple[Side, ...] = ("all",) if config.admin_port is None else ("public", "admin")
        if config.listeners:
            given = [socket.socket(fileno=one) for one in config.listeners]
            self._listeners = list(zip(given, sides, strict=True))
            return
        public = bind(config.host, config.port)
        try:
            admin = [] if config.admin_port is None else [bind(config.admin_host, config.admin_port)]
        except BaseException:
            public.close()
            raise
        self._listeners = list(zip([public, *admin], sides, strict=True))

    async def run(self, on_listening: OnListening | None = None) -> None:
        """Serve until `stop` is called or until cancelled, then shut down in stages. Raises `ConfigError` if an address
        or a TLS file cannot be used."""
        self.service.limit_connections()
        context = self.config.tls_context()
        if not self._listeners:
            self.listen()
        self._doors = [Acceptor(self.service, side, listener, context) for listener, side in self._listeners]
        self._tick()
        try:
            for door in self._doors:
                door.open()
            self.ports = tuple(door.port for door in self._doors)
            if on_listening is not None:
                on_listening(self._doors[0].host, self.ports[0])
            await self._ending.wait()
        finally:
            for door in self._doors:
                door.close()
            await self._end()
            if self._ticking is not None:
                self._ticking.cancel()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in tuple(self.service.connections):
            connection.check(now)
        self._ticking = loop.call_later(_TICK_S, self._tick)

    # The end.

    def stop(self) -> None:
        """Begin the shutdown. Called from the server's event loop; may be called repeatedly."""
        self._ending.set()

    def abort(self) -> None:
        """End running requests now."""
        self._ending.set()
        self._aborting.set()

    @property
    def stopping(self) -> bool:
        """Whether the shutdown has begun."""
        return self._ending.is_set()

    async def within_grace(self, work: Coroutine[Any, Any, object]) -> None:
        """Do this last, after `run`, in what is left of the grace period but for `_LAST_S` at least, and until `abort`.
        Raises what `work` raises."""
        doing, aborting = asyncio.ensure_future(work), asyncio.ensure_future(self._aborting.wait())
        left_s = max(_LAST_S, self._grace_until - asyncio.get_running_loop().time())
        try:
            await asyncio.wait([doing, aborting], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            doing.cancel()
            aborting.cancel()
            await asyncio.wait([doing, aborting])
        if not doing.cancelled():
            doing.result()

    async def _end(self) -> None:
        service, grace_s = self.service, self.config.shutdown_grace_s
        self._ending.set()
        self.lifecycle.drain()
        for connection in tuple(service.connections):
            connection.end_idle()
        self._grace_until = asyncio.get_running_loop().time() + grace_s
        if service.running and grace_s and not self._aborting.is_set():
            logger.info(
                "stopping: %d requests have up to %g s to finish; a second signal ends them now",
                len(service.running),
                grace_s,
            )
        if not await self._quiet_within(grace_s, self._aborting):
            if service.running:
                logger.warning("%d requests did not finish in time, and are ended", len(service.running))
            for connection in tuple(service.running):
                connection.abort_request()
            for door in self._doors:
                door.abort()
            await self._quiet_within(_CLOSE_S)
        for connection in tuple(service.connections):
            connection.abort()
        await self._quiet_within(_CLOSE_S)

    async def _quiet_within(self, seconds: float, unless: asyncio.Event | None = None) -> bool:
        """Wait until no connection and no handler is left; False if the time is over, or `unless` is set, first."""
        quiet = self.service.quiet
        self.service.note_quiet()
        waits = [asyncio.ensure_future(event.wait()) for event in (quiet, unless) if event is not None]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return quiet.is_set()

    def statistics(self) -> dict[str, int]:
        """What is open now, and what has been served and refused so far."""
        return self.service.statistics()

    def check(self) -> None:
        """Raise `LeakError` if something is left after `run`."""
        found = self.statistics()
        if found["connections"] or found["running"] or found["clients"]:
            raise LeakError(f"the HTTP server still has {found}")


class Stoppable(Protocol):
    """Something that signals can stop: `stop` begins the shutdown, `abort` ends running requests."""

    @property
    def stopping(self) -> bool: ...
    def stop(self) -> None: ...
    def abort(self) -> None: ...


@contextmanager
def signals_end(server: Stoppable) -> Iterator[None]:
    """The `shutdown_signals` stop `server`, a second one aborts running requests. Main thread only."""
    loop, numbers = asyncio.get_running_loop(), shutdown_signals()

    def end() -> None:
        (server.abort if server.stopping else server.stop)()

    for number in numbers:
        loop.add_signal_handler(number, end)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
