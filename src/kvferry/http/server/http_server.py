"""A server: its listeners, its connections, and its shutdown in stages.

    drain   no new connections are accepted; idle ones are closed; running and incoming requests may finish
    abort   after the grace period, or at a second signal: running requests end with an error that gives the reason
    close   connections that are still open are cut, and handlers awaited

Owns the listeners and the shutdown; its `Service` counts connections and running handlers, and `check()` proves that
none is left. A periodic tick, rather than a timer for each wait, enforces the deadlines of all connections.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from kvferry.core.errors import LeakError
from kvferry.core.runtime.process_exit import shutdown_signals
from kvferry.core.runtime.tasks import BackgroundTasks
from kvferry.http.server.config import HttpConfig
from kvferry.http.server.connection import ServerConnection
from kvferry.http.server.keys import Guard, ListenerKind
from kvferry.http.server.lifecycle import Lifecycle
from kvferry.http.server.listen import BACKLOG, listen
from kvferry.http.server.routes import Routes
from kvferry.http.server.service import Service

logger = logging.getLogger(__name__)

OnListening = Callable[[str, int], object]
"""Called with the host and the actual port once connections are accepted."""

Bind = Callable[[str, int], socket.socket]
"""Creates a listening socket for an address; simulations have their own."""


class Acceptor:
    """Accepts connections on one listening socket, and counts each before its TLS handshake, which costs the server
    more than the client. Owns the socket, from `open` to `close`. `context`: for TLS; None: without TLS.

    asyncio's own servers report a TLS connection only after the handshake, when it is too late to refuse it. They also
    accept all waiting connections, even if several processes share the socket; this acceptor takes one at a time.
    """

    wait_s = 0.5
    """Seconds until the next attempt after a failed accept. Usually the process has too few descriptors."""

    def __init__(
        self, service: Service, side: ListenerKind, listener: socket.socket, context: ssl.SSLContext | None
    ) -> None:
        self._service, self._side, self._listener, self._context = service, side, listener, context
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._handshakes = BackgroundTasks()

    @property
    def port(self) -> int:
        """The port of the listener, also if port 0 was requested."""
        return int(self._listener.getsockname()[1])

    @property
    def host(self) -> str:
        """The address of the listener."""
        return str(self._listener.getsockname()[0])

    def open(self) -> None:
        """Begin to accept connections."""
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept the connections that wait, because closing the socket would reset them, and stop accepting. Handshakes
        in progress continue until their timeout, or until `abort`."""
        self._loop.remove_reader(self._listener)
        for _ in range(BACKLOG):
            if not self._accept():
                break
        if self._retry is not None:
            self._retry.cancel()
        self._listener.close()

    def abort(self) -> None:
        """End the handshakes in progress."""
        self._handshakes.cancel()

    def _accept(self) -> bool:
        """Accept one connection. Returns True if there was one."""
        try:
            accepted, address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # another process was faster, or the client has left
        except OSError as error:
            logger.warning("a connection could not be accepted: %s", error)
            self._loop.remove_reader(self._listener)
            self._retry = self._loop.call_later(self.wait_s, self.open)
            return False
        accepted.setblocking(False)
        self._admit(accepted, str(address[0]))
        return True

    def _admit(self, accepted: socket.socket, client: str) -> None:
        """Start to serve a connection. One beyond the limits gets an error message. It is closed without a message if
        the message would need a TLS handshake, or if there are too many refused connections."""
        connection = ServerConnection(self._service, self._side, client)
        if not connection.admit() and (self._context is not None or self._service.is_crowded_by(client)):
            accepted.close()
            connection.connection_lost(None)
            return
        self._handshakes.add(self._loop.create_task(self._connect(connection, accepted)))

    async def _connect(self, connection: ServerConnection, accepted: socket.socket) -> None:
        timeout_s = self._service.config.limits.http_header_s if self._context is not None else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=self._context, ssl_handshake_timeout=timeout_s
            )
        except BaseException as error:
            accepted.close()
            connection.connection_lost(None)
            # An ssl.SSLError, which is an OSError, is the client's fault, and no error of the server.
            if not isinstance(error, (OSError, TimeoutError)):
                raise


