"""One request to an instance, and its answer as it comes: buffered, or forwarded to a client.

connecting  no connection yet
sent        the request was sent; status and headers may have come, the body's first bytes have not
answering   the body has begun
complete    all of the body has come, or was forwarded; the connection is free for other calls
lost        no (more) answer will come; `error` gives the reason
closed      the caller has closed it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Literal, Protocol

from kvferry.core.errors import PeerLost, ProtocolError, TransferError
from kvferry.core.runtime.tasks import WakeUp
from kvferry.http.client.connection import AnswerHead, ClientConnection, OutgoingRequest
from kvferry.http.client.pool import Pool
from kvferry.http.headers import RawHeaders
from kvferry.http.message import concat

_BUFFERED_BYTES = 256 * 1024
"""Maximum number of unread bytes of a body; beyond it, the instance has to wait."""


CallState = Literal["connecting", "sent", "answering", "complete", "lost", "closed"]
"""The state of a call, as in the module's docstring."""


_OVER: frozenset[CallState] = frozenset(("complete", "lost", "closed"))


class Bypass(Protocol):
    """A reader of an answer's body from the socket, in place of its transport."""

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
        "_buffer",
        "_bypass",
        "_max_bytes",
        "_on_change",
        "_pool",
        "_sink",
        "_task",
        "_waiter",
        "connection",
        "error",
        "head",
        "num_received",
        "paused",
        "request",
        "state",
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
        """The connection of the answer; None before and after."""
        self.paused = False
        """Reading is paused, so that the instance has to wait."""
        self._task: asyncio.Task[None] | None = None
        self._waiter = WakeUp()
        self._buffer: bytes | bytearray = b""
        self._max_bytes = 0
        """`_buffer`: received bytes of the body that were not taken; `_max_bytes`: its limit, or 0."""
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
                self._buffer = concat(self._buffer, payload)
                if len(self._buffer) > (self._max_bytes or _BUFFERED_BYTES):
                    if self._max_bytes:
                        connection.close(_too_long(self._max_bytes))
                        return
                    self.pause_reading()
            if self.state == "sent":
                self.state = "answering"
        if complete:
            self._end("complete", None)
        elif self._sink is None:
            self._changed()

    def lose(self, error: TransferError) -> None:
        """Called when the connection is closed. The request may be sent once more on a new connection if this one had
        been idle: the instance may have closed it just when it was used again, and has received nothing."""
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
            self._pool.put_back(connection)
        self._changed()
        self._on_change = None  # breaks a reference cycle with the owner of this call

    def _changed(self) -> None:
        self._waiter.wake()
        if self._on_change is not None:
            self._on_change()

    # For the caller.

    @property
    def status(self) -> int:
        """The status; 0 before it has come."""
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
        """True if nothing more will come."""
        return self.state in _OVER

    @property
    def num_received_so_far(self) -> int:
        """`num_received`, plus the bytes that a bypass has forwarded."""
        return self.num_received + (0 if self._bypass is None else self._bypass.num_received)

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` in the event loop whenever the state changes, and when more of an unread body has come. It
        must be quick."""
        self._on_change = on_change

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._waiter.wait()

    async def begun(self) -> None:
        """Wait for the body's first bytes, or its end: until then another instance may answer instead. Raises the
        `TransferError` that ended the call."""
        while self.state != "answering" and self.state != "complete":
            if self.error is not None:
                raise self.error
            await self.changed()

    async def read(self, max_bytes: int) -> bytes:
        """Read the whole body. Raises `ProtocolError` if it is longer than `max_bytes`, and the error that ended the
        call early."""
        self.collect(max_bytes)
        while self.state != "complete":
            if self.error is not None:
                raise self.error
            await self.changed()
        if len(self._buffer) > max_bytes:
            raise _too_long(max_bytes)
        return self.take()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises the error that ended the call early."""
        while True:
            if chunk := self.take():
                yield chunk
            elif self.state == "complete":
                return
            elif self.error is not None:
                raise self.error
            else:
                await self.changed()

    def take(self) -> bytes:
        """Take the part of the body that has arrived since the last call."""
        body, self._buffer = bytes(self._buffer), b""
        if self.paused:
            self.resume_reading()
        return body

    def collect(self, max_bytes: int) -> None:
        """Buffer the whole body until it is taken; a longer one is lost, with a `ProtocolError`."""
        self._max_bytes = max_bytes
        if self.paused:
            self.resume_reading()

    def set_sink(self, sink: Callable[[bytes], None] | None) -> None:
        """Pass further chunks of the body to `sink`, which may raise `TransferError` to end the call; None: buffer
        them."""
        self._sink = sink

    def set_bypass(self, bypass: Bypass | None) -> None:
        """Let `bypass` read the body; None: the connection's transport again."""
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
        """End the call with `error`."""
        if self._task is not None:
            self._task.cancel()
        connection, self.connection = self.connection, None
        self._end("lost", error)
        if connection is not None:
            connection.close(error)

    def close(self) -> None:
        """End the call; an unfinished answer is cut. May be called several times."""
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


def _too_long(max_bytes: int) -> ProtocolError:
    return ProtocolError(f"an answer is longer than {max_bytes} bytes")
