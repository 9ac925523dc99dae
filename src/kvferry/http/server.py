"""A server: its listeners, its connections, and its shutdown in stages.

    drain   no new connections or requests are accepted; idle connections are closed; running requests may finish
    abort   after the grace period, or at a second signal: running requests end with an error that gives the reason
    close   connections that are still open are cut, and handlers awaited

Owns the connections, their number for each client, and the tasks of the handlers. `check()` proves that none of them is
left. One periodic tick, rather than a timer for each wait, enforces the deadlines of all connections.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from kvferry.core.errors import LeakError, Unavailable
from kvferry.core.keys import CHALLENGE_PATH
from kvferry.http.config import HttpConfig
from kvferry.http.connection import ServerConnection
from kvferry.http.door import Door
from kvferry.http.errors import Unauthorized
from kvferry.http.headers import HttpDate
from kvferry.http.keys import Access, Guard, Side
from kvferry.http.lifecycle import Lifecycle
from kvferry.http.listen import listen
from kvferry.http.request import HttpRequest
from kvferry.http.routes import Handler, Routes

logger = logging.getLogger(__name__)

OnListening = Callable[[str, int], object]
"""Told the host and the real port once connections are accepted."""

_CLOSE_S = 5.0
"""Seconds between abort and close."""
_LAST_S = 2.0
"""Seconds for what is done last, also where requests have used up the grace period."""
_TICK_S = 0.25
_SPARE_FILES = 256
"""Descriptors kept for everything that is not a client's connection; half of them all, where there are few."""


