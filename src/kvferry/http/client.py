"""An HTTP client for instances, which reuses its connections.

Every wait has a deadline (`Deadlines`): for a connection, for the first byte of the answer, and between bytes.
Cancelling `open` cuts the connection, as does closing an answer that is not complete; the instance then stops.
"""

from __future__ import annotations

import asyncio
import ctypes
import ssl
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from types import TracebackType
from typing import Self

from kvferry.core.errors import ConfigError, PeerLost
from kvferry.http.answer import Answer
from kvferry.http.client_connection import ClientConnection
from kvferry.http.errors import AnswerTimeout, Unreachable
from kvferry.http.fast_path import FastPath, library
from kvferry.http.headers import RawHeaders, header_lines, request_line
from kvferry.http.origin import Origin
from kvferry.http.pool import Pool

_TICK_S = 0.1
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_JOINED_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds; None is no limit."""

    connect_s: float = 5.0
    """To a connection, the wait for a free one included."""

    first_byte_s: float | None = None
    """From the request, all of it, to the answer's status and headers."""

    between_s: float | None = None
    """Between two pieces of the answer, its head included; time in which the reader makes it wait does not count."""


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """What a client does with its connections."""

    connections_per_instance: int = 4096
    """Most connections to one instance; a request that finds them all in use waits for one."""

    idle_s: float = 2.0
    """Seconds a free connection is kept. Less than the 5 s after which uvicorn, and so vLLM, closes an idle one: a
    request must not be sent into a connection that is being closed."""

    fast_path: bool = False
    """Whether to forward streamed answers in compiled code, which is compiled in the background if it must be."""


class Sent:
    """A request on its way. `reused`: over a connection that had been idle, and may have been closed meanwhile. Raises
    `Unreachable` if the connection is already lost."""

    __slots__ = ("connection", "data", "deadlines", "method", "pool", "reused")

    def __init__(
        self, pool: Pool, connection: ClientConnection, method: str, data: tuple[bytes, ...], deadlines: Deadlines
    ) -> None:
        self.pool, self.connection, self.method, self.data = pool, connection, method, data
        self.deadlines, self.reused = deadlines, connection.num_requests > 0
        if connection.lost is not None:
            self.abandon()
            raise Unreachable(str(connection.lost))
        connection.begin(data, deadlines.first_byte_s, deadlines.between_s, bodiless=method == "HEAD")

    async def answer(self) -> Answer:
        """The answer's status and headers; cuts the connection if they do not come."""
        connection = self.connection
        try:
            while not connection.head_done:
                if connection.lost is not None:
                    raise connection.lost
                await connection.wait()
        except BaseException:
            self.abandon()
            raise
        return Answer(connection, self.pool)

    def answer_now(self) -> Answer:
        """The same, where the connection's `head_done` is true."""
        return Answer(self.connection, self.pool)

    def abandon(self) -> None:
        """Nobody wants the answer: cut the connection, so that the instance stops."""
        self.connection.close()
        self.pool.discard(self.connection)


def _find_library(found: asyncio.Future[ctypes.PyDLL | None]) -> None:
    """In a thread that nobody waits for at the end: what is compiled may wait for what another process compiles."""
    result = library()

    def tell() -> None:
        if not found.done():
            found.set_result(result)

    with suppress(RuntimeError):  # the loop is closed
        found.get_loop().call_soon_threadsafe(tell)


