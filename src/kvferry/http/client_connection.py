"""One connection to an instance, which carries one request and answer after the other.

Owns the transport, bytes of the answer that have not been taken yet, and the deadline for what the instance must do
next. The header of an answer is parsed by httptools. Its body either waits here for `take` or, if a sink is set, is
passed to it in the same call in which it comes from the socket, without waking a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from math import inf
from typing import Literal, cast

import httptools

from kvferry.core.errors import PeerLost, ProtocolError, TransferError
from kvferry.http.errors import AnswerTimeout
from kvferry.http.fast_path import FastStream, plain_fd
from kvferry.http.headers import RawHeaders, first_values

_BUFFERED_BYTES = 256 * 1024
_LONGEST_HEAD = 64 * 1024

Sink = Callable[[bytes], None]
"""Takes bytes of a body, framed as they came."""

BodyKind = Literal["none", "length", "chunked", "close"]


class ClientConnection(asyncio.Protocol):
    """Created by the pool. One exchange at a time: `send`, `head`, then `take` or `sink` until `ended`, then
    `reset`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop, self._name = loop, name
        self.transport: asyncio.Transport
        self._connected = False
        self._resting = True
        self.num_requests = 0
        self.idle_since = 0.0
        self.lost: TransferError | None = None
        self.on_lost: Callable[[ClientConnection], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._watcher: Callable[[], None] | None = None
        self._between_s: float | None = None
        self._deadline = inf
        self._phase: Literal["first byte", "next byte"] = "first byte"
        self._full = self._slow = False  # why reading is paused: too much waits here; who it is passed on to is slow
        # Of one exchange: what `begin` sets anew, and what the last one leaves as it was.
        self.status, self.length = 0, 0
        self.kind: BodyKind = "none"
        self.headers: RawHeaders = []
        self.first: dict[bytes, bytes] = {}
        self.num_received = 0
        self._bodiless = self._head_done = self._headers_seen = self._at_eof = False
        self._keep_alive = True
        self._head = b""
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._sink: Sink | None = None
        self._fast: FastStream | None = None

    def rest(self) -> None:
        """The last exchange is over: nothing may come until the next begins, and nobody makes the instance wait."""
        self._resting, self._watcher = True, None
        if self._full or self._slow:
            self._pause(full=False, slow=False)
        self.idle_since, self._deadline = self._loop.time(), inf

    def begin(
        self, data: Iterable[bytes], first_byte_s: float | None, between_s: float | None, *, bodiless: bool
    ) -> None:
        """Send a request; the instance has to answer within `first_byte_s`, and then without pauses of more than
        `between_s`; None is no limit. `bodiless`: the answer will have no body, whatever its header says.

        The connection is new, or `reusable`: nothing is left of the last answer's body.
        """
        self._resting = self._head_done = False
        self.status, self.kind, self.num_received = 0, "none", 0
        self._bodiless = bodiless
        self._phase, self._between_s = "first byte", between_s
        self._deadline = inf if first_byte_s is None else self._loop.time() + first_byte_s
        self.num_requests += 1
        for part in data:
            self.transport.write(part)

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self.transport = cast(asyncio.Transport, transport)
        self._connected = True

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer have arrived."""
        self.num_received += len(data)
        sink = self._sink
        if sink is not None:
            if self._between_s is not None:
                self._deadline = self._loop.time() + self._between_s
            try:
                sink(data)
            except TransferError as error:
                self.fail(error)
        elif self._resting:
            # It would be taken for the answer to the next request.
            self.fail(ProtocolError(f"{self._name} sent an answer without a request"))
        elif self._head_done:
            self._keep(data)
        else:
            self._read_head(data)

    def eof_received(self) -> None:
        """The instance sends no more; the transport closes itself."""
        self._at_eof = True

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        if self._fast is not None:
            self._fast.stop()
        if self.lost is None:
            self.lost = PeerLost(f"{self._name} broke off: {error or 'the connection was closed'}")
        if self.kind == "close" and self._head_done and self._at_eof and self._sink is not None:
            self._feed_sink(b"")
        self._deadline = inf
        self._wake()
        self._watcher = None  # which may refer to this object
        if self.on_lost is not None:
            self.on_lost(self)

    # The head.

    def _read_head(self, data: bytes) -> None:
        head = self._head + data if self._head else data
        while (end := head.find(b"\r\n\r\n", max(0, len(self._head) - 3))) >= 0:
            self._parse(head[: end + 4])
            head, self._head = head[end + 4 :], b""
            if self.lost is not None:
                return
            if self.status >= 200:
                self._head_done, self._phase = True, "next byte"
                if head:
                    self._keep(head)
                else:
                    self._extend()
                    self._wake()
                return
        self._head = head
        if len(head) > _LONGEST_HEAD:
            self.fail(ProtocolError(f"the head of an answer of {self._name} is longer than {_LONGEST_HEAD} bytes"))

    def _parse(self, head: bytes) -> None:
        self.headers, self._headers_seen = [], False
        parser = httptools.HttpResponseParser(self)
        try:
            parser.feed_data(head)
            if not self._headers_seen:
                raise ProtocolError(f"{self._name} does not answer in HTTP/1.1")
            self.status = parser.get_status_code()
            self._keep_alive = bool(parser.should_keep_alive())
            self.kind, self.length = self._body_kind()
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError) as error:
            self.fail(ProtocolError(f"{self._name} does not answer in HTTP/1.1: {error}"))
        except ProtocolError as error:
            self.fail(error)

    def on_header(self, name: bytes, value: bytes) -> None:
        """For httptools."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """For httptools."""
        self._headers_seen = True

    def _body_kind(self) -> tuple[BodyKind, int]:
        first = self.first = first_values(self.headers)
        if self._bodiless or self.status < 200 or self.status in (204, 304):
            return "none", 0
        coding = first.get(b"transfer-encoding")
        if coding is not None:
            if coding.strip().lower() != b"chunked":
                raise ProtocolError(f"{self._name} answers in the transfer coding {coding!r}")
            return "chunked", 0
        length = first.get(b"content-length")
        if length is None:
            self._keep_alive = False
            return "close", 0
        return ("length", int(length)) if int(length) else ("none", 0)

    # The body.

    def _keep(self, data: bytes) -> None:
        self._extend()
        self._pieces.append(data)
        self._buffered += len(data)
        if self._buffered > _BUFFERED_BYTES:
            self._pause(full=True, slow=self._slow)
        self._wake()

    def take(self) -> bytes:
        """The bytes of the body that have arrived, with their framing; empty if there are none."""
        pieces, self._pieces, self._buffered = self._pieces, [], 0
        if self._full:
            self._pause(full=False, slow=self._slow)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @property
    def num_buffered(self) -> int:
        """The number of bytes that `take` would return."""
        return self._buffered

    @property
    def has_body_bytes(self) -> bool:
        """Whether `take` would return any bytes."""
        return bool(self._pieces)

    @property
    def closed_orderly(self) -> bool:
        """Whether the instance ended the connection after what it sent, which ends a body of kind `close`."""
        return self._at_eof and self.lost is not None

    def set_sink(self, sink: Sink) -> None:
        """Pass all bytes of the body to `sink` as soon as they arrive. An empty piece is the end of a body of kind
        `close`. If the sink raises a `TransferError`, the connection ends."""
        self._sink = sink
        if self._pieces:
            self._feed_sink(self.take())
        if self.closed_orderly and self.kind == "close":
            self._feed_sink(b"")

    def clear_sink(self) -> None:
        """The body is complete."""
        self._sink = None
        if self._fast is not None:
            self._fast.stop()

    def plain_fd(self) -> int:
        """The socket, for one who reads it in place of the transport; -1 if that cannot be done: because of TLS, or a
        deadline between bytes."""
        if self.lost is not None or self.paused or self._between_s is not None:
            return -1
        return plain_fd(self.transport)

    def take_over(self, fast: FastStream | None) -> None:
        """The body's bytes are read by `fast`, which has paused the transport; None: by the transport again."""
        self._fast = fast
        if fast is None and self.lost is None and not (self.paused or self.transport.is_closing()):
            self.transport.resume_reading()

    @property
    def num_received_so_far(self) -> int:
        """Bytes of this exchange's answer, with what was forwarded unread."""
        return self.num_received + (0 if self._fast is None else self._fast.num_received)

    def _feed_sink(self, data: bytes) -> None:
        assert self._sink is not None
        try:
            self._sink(data)
        except TransferError as error:
            self.fail(error)

    # Waiting.

    def _extend(self) -> None:
        self._deadline = inf if self._between_s is None else self._loop.time() + self._between_s

    @property
    def head_done(self) -> bool:
        """Whether status and headers have arrived."""
        return self._head_done

    async def wait(self) -> None:
        """Wait until more has arrived, or the connection is lost. One waiter at a time."""
        self._watcher = None
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake_at_next(self, waiter: asyncio.Future[None]) -> None:
        """Set `waiter` where `wait` would return; for those who wait for several connections at once."""
        self._waiter = waiter

    def on_change(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` whenever `wait` would return, until somebody waits or this exchange is over."""
        self._watcher = watcher

    @property
    def has_begun(self) -> bool:
        """Whether the first bytes of the body are here too, or there will be none."""
        return self._head_done and (bool(self._pieces) or self.kind == "none")

    @property
    def is_whole(self) -> bool:
        """Whether all of an answer with a length is here."""
        return self._head_done and self.kind == "length" and self._buffered >= self.length

    @property
    def fits(self) -> bool:
        """Whether the body has a length, and may wait here until it is whole."""
        return self.kind == "length" and self.length <= _BUFFERED_BYTES

    def wake(self) -> None:
        """End `wait`."""
        self._wake()

    def _wake(self) -> None:
        if self._watcher is not None:
            self._watcher()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def paused(self) -> bool:
        """Whether the instance is made to wait."""
        return self._full or self._slow

    def pause_reading(self) -> None:
        """Make the instance wait, because the reader of its answer is slow."""
        self._pause(full=self._full, slow=True)

    def resume_reading(self) -> None:
        """The reader is no longer slow."""
        self._pause(full=self._full, slow=False)

    def _pause(self, *, full: bool, slow: bool) -> None:
        """Read while there is neither reason not to: one that ends does not end the other."""
        was_paused = self.paused
        self._full, self._slow = full, slow
        if self.paused == was_paused or self.lost is not None:
            return
        source = self._fast or self.transport
        if self.paused:
            source.pause_reading()
        else:
            source.resume_reading()
            self._extend()

    def check(self, now: float) -> None:
        """Enforce the deadline. Called by the pool several times a second."""
        if now < self._deadline:
            return
        if self.paused:
            self._extend()  # it is we who do not read
            return
        what = "did not answer" if self._phase == "first byte" else "stopped in the middle of its answer"
        self.fail(AnswerTimeout(f"{self._name} {what}: no byte came in time", self._phase))

    # The end.

    def reusable(self) -> bool:
        """Whether another request may be sent, because the last answer was read to its end."""
        return self._keep_alive and self.lost is None and not self._pieces and not self.transport.is_closing()

    def fail(self, error: TransferError) -> None:
        """Close the connection because of `error`."""
        if self.lost is None:
            self.lost = error
        self.close()
        self._wake()

    def close(self) -> None:
        """Close the connection; the instance notices and stops its work."""
        self._deadline = inf
        if self.lost is None:
            self.lost = PeerLost(f"the connection to {self._name} was closed here")
        if self._fast is not None:
            self._fast.stop()
        self.transport.abort()

    def drop(self) -> None:
        """Close the connection, whether it is established or not."""
        if self._connected:
            self.close()
