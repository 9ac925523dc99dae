"""One connection to an instance: a request out, an answer in, as often as both sides like.

Owns the transport, the answer's bytes that nobody has taken yet, and the deadline of what the instance is to do next.
The head of an answer is read by httptools. Its body either waits here for `take`, or, once there is a sink, goes
through it within the very call that brings it from the socket: no task is woken for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Literal, cast

import httptools

from kvferry.core.errors import PeerLost, ProtocolError, TransferError
from kvferry.http.errors import AnswerTimeout
from kvferry.http.headers import RawHeaders, find_header

_BUFFERED_BYTES = 256 * 1024
_LONGEST_HEAD = 64 * 1024

Sink = Callable[[bytes], None]
"""Takes bytes of a body, framed as they came."""

BodyKind = Literal["none", "length", "chunked", "close"]


class ClientConnection(asyncio.Protocol):
    """Made by the pool. One exchange at a time: `send`, `head`, then `take` or `sink` until `ended`, then `reset`."""

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
        self._between_s: float | None = None
        self._deadline = inf
        self._phase: Literal["first byte", "next byte"] = "first byte"
        self._full = self._slow = False  # why reading is paused: too much waits here; who it is passed on to is slow
        self.begin(bodiless=False)
        self._resting = True

    def rest(self) -> None:
        """The last exchange is over: nothing may come until the next begins, and nobody makes the instance wait."""
        self._resting = True
        self._pause(full=False, slow=False)
        self.idle_since, self._deadline = self._loop.time(), inf

    def begin(self, *, bodiless: bool) -> None:
        """A new exchange. `bodiless`: the answer will have no body, whatever its head says."""
        self._resting = False
        self.status = 0
        self.headers: RawHeaders = []
        self.kind: BodyKind = "none"
        self.length = 0
        self.num_received = 0
        self._bodiless = bodiless
        self._keep_alive = True
        self._head = b""
        self._head_done = self._headers_seen = False
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._sink: Sink | None = None
        self._at_eof = False

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The pool has connected."""
        self.transport = cast(asyncio.Transport, transport)
        self._connected = True

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        self.num_received += len(data)
        if self._sink is not None:
            if self._between_s is not None:
                self._deadline = self._loop.time() + self._between_s
            self._feed_sink(data)
        elif self._resting:
            # It would be taken for the answer to the next request.
            self.fail(ProtocolError(f"{self._name} sends an answer that nobody asked for"))
        elif self._head_done:
            self._keep(data)
        else:
            self._read_head(data)

    def eof_received(self) -> None:
        """The instance sends no more; the transport closes itself."""
        self._at_eof = True

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        if self.lost is None:
            self.lost = PeerLost(f"{self._name} broke off: {error or 'the connection was closed'}")
        if self.kind == "close" and self._head_done and self._at_eof and self._sink is not None:
            self._feed_sink(b"")
        self._deadline = inf
        self._wake()
        if self.on_lost is not None:
            self.on_lost(self)

    # The head.

    def _read_head(self, data: bytes) -> None:
        head = self._head + data
        while (end := head.find(b"\r\n\r\n", max(0, len(self._head) - 3))) >= 0:
            self._parse(head[: end + 4])
            head, self._head = head[end + 4 :], b""
            if self.lost is not None:
                return
            if self.status >= 200:
                self._head_done, self._head = True, b""
                self._phase = "next byte"
                self._extend()
                if head:
                    self._keep(head)
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
        if self._bodiless or self.status < 200 or self.status in (204, 304):
            return "none", 0
        coding = find_header(self.headers, b"transfer-encoding")
        if coding is not None:
            if coding.strip().lower() != b"chunked":
                raise ProtocolError(f"{self._name} answers in the transfer coding {coding!r}")
            return "chunked", 0
        length = find_header(self.headers, b"content-length")
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
        """What has come of the body, framed as it came; empty when nothing new has."""
        pieces, self._pieces, self._buffered = self._pieces, [], 0
        self._pause(full=False, slow=self._slow)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @property
    def num_buffered(self) -> int:
        """Bytes that `take` would give."""
        return self._buffered

    @property
    def has_body_bytes(self) -> bool:
        """Whether `take` would give something."""
        return bool(self._pieces)

    @property
    def closed_orderly(self) -> bool:
        """Whether the instance ended the connection after what it sent, which ends a body of kind `close`."""
        return self._at_eof and self.lost is not None

    def set_sink(self, sink: Sink) -> None:
        """Have all that comes of the body go to `sink` at once. An empty piece is the end of a body of kind `close`.
        What the sink raises of `TransferError` ends the connection."""
        self._sink = sink
        if self._pieces:
            self._feed_sink(self.take())
        if self.closed_orderly and self.kind == "close":
            self._feed_sink(b"")

    def clear_sink(self) -> None:
        """The body is complete."""
        self._sink = None

    def _feed_sink(self, data: bytes) -> None:
        assert self._sink is not None
        try:
            self._sink(data)
        except TransferError as error:
            self.fail(error)

    # Waiting.

    def expect(self, first_byte_s: float | None, between_s: float | None) -> None:
        """From now on the instance has to answer in time; None is no limit."""
        self._phase, self._between_s = "first byte", between_s
        self._deadline = inf if first_byte_s is None else self._loop.time() + first_byte_s

    def _extend(self) -> None:
        self._deadline = inf if self._between_s is None else self._loop.time() + self._between_s

    @property
    def head_done(self) -> bool:
        """Whether status and headers are here."""
        return self._head_done

    async def wait(self) -> None:
        """Until something more is here, or the connection is lost. One waiter at a time."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """End `wait`."""
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def paused(self) -> bool:
        """Whether the instance is made to wait."""
        return self._full or self._slow

    def pause_reading(self) -> None:
        """Have the instance wait: who its answer is passed on to is slow."""
        self._pause(full=self._full, slow=True)

    def resume_reading(self) -> None:
        """Who was slow has caught up."""
        self._pause(full=self._full, slow=False)

    def _pause(self, *, full: bool, slow: bool) -> None:
        """Read while there is neither reason not to: one that ends does not end the other."""
        was_paused = self.paused
        self._full, self._slow = full, slow
        if self.paused == was_paused or self.lost is not None:
            return
        if self.paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()
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
        """Whether another request may be sent, the answer to the last having been read to its end."""
        return self._keep_alive and self.lost is None and not self._pieces and not self.transport.is_closing()

    def fail(self, error: TransferError) -> None:
        """Break off, because of `error`."""
        if self.lost is None:
            self.lost = error
        self.close()
        self._wake()

    def close(self) -> None:
        """Break off; the instance sees it and ends its work."""
        self._deadline = inf
        if self.lost is None:
            self.lost = PeerLost(f"the connection to {self._name} was closed here")
        self.transport.abort()

    def drop(self) -> None:
        """Break off, connected or not."""
        if self._connected:
            self.close()