class HttpServer:
    """Serves `routes` as `config` says. Call `run` once, on the event loop that it was made for."""

    def __init__(
        self, routes: Routes, config: HttpConfig, lifecycle: Lifecycle | None = None, guard: Guard | None = None
    ) -> None:
        self.config = config
        self.limits = config.limits
        self.max_body_bytes = config.max_body_bytes
        self.access_log = config.access_log
        self.lifecycle = lifecycle or Lifecycle()
        self.date = HttpDate()
        self._tasks: set[asyncio.Task[None]] = set()
        self.loop: asyncio.AbstractEventLoop
        self._listeners: list[tuple[socket.socket, Side]] = []
        self._doors: list[Door] = []
        self.ports: tuple[int, ...] = ()
        """The real ports while it serves: the clients', then the admin's if there is one."""
        self._routes = routes
        self._guard = guard or Guard.from_config(config)
        self._connections: set[ServerConnection] = set()
        self._per_client: Counter[str] = Counter()
        self._most, self._spare = config.limits.http_connections, _SPARE_FILES
        self._ending = asyncio.Event()
        self._aborting = asyncio.Event()
        self._quiet = asyncio.Event()
        self._ticking: asyncio.TimerHandle | None = None
        self._grace_until = 0.0
        self._num_refused = 0
        self._num_served = 0

    # Serving.

    def listen(self) -> None:
        """Take the addresses; connections wait until `run`, which does this itself if it was not done before. Raises
        `ConfigError` if an address cannot be used."""
        config = self.config
        sides: tuple[Side, ...] = ("all",) if config.admin_port is None else ("public", "admin")
        if config.listeners:
            given = [socket.socket(fileno=os.dup(one)) for one in config.listeners]
            self._listeners = list(zip(given, sides, strict=True))
            return
        public = listen(config.host, config.port)
        try:
            admin = [] if config.admin_port is None else [listen(config.admin_host, config.admin_port)]
        except BaseException:
            public.close()
            raise
        self._listeners = list(zip([public, *admin], sides, strict=True))

    async def run(self, on_listening: OnListening | None = None) -> None:
        """Serve until `stop` is called or until cancelled, then shut down in stages. Raises `ConfigError` if an address
        or a TLS file cannot be used."""
        self.loop = asyncio.get_running_loop()
        self._heed_file_limit()
        context = self.config.tls_context()
        if not self._listeners:
            self.listen()
        self._doors = [Door(self, side, listener, context) for listener, side in self._listeners]
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

    def _heed_file_limit(self) -> None:
        """Connections are refused, with an answer, before this process runs out of file descriptors."""
        wanted, limit = self._most, _file_limit(self._most + _SPARE_FILES)
        self._spare = min(_SPARE_FILES, limit // 2)
        self._most = max(1, min(wanted, limit - self._spare))
        if self._most < wanted:
            logger.warning(
                "at most %d connections are served at the same time, not %d: this process may open %d files; raise"
                " the limit (ulimit -n, LimitNOFILE=), or lower --http-connections",
                self._most,
                wanted,
                limit,
            )

    def _tick(self) -> None:
        now = self.loop.time()
        for connection in tuple(self._connections):
            connection.check(now)
        self._ticking = self.loop.call_later(_TICK_S, self._tick)

    # What connections ask.

    @property
    def draining(self) -> bool:
        return self.lifecycle.draining

    @property
    def crowded(self) -> bool:
        return len(self._connections) > self._most + self._spare // 2

    def admit(self, connection: ServerConnection) -> Unavailable | None:
        self._connections.add(connection)
        self._per_client[connection.client] += 1
        most = self.limits.http_client_connections
        if len(self._connections) > self._most:
            where, most = "", self._most
        elif self._per_client[connection.client] > most:
            where = " from this address"
        else:
            return None
        self._num_refused += 1
        return Unavailable(f"{most} connections{where} are open, which is the limit; try again later")

    def started(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)

    def finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self.draining:
            self._note_quiet()

    def forget(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        self._per_client[connection.client] -= 1
        if self._per_client[connection.client] <= 0:
            del self._per_client[connection.client]
        if self.draining:
            self._note_quiet()

    def handler_of(self, request: HttpRequest, side: Side, *, certified: bool) -> Handler:
        self._num_served += 1
        self.lifecycle.require_accepting()
        if request.path == CHALLENGE_PATH and request.method == "GET":
            return self._guard.challenge
        route = self._routes.find(request)
        request.caller = self._guard.admit(route.access, side, request)
        is_known = certified or request.caller.is_signed
        if self.config.tls_verify_clients and not is_known and route.access is not Access.OPEN:
            raise Unauthorized("This server needs a client certificate of an authority in its --tls-ca")
        return route.handler

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
        """After `run`: do this last, in what is left of the grace period but for `_LAST_S` at least, and until `abort`.
        Raises what `work` raises."""
        doing, aborting = asyncio.ensure_future(work), asyncio.ensure_future(self._aborting.wait())
        left_s = max(_LAST_S, self._grace_until - self.loop.time())
        try:
            await asyncio.wait([doing, aborting], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            doing.cancel()
            aborting.cancel()
            await asyncio.wait([doing, aborting])
        if not doing.cancelled():
            doing.result()

    async def _end(self) -> None:
        self._ending.set()
        self.lifecycle.drain()
        for connection in tuple(self._connections):
            connection.end_idle()
        grace_s = self.config.shutdown_grace_s
        self._grace_until = self.loop.time() + grace_s
        if self._tasks and grace_s and not self._aborting.is_set():
            logger.info(
                "stopping: %d requests have up to %g s to finish; a second signal ends them now",
                len(self._tasks),
                grace_s,
            )
        if not await self._quiet_within(grace_s, self._aborting):
            if self._tasks:
                logger.warning("%d requests did not finish in time, and are ended", len(self._tasks))
            self._abort_all()
            await self._quiet_within(_CLOSE_S)
        for connection in tuple(self._connections):
            connection.abort()
        await self._quiet_within(_CLOSE_S)

    def _abort_all(self) -> None:
        reason = self.lifecycle.abort_reason()
        for connection in tuple(self._connections):
            connection.set_abort_reason(reason)
        for task in tuple(self._tasks):
            task.cancel()
        for door in self._doors:
            door.abort()

    async def _quiet_within(self, seconds: float, unless: asyncio.Event | None = None) -> bool:
        """Wait until no connection and no handler is left; False if the time is over, or `unless` is set, first."""
        self._note_quiet()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._quiet, unless) if event is not None]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._quiet.is_set()

    def _note_quiet(self) -> None:
        if not self._connections and not self._tasks:
            self._quiet.set()

    def statistics(self) -> dict[str, int]:
        """What is open now, and what has been served and refused so far."""
        return {
            "connections": len(self._connections),
            "clients": len(self._per_client),
            "running": len(self._tasks),
            "served": self._num_served,
            "refused": self._num_refused,
        }

    def check(self) -> None:
        """Raise `LeakError` if something is left after `run`."""
        if self._connections or self._tasks or self._per_client:
            raise LeakError(f"the HTTP server still has {self.statistics()}")


class Stoppable(Protocol):
    """What signals stop: `stop` begins the shutdown, `abort` ends running requests."""

    @property
    def stopping(self) -> bool: ...
    def stop(self) -> None: ...
    def abort(self) -> None: ...


@contextmanager
def signals_end(server: Stoppable) -> Iterator[None]:
    """SIGINT and SIGTERM stop `server`, a second one aborts running requests. Main thread only."""
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


def _file_limit(wanted: int) -> int:
    """How many file descriptors this process may have, after raising the limit towards `wanted` as far as possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
