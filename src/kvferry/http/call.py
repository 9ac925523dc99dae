"""One request to an instance, and its answer as it comes: read here, or passed on to a client.

connecting  no connection yet
sent        the request is on its way; status and headers may be here, the body's first bytes are not
answering   the body has begun
complete    all of the body is here, or was passed on; the connection is free for others
lost        no (more) answer will come, `error` says why
closed      nobody wants it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from kvferry.core.errors import PeerLost, ProtocolError, TransferError
from kvferry.http.fast_path import FastStream, Pattern
from kvferry.http.headers import RawHeaders

if TYPE_CHECKING:
    from kvferry.http.client_connection import ClientConnection
    from kvferry.http.pool import Pool
    from kvferry.http.response import Response

_BUFFERED_BYTES = 256 * 1024
"""Of a body that nobody reads yet; the instance then waits."""


class CallState(Enum):
    """How far a call is; see the module."""

    CONNECTING = auto()
    SENT = auto()
    ANSWERING = auto()
    COMPLETE = auto()
    LOST = auto()
    CLOSED = auto()


class Reader(Protocol):
    """Makes of a body what the client gets."""

    def take(self, payload: bytes) -> bytes:
        """What is written for the next piece. Raises `TransferError`, which ends the call."""

    def pattern(self) -> Pattern | None:
        """Which chunks may be passed on without `take`; None: none. Asked after each piece."""

    def passed(self, kept: bytes) -> None:
        """What was kept of chunks that were passed on without `take`. Called before the next piece is taken."""


class Call:
    """Made by `HttpClient.start`. Whoever starts a call closes it, which cuts the connection of an answer that has not
    ended, so that the instance stops."""

    __slots__ = (
        "_buffered", "_connect_s", "_connection", "_data", "_fast", "_most_kept", "_on_change", "_paused", "_pieces",
        "_pool", "_repeatable", "_reused", "_sink", "_task", "_waiter", "bodiless", "chunked", "error", "first",
        "headers", "num_received", "state", "status",
    )  # fmt: skip

    def __init__(
        self,
        pool: Pool,
        data: tuple[bytes, ...],
        connect_s: float,
        *,
        repeatable: bool,
        bodiless: bool,
    ) -> None:
        self._pool, self._data, self._connect_s = pool, data, connect_s
        self._repeatable, self.bodiless = repeatable, bodiless
        self._on_change: Callable[[], None] | None = None
        self.state = CallState.CONNECTING
        self.error: TransferError | None = None
        self.status = 0
        """0 until it is here."""
        self.headers: RawHeaders = []
        """Names in lower case."""
        self.first: dict[bytes, bytes] = {}
        """Of each header, the first value."""
        self.chunked = False
        self.num_received = 0
        """Bytes of the answer that have come, as a sign of life."""
        self._connection: ClientConnection | None = None
        self._reused = self._paused = False
        self._task: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._buffered, self._most_kept = 0, 0
        self._sink: Callable[[bytes], None] | None = None
        self._fast: FastStream | None = None
        connection = pool.take_free()
        if connection is not None:
            self._send(connection, reused=True)
        else:
            self._connect(fresh=False)

    def _connect(self, *, fresh: bool) -> None:
        self.state = CallState.CONNECTING
        self._task = asyncio.get_running_loop().create_task(self._wait_for_connection(fresh=fresh))

    async def _wait_for_connection(self, *, fresh: bool) -> None:
        try:
            connection = await self._pool.take(self._connect_s, fresh=fresh)
        except TransferError as error:
            self._end(CallState.LOST, error)
            return
        self._send(connection, reused=connection.num_calls > 0)

    def _send(self, connection: ClientConnection, *, reused: bool) -> None:
        self._connection, self._reused, self.state = connection, reused, CallState.SENT
        connection.begin(self, self._data)

    # What the connection tells.

    @property
    def ends_with_connection(self) -> bool:
        """Whether the end of the connection is the end of the body."""
        return not self.chunked and b"content-length" not in self.first

    def begin(self, status: int, headers: RawHeaders, first: dict[bytes, bytes], *, chunked: bool) -> None:
        """Status and headers are here."""
        self.status, self.headers, self.first, self.chunked = status, headers, first, chunked

    def receive(self, payload: bytes, num_bytes: int) -> None:
        """More of the answer has come."""
        connection = self._connection
        assert connection is not None
        self.num_received += num_bytes
        if payload:
            if self._sink is not None:
                try:
                    self._sink(payload)
                except TransferError as error:
                    connection.close(error)
                    return
            else:
                self._pieces.append(payload)
                self._buffered += len(payload)
                if self._most_kept and self._buffered > self._most_kept:
                    connection.close(ProtocolError(f"an answer is longer than {self._most_kept} bytes"))
                    return
                if not self._most_kept and self._buffered > _BUFFERED_BYTES:
                    self.pause_reading()
            if self.state is CallState.SENT:
                self.state = CallState.ANSWERING
        if connection.is_complete:
            self._end(CallState.COMPLETE, None)
        elif self._sink is None:
            self._changed()

    def lose(self, error: TransferError) -> None:
        """The connection is closed. A request may be sent once more on a new one if the connection had been idle: the
        instance may have closed it at the very moment at which it was used again, and has seen nothing."""
        untouched = self.state is CallState.SENT and self._reused and not self.num_received
        if untouched and self._repeatable and isinstance(error, PeerLost):
            self._connection = None
            self._connect(fresh=True)
            return
        self._end(CallState.LOST, error)

    def _end(self, state: CallState, error: TransferError | None) -> None:
        if self.state in _OVER:
            return
        connection, self._connection = self._connection, None
        self.state, self.error = state, error
        if self._fast is not None:
            self._fast.stop()
        if connection is not None:
            if self._paused and state is CallState.COMPLETE and connection.transport is not None:
                connection.transport.resume_reading()
            self._pool.give_back(connection)
        self._changed()

    def _changed(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if self._on_change is not None:
            self._on_change()

    # What its user asks.

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.state in _OVER

    @property
    def has_begun(self) -> bool:
        """Whether the body's first bytes, or its end, are here: until then another instance may answer instead."""
        return self.state in _BEGUN

    @property
    def is_event_stream(self) -> bool:
        """Whether it is a stream of server-sent events to which an event can be added."""
        kind = self.first.get(b"content-type", b"")
        return kind.startswith(b"text/event-stream") and b"content-encoding" not in self.first

    @property
    def num_received_so_far(self) -> int:
        """`num_received`, with what the fast path has passed on."""
        return self.num_received + (0 if self._fast is None else self._fast.num_received)

    @property
    def paused(self) -> bool:
        """Whether the instance is made to wait."""
        return self._paused

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` in the event loop whenever the state changes, and when more of a body that nobody reads yet
        is here. It must be quick."""
        self._on_change = on_change

    async def changed(self) -> None:
        """Wait for the next change."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def begun(self) -> None:
        """Wait until it `has_begun`. Raises the `TransferError` because of which it will not."""
        while not self.has_begun:
            if self.error is not None:
                raise self.error
            await self.changed()

    async def read(self, max_bytes: int) -> bytes:
        """The whole body. Raises `ProtocolError` if it is longer than `max_bytes`, and what ended the call early."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > max_bytes:
                raise ProtocolError(f"an answer is longer than {max_bytes} bytes")
        return bytes(body)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises what ended the call early."""
        while True:
            if piece := self.take():
                yield piece
            elif self.state is CallState.COMPLETE:
                return
            elif self.error is not None:
                raise self.error
            else:
                await self.changed()

    @property
    def num_buffered(self) -> int:
        """Bytes of the body that `take` would return."""
        return self._buffered

    def take(self) -> bytes:
        """What is here of the body and has not been taken."""
        pieces, self._pieces, self._buffered = self._pieces, [], 0
        if self._paused:
            self.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def collect(self, max_bytes: int) -> None:
        """Keep all of the body until it is taken, whole; one that is longer is lost, with a `ProtocolError`."""
        self._most_kept = max_bytes
        self.resume_reading()

    async def relay(self, response: Response, reader: Reader) -> None:
        """Write what `reader` makes of the body to a response that has begun, as it comes and no faster than its client
        reads. The response is left open: call its `end`, or go on with another call. Raises what ended the call
        early."""

        def write(payload: bytes) -> None:
            response.write(reader.take(payload))

        if self._pieces:
            try:
                write(self.take())
            except TransferError as error:
                self.fail(error)
                raise
        if self.state is CallState.COMPLETE:
            return
        self._sink = write
        response.pauses(self)
        try:
            if self._pool.fast_path is not None and self.chunked and self._connection is not None:
                self._pool.fast_path.forward(self._connection, self, response, reader)
            while not self.is_over:
                await self.changed()
        finally:
            self._sink = None
            if self._fast is not None:
                self._fast.stop()
            response.pauses(None)
        if self.error is not None:
            raise self.error

    def pause_reading(self) -> None:
        """Make the instance wait."""
        self._pause(paused=True)

    def resume_reading(self) -> None:
        """Let it go on."""
        self._pause(paused=False)

    def _pause(self, *, paused: bool) -> None:
        if self._paused == paused:
            return
        self._paused = paused
        source = self._fast or (self._connection.transport if self._connection is not None else None)
        if source is not None:
            source.pause_reading() if paused else source.resume_reading()

    def take_over(self, fast: FastStream | None) -> None:
        """The body's bytes are read by `fast`; None: by the connection again."""
        self._fast = fast

    def fail(self, error: TransferError) -> None:
        """End it because of `error`."""
        self._repeatable = False
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.close(error)
        self._end(CallState.LOST, error)

    def close(self) -> None:
        """Nobody wants it any more. May be called several times."""
        self._on_change = None
        if self.is_over:
            return
        if self._task is not None:
            self._task.cancel()
        connection, self._connection, self.state = self._connection, None, CallState.CLOSED
        if self._fast is not None:
            self._fast.stop()
        if connection is not None:
            connection.close()


_OVER = frozenset({CallState.COMPLETE, CallState.LOST, CallState.CLOSED})
_BEGUN = frozenset({CallState.ANSWERING, CallState.COMPLETE})
