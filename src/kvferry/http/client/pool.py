"""The connection pool of one instance: limits the number of connections, and keeps free ones for a while.

Owns all of them. A free connection that the instance closes is dropped when this is noticed, not when it is next used;
for the time between the two see `Call.lose`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque

from kvferry.core.errors import AuthenticationFailed, LeakError, ProtocolError
from kvferry.core.keys import Signer
from kvferry.core.ordered_set import OrderedSet
from kvferry.http.client.connection import ClientConnection
from kvferry.http.client.origin import Origin
from kvferry.http.client.proof import TokenProof
from kvferry.http.errors import AnswerTimeout, IdentityLost, Unreachable
from kvferry.http.tls import advice


class Pool:
    """A pool of at most `max_connections` connections; further calls wait in turn."""

    def __init__(
        self,
        origin: Origin,
        max_connections: int,
        idle_s: float,
        context: ssl.SSLContext | None,
        relays: object,
        client_name: str,
        proof: TokenProof | None = None,
    ) -> None:
        """`proof`: required on each connection before it is used."""
        self._origin, self._max_connections, self._idle_s, self._client_name = (
            origin,
            max_connections,
            idle_s,
            client_name,
        )
        self._context, self.relays, self._proof = context, relays, proof
        self.authority = origin.authority.encode()
        self._loop = asyncio.get_running_loop()
        self._free: dict[ClientConnection, float] = {}
        """Free connections, and since when, on the event loop's clock; the most recent last."""
        self._open: OrderedSet[ClientConnection] = OrderedSet()
        self._num_connecting = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self._used_at = self._loop.time()
        """Time at which a connection was last made, returned or lost."""

    def take_free(self) -> ClientConnection | None:
        """Take a free connection, the most recently used first; None if there is none."""
        while self._free:
            connection, _ = self._free.popitem()
            transport = connection.transport
            if connection.error is None and transport is not None and not transport.is_closing():
                if not connection.has_unread():
                    return connection
                connection.close(ProtocolError(f"{self._origin} sent more than its answer"))
                continue
            connection.close()
        return None

    def require(self, proof: TokenProof) -> None:
        """Require from now on that the server proves on each connection that it holds the deployment's token."""
        self._proof = proof
        for connection in [connection for connection in self._free if not connection.is_proven]:
            connection.close()

    async def take(self, connect_s: float, *, fresh: bool = False) -> ClientConnection:
        """Take a free or new connection (`fresh`: a new one). Raises `Unreachable` or `AnswerTimeout`."""
        connection = await self._take(connect_s, fresh=fresh)
        if self._proof is not None and not connection.is_proven:
            try:
                await self._proof.demand(connection, str(self._origin))
            except AuthenticationFailed as error:
                raise IdentityLost(
                    f"where {self._origin} has proved to hold the token, another server answers ({error}); if that is"
                    " meant to be, remove the instance and add it again"
                ) from error
        return connection

    async def authenticate(self, proof: TokenProof, connect_s: float) -> Signer:
        """Let the server prove that it holds the deployment's token, and return the signer of requests to it; then as
        after `require`. Raises `AuthenticationFailed` or `TransferError`."""
        connection = await self._take(connect_s, fresh=False)
        signer = await proof.demand(connection, str(self._origin))
        self.require(proof)
        self.put_back(connection)
        return signer

    async def _take(self, connect_s: float, *, fresh: bool) -> ClientConnection:
        try:
            async with asyncio.timeout(connect_s):
                while True:
                    if not fresh and (connection := self.take_free()) is not None:
                        return connection
                    if len(self._open) + self._num_connecting >= self._max_connections and self._free:
                        self._close_oldest()
                    if len(self._open) + self._num_connecting < self._max_connections:
                        return await self._connect()
                    await self._wait_for_slot()
        except TimeoutError as error:
            raise AnswerTimeout(f"{self._origin} took no connection within {connect_s:g} s", "connection") from error

    async def _wait_for_slot(self) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._wake_next()  # pass the turn on
            raise
        finally:
            if not waiter.done():
                self._waiting.remove(waiter)

    async def _connect(self) -> ClientConnection:
        connection = ClientConnection(str(self._origin), self._client_name)
        self._num_connecting += 1
        try:
            await self._loop.create_connection(
                lambda: connection, self._origin.host, self._origin.port, ssl=self._context
            )
        except (OSError, UnicodeError) as error:
            reason = advice(error, str(self._origin), self._client_name)
            raise Unreachable(f"{self._origin} cannot be reached: {reason}") from error
        except BaseException:
            connection.close()  # it may have been made just when the wait for it ended
            raise
        finally:
            self._num_connecting -= 1
            self._used_at = self._loop.time()
            self._wake_next()
        if self._closed or not connection.is_usable:
            connection.close()
            raise Unreachable(f"{self._origin} closed the connection at once")
        connection.on_closed = self._on_closed
        self._open.add(connection)
        return connection

    def put_back(self, connection: ClientConnection) -> None:
        """Return a connection whose call is over."""
        connection.call, head = None, connection.head
        is_reusable = connection.complete and head is not None and head.keep_alive
        is_accepted = self._proof is None or connection.is_proven
        if is_reusable and is_accepted and not (connection.error or self._closed):
            self._free[connection] = self._loop.time()
        else:
            connection.close()
        if self._waiting:
            self._wake_next()

    def _on_closed(self, connection: ClientConnection) -> None:
        self._open.discard(connection)
        self._used_at = self._loop.time()
        self._free.pop(connection, None)
        self._wake_next()

    def _wake_next(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def tick(self, now: float) -> None:
        """Close connections that have been free for too long."""
        while self._free and now - next(iter(self._free.values())) > self._idle_s:
            self._close_oldest()

    def _close_oldest(self) -> None:
        oldest = next(iter(self._free))
        del self._free[oldest]
        oldest.close()

    def is_unused(self, now: float) -> bool:
        """True if it has had no connection for as long as idle ones are kept, and no call waits for one."""
        return not (self._open or self._num_connecting or self._waiting) and now - self._used_at > self._idle_s

    def close(self) -> None:
        """Close all of them."""
        self._closed = True
        for connection in tuple(self._open):
            connection.close()

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def check(self) -> None:
        """Raise `LeakError` if a connection is in use though no answer is being read."""
        if len(self._open) != len(self._free) or self._waiting or self._num_connecting:
            raise LeakError(f"{len(self._open) - len(self._free)} connections to {self._origin} were never given back")
