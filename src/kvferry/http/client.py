"""An HTTP client for instances: requests out, answers in, over connections that are reused.

Every wait has a deadline (`Deadlines`): to a connection, to the first byte of the answer's head, and between bytes.
Cancelling `open` cuts the connection, and so does closing an answer that is not complete: the instance stops then.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvferry.core.errors import ConfigError, PeerLost
from kvferry.http.answer import Answer
from kvferry.http.client_connection import ClientConnection
from kvferry.http.errors import AnswerTimeout, Unreachable
from kvferry.http.headers import RawHeaders, find_header, request_head
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


class HttpClient:
    """An asynchronous context manager; used on one event loop. Owns a `Pool` for each origin."""

    def __init__(self, config: ClientConfig | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._config = config or ClientConfig()
        self._tls = tls
        self._pools: dict[Origin, Pool] = {}
        self._ticking: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._tick()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        await asyncio.sleep(0)  # transports close with the loop's next turn

    async def open(
        self,
        origin: Origin,
        method: str,
        target: str,
        headers: RawHeaders,
        body: bytes | None = None,
        *,
        deadlines: Deadlines,
        repeatable: bool = False,
    ) -> Answer:
        """Send a request; returns when the answer's status and headers are here. `host` and `content-length` are
        added where `headers` lack them.

        A connection that was used before may be closed by the instance at the very moment it is used again. The
        request is then sent once more, on a new connection, if nothing of an answer had come and it may be repeated:
        its method says so, or the caller does (`repeatable`).

        Raises `Unreachable` when the instance has seen nothing of the request, `PeerLost` when it broke off,
        `AnswerTimeout` when it was not in time, `ProtocolError` when it does not speak HTTP.
        """
        pool = self._pool(origin)
        data = self._message(pool, method, target, headers, body)
        connection = pool.take_free() or await pool.take(deadlines.connect_s)
        reused = connection.num_requests > 0
        try:
            return await self._exchange(pool, connection, method, data, deadlines)
        except PeerLost:
            stale = reused and connection.num_received == 0
            if not (stale and (repeatable or method in _REPEATABLE)):
                raise
        connection = await pool.take(deadlines.connect_s, fresh=True)
        return await self._exchange(pool, connection, method, data, deadlines)

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
        """A whole exchange: status, headers and body, within `timeout_s`. Raises `TransferError`."""
        deadlines = Deadlines(connect_s=timeout_s, first_byte_s=timeout_s, between_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.open(origin, method, target, headers or [], body, deadlines=deadlines)
                try:
                    return answer.status, answer.headers, await answer.read(max_bytes)
                finally:
                    answer.close()
        except TimeoutError as error:
            raise AnswerTimeout(f"{origin} did not answer {target} within {timeout_s:g} s", "next byte") from error

    async def _exchange(
        self, pool: Pool, connection: ClientConnection, method: str, data: tuple[bytes, ...], deadlines: Deadlines
    ) -> Answer:
        try:
            if connection.lost is not None:
                raise Unreachable(str(connection.lost))
            connection.begin(bodiless=method == "HEAD")
            connection.num_requests += 1
            connection.expect(deadlines.first_byte_s, deadlines.between_s)
            for part in data:
                connection.transport.write(part)
            while not connection.head_done:
                if connection.lost is not None:
                    raise connection.lost
                await connection.wait()
            return Answer(connection, pool)
        except BaseException:
            connection.close()
            pool.discard(connection)
            raise

    def _message(
        self, pool: Pool, method: str, target: str, headers: RawHeaders, body: bytes | None
    ) -> tuple[bytes, ...]:
        sent = list(headers)
        if find_header(sent, b"host") is None:
            sent.insert(0, (b"host", pool.authority))
        if (body is not None or method in _WITH_BODY) and find_header(sent, b"content-length") is None:
            sent.append((b"content-length", b"%d" % len(body or b"")))
        head = request_head(method, target, sent)
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
            pool = Pool(origin, str(origin), config.connections_per_instance, config.idle_s, context)
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
        for pool in self._pools.values():
            pool.tick(now)
        self._ticking = loop.call_later(_TICK_S, self._tick)

    def statistics(self) -> dict[str, int]:
        """Connections open, by origin."""
        return {str(origin): pool.num_open for origin, pool in self._pools.items()}

    def check(self) -> None:
        """Raise `LeakError` when a connection was never given back. To be called when no answer is being read."""
        for pool in self._pools.values():
            pool.check()
