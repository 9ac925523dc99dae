"""An HTTP client for instances, which reuses its connections.

Every wait has a deadline except for an answer, which the caller limits: a router knows progress beyond received bytes.
Closing a call whose answer is incomplete cuts the connection, so that the instance stops.
"""

from __future__ import annotations

import asyncio
import ssl
from types import TracebackType
from typing import Self

from kvferry.core.errors import ConfigError
from kvferry.core.keys import Signer
from kvferry.http.client.call import Call
from kvferry.http.client.connection import OutgoingRequest
from kvferry.http.client.origin import Origin
from kvferry.http.client.pool import Pool
from kvferry.http.client.proof import TokenProof
from kvferry.http.errors import AnswerTimeout
from kvferry.http.headers import RawHeaders, header_lines, request_line

_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_JOINED_BYTES = 64 * 1024
CONNECT_S = 5.0
_CONNECTIONS_PER_INSTANCE = 4096
"""Maximum number of connections to an instance; further calls wait for a free one."""


class HttpClient:
    """An asynchronous context manager; used on one event loop. Owns a `Pool` for each origin that is in use.

    `idle_s`: how long a free connection is kept, less than the 5 s after which uvicorn, and so vLLM, closes it.
    `relays`: forwards streamed answers in compiled code (`http.relay`); None: nothing does.
    `client_name`: the name of this process in errors.
    """

    tick_s = 0.1

    def __init__(
        self,
        tls: ssl.SSLContext | None = None,
        *,
        idle_s: float = 2.0,
        relays: object = None,
        connections_per_instance: int = _CONNECTIONS_PER_INSTANCE,
        client_name: str = "this process",
    ) -> None:
        self._client_name = client_name
        self._tls, self._idle_s, self._max_connections = tls, idle_s, connections_per_instance
        self.relays = relays
        self._pools: dict[Origin, Pool] = {}
        self._proofs: dict[Origin, TokenProof] = {}
        """The proofs that servers must give on each connection. Kept while a server has no pool, too."""
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

    def start(
        self,
        origin: Origin,
        method: str,
        target: str,
        headers: RawHeaders | bytes = b"",
        body: bytes | None = None,
        *,
        connect_s: float = CONNECT_S,
        repeatable: bool = False,
    ) -> Call:
        """Send a request, at once if a connection is free. `headers`, which may have been formatted by `header_lines`,
        contain neither `host` nor `content-length`, which this method adds. `connect_s`: limit of the wait for a
        connection. `repeatable`: a request that reached an idle connection at the moment at which the instance closed
        it is sent once more, as it always is if its method changes nothing. Raises `ValueError` for a header or a
        target that cannot be sent.
        """
        pool = self._pools.get(origin) or self._pool(origin)
        lines = headers if isinstance(headers, bytes) else header_lines(headers)
        length = b"" if body is None and method not in _WITH_BODY else b"content-length: %d\r\n" % len(body or b"")
        head = b"%bhost: %b\r\n%b%b\r\n" % (request_line(method, target), pool.authority, lines, length)
        data = (head,) if not body else (head + body,) if len(body) < _JOINED_BYTES else (head, body)
        return Call(pool, OutgoingRequest(data, connect_s, repeatable or method in _REPEATABLE, method == "HEAD"))

    async def ask(
        self,
        origin: Origin,
        method: str,
        target: str,
        *,
        timeout_s: float,
        headers: RawHeaders | bytes = b"",
        body: bytes | None = None,
        max_bytes: int = 2**20,
    ) -> tuple[int, RawHeaders, bytes]:
        """Send a request; return status, headers and body within `timeout_s`. Raises `TransferError`."""
        call = self.start(origin, method, target, headers, body, connect_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                content = await call.read(max_bytes)
            return call.status, call.headers, content
        except TimeoutError as error:
            raise AnswerTimeout(f"{origin} did not answer {target} within {timeout_s:g} s", "next byte") from error
        finally:
            call.close()

    def _pool(self, origin: Origin) -> Pool:
        if origin.tls and self._tls is None:
            raise ConfigError(f"{origin} needs TLS, and this client was given none")
        context = self._tls if origin.tls else None
        pool = self._pools[origin] = Pool(
            origin,
            self._max_connections,
            self._idle_s,
            context,
            self.relays,
            self._client_name,
            self._proofs.get(origin),
        )
        return pool

    async def authenticate(self, origin: Origin, proof: TokenProof, timeout_s: float) -> Signer:
        """Let a server prove that it holds the deployment's token, and return the signer of requests to it. From then
        on, each connection to `origin` must prove it again before it is used, until `forget_proof`. Raises
        `AuthenticationFailed` or `TransferError`."""
        pool = self._pools.get(origin) or self._pool(origin)
        try:
            async with asyncio.timeout(timeout_s):
                signer = await pool.authenticate(proof, timeout_s)
        except TimeoutError as error:
            raise AnswerTimeout(f"{origin} proved nothing within {timeout_s:g} s", "next byte") from error
        self._proofs[origin] = proof
        return signer

    def forget_proof(self, origin: Origin) -> None:
        """Require no proof of the server at this origin any more."""
        self._proofs.pop(origin, None)

    def forget(self, origin: Origin) -> None:
        """Close the connections to an instance."""
        pool = self._pools.pop(origin, None)
        if pool is not None:
            pool.close()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for origin, pool in tuple(self._pools.items()):
            pool.tick(now)
            if pool.is_unused(now):  # a late request to a forgotten instance has created it again
                self.forget(origin)
        self._ticking = loop.call_later(self.tick_s, self._tick)

    def statistics(self) -> dict[str, int]:
        """The number of open connections, by origin."""
        return {str(origin): pool.num_open for origin, pool in self._pools.items()}

    def check(self) -> None:
        """Raise `LeakError` if a connection was never returned. Call it while no answer is being read."""
        for pool in self._pools.values():
            pool.check()