class HttpServer:
    """Serves `routes` with the settings in `config`. Call `run` once, on the event loop on which it was created."""

    tick_s = 0.25
    min_cleanup_s = 2.0
    """Seconds for the final cleanup, even if requests have used up the grace period."""
    close_s = 5.0
    """Seconds between abort and close."""

    def __init__(
        self, routes: Routes, config: HttpConfig, lifecycle: Lifecycle | None = None, guard: Guard | None = None
    ) -> None:
        self.config = config
        self.lifecycle = lifecycle or Lifecycle()
        self.service = Service(routes, config, self.lifecycle, guard or Guard.from_config(config))
        self._listeners: list[tuple[socket.socket, ListenerKind]] = []
        self._acceptors: list[Acceptor] = []
        self.ports: tuple[int, ...] = ()
        """The actual ports while it serves: the clients', then the admin's if there is one."""
        self._ending, self._aborting = asyncio.Event(), asyncio.Event()
        self._ticking: asyncio.TimerHandle | None = None
        self._grace_until = 0.0

    # Serving.

    def listen(self, bind: Bind = listen) -> None:
        """Bind the addresses; connections wait until `run`, which calls this if it was not called before. `bind`
        creates a listening socket. Raises `ConfigError` if an address cannot be used."""
        config = self.config
        sides: tuple[ListenerKind, ...] = ("all",) if config.admin_port is None else ("public", "admin")
        if config.listeners:
            sockets = [socket.socket(fileno=descriptor) for descriptor in config.listeners]
            self._listeners = list(zip(sockets, sides, strict=True))
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
        self._acceptors = [Acceptor(self.service, side, listener, context) for listener, side in self._listeners]
        self._tick()
        try:
            for door in self._acceptors:
                door.open()
            self.ports = tuple(door.port for door in self._acceptors)
            if on_listening is not None:
                on_listening(self._acceptors[0].host, self.ports[0])
            await self._ending.wait()
        finally:
            for door in self._acceptors:
                door.close()
            await self._end()
            if self._ticking is not None:
                self._ticking.cancel()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in tuple(self.service.connections):
            connection.check(now)
        self._ticking = loop.call_later(self.tick_s, self._tick)

    # Shutdown.

    def stop(self) -> None:
        """Begin the shutdown. Called from the server's event loop; may be called repeatedly."""
        self._ending.set()

    def abort(self) -> None:
        """End running requests now."""
        self._ending.set()
        self._aborting.set()

    @property
    def stopping(self) -> bool:
        """True if the shutdown has begun."""
        return self._ending.is_set()

    async def within_grace(self, work: Coroutine[Any, Any, object]) -> None:
        """Run `work` last, after `run`, within the rest of the grace period but at least `min_cleanup_s`, and until
        `abort`. Raises the error of `work`."""
        doing, aborting = asyncio.ensure_future(work), asyncio.ensure_future(self._aborting.wait())
        left_s = max(self.min_cleanup_s, self._grace_until - asyncio.get_running_loop().time())
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
        if not await self._wait_quiet(grace_s, self._aborting):
            if service.running:
                logger.warning("%d requests did not finish in time, and are ended", len(service.running))
            for connection in tuple(service.running):
                connection.abort_request()
            for door in self._acceptors:
                door.abort()
            await self._wait_quiet(self.close_s)
        for connection in tuple(service.connections):
            connection.abort()
        await self._wait_quiet(self.close_s)

    async def _wait_quiet(self, seconds: float, unless: asyncio.Event | None = None) -> bool:
        """Wait until no connection and no handler is left; False if the time ends, or `unless` is set, first."""
        quiet = self.service.quiet
        self.service.update_quiet()
        waits = [asyncio.ensure_future(event.wait()) for event in (quiet, unless) if event is not None]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return quiet.is_set()

    def statistics(self) -> dict[str, int]:
        """Numbers of open connections, clients and running requests, and of requests served and refused so far."""
        return self.service.statistics()

    def check(self) -> None:
        """Raise `LeakError` if a connection or request is left after `run`."""
        statistics = self.statistics()
        if statistics["connections"] or statistics["running"] or statistics["clients"]:
            raise LeakError(f"the HTTP server still has {statistics}")


class Stoppable(Protocol):
    """Something that signals can stop: `stop` begins the shutdown, `abort` ends running requests."""

    @property
    def stopping(self) -> bool: ...
    def stop(self) -> None: ...
    def abort(self) -> None: ...


@contextmanager
def signals_end(server: Stoppable) -> Iterator[None]:
    """Let the `shutdown_signals` stop `server`; a second one aborts running requests. Main thread only."""
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