class HttpClient:
    """An asynchronous context manager; used on one event loop. Owns a `Pool` for each origin that is in use."""

    def __init__(self, config: ClientConfig | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._config = config or ClientConfig()
        self._tls = tls
        self._pools: dict[Origin, Pool] = {}
        self._ticking: asyncio.TimerHandle | None = None
        self._fast_path: FastPath | None = None
        self._opening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._tick()
        if self._config.fast_path:
            self._fast_path = FastPath()
            self._opening = asyncio.create_task(self._open_fast_path(self._fast_path))
        return self

    async def _open_fast_path(self, fast_path: FastPath) -> None:
        found: asyncio.Future[ctypes.PyDLL | None] = asyncio.get_running_loop().create_future()
        Thread(target=_find_library, args=(found,), name="compiles the fast path", daemon=True).start()
        fast_path.open(await found)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        if self._opening is not None and self._fast_path is not None:
            self._opening.cancel()
            self._fast_path.close()
        await asyncio.sleep(0)  # transports close with the loop's next turn

    async def open(
        self,
        origin: Origin,
        method: str,
        target: str,
        headers: RawHeaders | bytes,
        body: bytes | None = None,
        *,
        deadlines: Deadlines,
        repeatable: bool = False,
    ) -> Answer:
        """Send a request; returns when the answer's status and headers have arrived. `headers`, which
        may have been formatted by `header_lines`, contain neither `host` nor `content-length`: these are added here.

        An instance may close an idle connection at the very moment it is used again. The request is then sent once more
        on a new connection, if nothing of an answer had come and the request may be repeated: because of its method, or
        because the caller says so (`repeatable`).

        Raises `Unreachable` if the instance has seen nothing of the request, `PeerLost` if the connection broke,
        `AnswerTimeout` if nothing came in time, `ProtocolError` if the instance does not speak HTTP.
        """
        pool = self._pool(origin)
        data = self._message(pool, method, target, headers, body)
        connection = pool.take_free() or await pool.take(deadlines.connect_s)
        return await self.finish(Sent(pool, connection, method, data, deadlines), repeatable=repeatable)

    def send(
        self,
        origin: Origin,
        method: str,
        target: str,
        headers: RawHeaders | bytes,
        body: bytes | None,
        deadlines: Deadlines,
    ) -> Sent | None:
        """Like `open`, without the answer: None, and nothing was sent, if there is no free connection. Whoever sends
        calls `finish`, or `answer_now` or `abandon` of what was sent. Raises `ValueError` for a header that
        cannot be sent."""
        pool = self._pool(origin)
        data = self._message(pool, method, target, headers, body)
        connection = pool.take_free()
        return None if connection is None else Sent(pool, connection, method, data, deadlines)

    async def finish(self, sent: Sent, *, repeatable: bool = False) -> Answer:
        """The answer to what was sent, as `open` returns it. Cancelling it cuts the connection."""
        try:
            return await sent.answer()
        except PeerLost:
            stale = sent.reused and sent.connection.num_received == 0
            if not (stale and (repeatable or sent.method in _REPEATABLE)):
                raise
        connection = await sent.pool.take(sent.deadlines.connect_s, fresh=True)
        return await Sent(sent.pool, connection, sent.method, sent.data, sent.deadlines).answer()

    async def ask(
        self,
        origin: Origin,
        method: str,
        target: str,
        *,
        timeout_s: float,
        headers: RawHeaders | None = None,
        body: bytes | None = None,
        max_bytes: int = 2**20,
    ) -> tuple[int, RawHeaders, bytes]:
        """A whole request: returns status, headers and body, within `timeout_s`. Raises `TransferError`."""
        deadlines = Deadlines(connect_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.open(origin, method, target, headers or [], body, deadlines=deadlines)
                try:
                    return answer.status, answer.headers, await answer.read(max_bytes)
                finally:
                    answer.close()
        except TimeoutError as error:
            raise AnswerTimeout(f"{origin} did not answer {target} within {timeout_s:g} s", "next byte") from error

    def _message(
        self, pool: Pool, method: str, target: str, headers: RawHeaders | bytes, body: bytes | None
    ) -> tuple[bytes, ...]:
        lines = headers if isinstance(headers, bytes) else header_lines(headers)
        length = b"" if body is None and method not in _WITH_BODY else b"content-length: %d\r\n" % len(body or b"")
        head = b"%bhost: %b\r\n%b%b\r\n" % (request_line(method, target), pool.authority, lines, length)
        if not body:
            return (head,)
        return (head + body,) if len(body) < _JOINED_BYTES else (head, body)

    def _pool(self, origin: Origin) -> Pool:
        pool = self._pools.get(origin)
        if pool is None:
            if origin.tls and self._tls is None:
                raise ConfigError(f"{origin} needs TLS, and this client was given none")
            context = self._tls if origin.tls else None
            config = self._config
            most, idle_s = config.connections_per_instance, config.idle_s
            pool = Pool(origin, str(origin), most, idle_s, context, self._fast_path)
            self._pools[origin] = pool
        return pool

    def forget(self, origin: Origin) -> None:
        """An instance is gone for good: close its connections."""
        pool = self._pools.pop(origin, None)
        if pool is not None:
            pool.close()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for origin, pool in tuple(self._pools.items()):
            pool.tick(now)
            if pool.is_unused(now):  # a late look at an instance that was forgotten has made it again
                self.forget(origin)
        self._ticking = loop.call_later(_TICK_S, self._tick)

    def statistics(self) -> dict[str, int]:
        """The number of open connections, by origin."""
        return {str(origin): pool.num_open for origin, pool in self._pools.items()}

    def check(self) -> None:
        """Raise `LeakError` if a connection was never given back. To be called when no answer is being read."""
        for pool in self._pools.values():
            pool.check()
