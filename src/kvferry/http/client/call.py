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
from typing import Literal, Protocol

from kvferry.core.errors import PeerLost, ProtocolError, TransferError
from kvferry.http.client.connection import AnswerHead, ClientConnection, OutgoingRequest
from kvferry.http.client.pool import Pool
from kvferry.http.headers import RawHeaders
from kvferry.http.message import joined

_BUFFERED_BYTES = 256 * 1024
"""Bytes of a body that nobody reads yet; beyond this, the instance has to wait."""


CallState = Literal["connecting", "sent", "answering", "complete", "lost", "closed"]
"""The state of a call, as in the module's docstring."""


_OVER: frozenset[CallState] = frozenset(("complete", "lost", "closed"))


class Bypass(Protocol):
    """What reads an answer's body from the socket in place of its transport."""

    @property
    def num_received(self) -> int:
        """Received bytes that the call has not counted yet."""

    def pause_reading(self) -> None:
        """Make the instance wait."""

    def resume_reading(self) -> None:
        """Continue reading."""

    def stop(self) -> None:
        """Let the transport read again. May be called repeatedly."""


NO_HEAD = AnswerHead(0, [], {}, chunked=False, keep_alive=False)


class Call:
    """Made by `HttpClient.start`. The caller must close it; that cuts the connection of an answer that has not ended,
    so that the instance stops."""

    __slots__ = (
        "_bypass", "_kept", "_most", "_on_change", "_pool", "_sink", "_task", "_waiter", "connection", "error", "head",
        "num_received", "paused", "request", "state",
    )  # fmt: skip

    def __init__(self, pool: Pool, request: OutgoingRequest) -> None:
        self._pool, self.request = pool, request
        self._on_change: Callable[[], None] | None = None
        self.state: CallState = "connecting"
        self.error: TransferError | None = None
        self.head = NO_HEAD
        self.num_received = 0
        """Bytes of the answer received so far, as a sign of progress."""
        self.connection: ClientConnection | None = None
        """The connection that the answer arrives on; None before and after."""
        self.paused = False
        """Whether reading is paused, so that the instance has to wait."""
        self._task: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._kept: bytes | bytearray = b""
        self._most = 0
        """Received bytes of the body that were not taken; 0, or the most that may be kept."""
        self._sink: Callable[[bytes], None] | None = None
        self._bypass: Bypass | None = None
        connection = pool.take_free()
        if connection is not None:
            self._send(connection)
        else:
            self._connect(fresh=False)

    def _connect(self, *, fresh: bool) -> None:
        self.state = "connecting"
        self._task = asyncio.get_running_loop().create_task(self._wait_for_connection(fresh=fresh))

    async def _wait_for_connection(self, *, fresh: bool) -> None:
        try:
            connection = await self._pool.take(self.request.connect_s, fresh=fresh)
        except TransferError as error:
            self._end("lost", error)
            return
        self._send(connection)

    def _send(self, connection: ClientConnection) -> None:
        self.connection, self.state = connection, "sent"
        connection.begin(self)

    # Called by the connection.

    def receive(self, head: AnswerHead, payload: bytes, num_bytes: int, complete: bool) -> None:
        """Called when more of the answer has arrived: `num_bytes` bytes, with this part of its body."""
        connection = self.connection
        assert connection is not None
        self.head = head
        self.num_received += num_bytes
        if payload:
            if self._sink is not None:
                try:
                    self._sink(payload)
                except TransferError as error:
                    connection.close(error)
                    return
            else:
                self._kept = joined(self._kept, payload)
                if len(self._kept) > (self._most or _BUFFERED_BYTES):
                    if self._most:
                        connection.close(_too_long(self._most))
                        return
                    self.pause_reading()
            if self.state == "sent":
                self.state = "answering"
        if complete:
            self._end("complete", None)
        elif self._sink is None:
            self._changed()

    def lose(self, error: TransferError) -> None:
        """The connection is closed. A request may be sent once more on a new one if the connection had been idle: the
        instance may have closed it at the very moment at which it was used again, and has seen nothing."""
        was_idle = self.connection is not None and self.connection.num_calls > 1
        untouched = self.state == "sent" and was_idle and not self.num_received
        if untouched and self.request.repeatable and isinstance(error, PeerLost):
            self.connection = None
            self._connect(fresh=True)
            return
        self._end("lost", error)

    def _end(self, state: CallState, error: TransferError | None) -> None:
        if self.state in _OVER:
            return
        connection, self.connection = self.connection, None
        self.state, self.error = state, error
        if self._bypass is not None:
            self._bypass.stop()
        if connection is not None:
            if self.paused and state == "complete" and connection.transport is not None:
                connection.transport.resume_reading()
            self._pool.give_back(connection)
        self._changed()
        self._on_change = None  # which refers to whoever has this call

    def _changed(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if self._on_change is not None:
            self._on_change()

    # What its user asks.

    @property
    def status(self) -> int:
        """The status; 0 until it is here."""
        return self.head.status

    @property
    def headers(self) -> RawHeaders:
        """The headers, with names in lower case."""
        return self.head.headers

    @property
    def first(self) -> dict[bytes, bytes]:
        """The first value of each header."""
        return self.head.first

    @property
    def relays(self) -> object:
        """The relay in compiled code that forwards bodies (`http.relay`)."""
        return self._pool.relays

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.state in _OVER

    @property
    def num_received_so_far(self) -> int:
        """`num_received`, with what a bypass has passed on."""
        return self.num_received + (0 if self._bypass is None else self._bypass.num_received)

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
        """Wait until the body's first bytes, or its end, are here: until then another instance may answer instead.
        Raises the `TransferError` because of which it will not."""
        while self.state != "answering" and self.state != "complete":
            if self.error is not None:
                raise self.error
            await self.changed()

    async def read(self, max_bytes: int) -> bytes:
        """The whole body. Raises `ProtocolError` if it is longer than `max_bytes`, and what ended the call early."""
        self.collect(max_bytes)
        while self.state != "complete":
            if self.error is not None:
                raise self.error
            await self.changed()
        if len(self._kept) > max_bytes:
            raise _too_long(max_bytes)
        return self.take()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises what ended the call early."""
        while True:
            if piece := self.take():
                yield piece
            elif self.state == "complete":
                return
            elif self.error is not None:
                raise self.error
            else:
                await self.changed()

    def take(self) -> bytes:
        """The part of the body that has arrived and was not taken yet."""
        kept, self._kept = bytes(self._kept), b""
        if self.paused:
            self.resume_reading()
        return kept

    def collect(self, max_bytes: int) -> None:
        """Keep all of the body until it is taken, whole; one that is longer is lost, with a `ProtocolError`."""
        self._most = max_bytes
        if self.paused:
            self.resume_reading()

    def pass_to(self, sink: Callable[[bytes], None] | None) -> None:
        """Give further pieces of the body to `sink`, which may raise `TransferError` to end the call; None: keep them
        until they are taken."""
        self._sink = sink

    def read_by(self, bypass: Bypass | None) -> None:
        """The body is read by `bypass`; None: by the connection's transport again."""
        self._bypass = bypass

    def pause_reading(self) -> None:
        """Make the instance wait."""
        self._pause(paused=True)

    def resume_reading(self) -> None:
        """Continue reading."""
        self._pause(paused=False)

    def _pause(self, *, paused: bool) -> None:
        if self.paused == paused:
            return
        self.paused = paused
        source = self._bypass or (self.connection.transport if self.connection is not None else None)
        if source is not None:
            source.pause_reading() if paused else source.resume_reading()

    def fail(self, error: TransferError) -> None:
        """End it because of `error`."""
        if self._task is not None:
            self._task.cancel()
        connection, self.connection = self.connection, None
        self._end("lost", error)
        if connection is not None:
            connection.close(error)

    def close(self) -> None:
        """End the call: its answer is not needed any more. May be called several times."""
        self._on_change = None
        if self.is_over:
            return
        if self._task is not None:
            self._task.cancel()
        connection, self.connection, self.state = self.connection, None, "closed"
        if self._bypass is not None:
            self._bypass.stop()
        if connection is not None:
            connection.close()


def _too_long(most: int) -> ProtocolError:
    return ProtocolError(f"an answer is longer than {most} bytes")
