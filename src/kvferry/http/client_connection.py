"""One connection to an instance, which carries one request and answer after the other.

Owns the transport, what has come of the answer's payload and has not been taken yet, and the deadline for what the
instance must do next. llhttp, in its strict form, decides what an answer is and where it ends; what it lets pass and
two readers might still read in two ways is refused here. Payload either waits here for `take` or, if a sink is set, is
passed to it in the same call in which it comes from the socket, without waking a task. Chunk sizes, extensions and
trailers end here.
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
"""Takes payload."""


class ClientConnection(asyncio.Protocol):
    """Created by the pool. One exchange at a time: `begin`, then `take` or a sink until `complete`, then
    `rest`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop, self._name = loop, name
        self.transport: asyncio.Transport
        self._connected = False
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
        self._parser: httptools.HttpResponseParser | None = None
        """Of the present answer, up to its end."""
        self.status = 0
        self.length: int | None = None
        """The payload's, if the head says so."""
        self.headers: RawHeaders = []
        self.first: dict[bytes, bytes] = {}
        self.num_received = 0
        self.complete = False
        """Whether the answer's end is here."""
        self.is_chunked = False
        self._bodiless = self._head_done = self._between = self._at_eof = False
        self._keep_alive = True
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._sink: Sink | None = None
        self._fast: FastStream | None = None

    def rest(self) -> None:
        """The last exchange is over: nothing may come until the next begins, and nobody makes the instance wait."""
        self._watcher = None
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
        self._parser = httptools.HttpResponseParser(self)
        self._head_done = self.complete = self._between = False
        self.status, self.num_received = 0, 0
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
        if self._parser is None:
            # It would be taken for the answer to the next request.
            self.fail(ProtocolError(f"{self._name} sent more than its answer"))
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.complete, self._pieces = False, []
            cause = error.__context__
            refused = isinstance(cause, ProtocolError)
            self.fail(ProtocolError(f"{self._name} {cause if refused else f'does not answer in HTTP/1.1: {error}'}"))
            return
        if self.complete:
            self._parser = None  # which refers to this object
        elif not self._head_done:
            if self.num_received > _LONGEST_HEAD:
                self.fail(ProtocolError(f"{self._name} sent a head of more than {_LONGEST_HEAD} bytes"))
            return
        else:
            # What has begun behind a chunk and is no whole line yet ends otherwise; a whole line has been told of.
            self._between = self._between and data.endswith(b"\r\n")
        self._extend()
        if self._sink is not None:
            self._feed_sink()
            return
        if self._buffered > _BUFFERED_BYTES:
            self._pause(full=True, slow=self._slow)
        self._wake()

    def eof_received(self) -> None:
        """The instance sends no more; the transport closes itself."""
        self._at_eof = True

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        if self._fast is not None:
            self._fast.stop()
        if self.lost is None:
            self.lost = PeerLost(f"{self._name} broke off: {error or 'the connection was closed'}")
        if self._until_close and self._head_done and self._at_eof:
            self.complete = True
            if self._sink is not None:
                self._feed_sink()
        self._parser, self._deadline = None, inf
        self._wake()
        self._watcher = None  # which may refer to this object
        if self.on_lost is not None:
            self.on_lost(self)

    # The parser's calls.

    def on_message_begin(self) -> None:
        """An answer begins: an interim one, the one that counts, or one too many."""
        if self._head_done:
            raise ProtocolError("sent more than its answer")
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or a trailer, which goes nowhere."""
        if not self._head_done:
            self.headers.append((name.lower(), value))
        elif name.lower() in (b"content-length", b"transfer-encoding"):
            raise ProtocolError("says behind its answer how long it was")

    def on_headers_complete(self) -> None:
        """The head is here, or that of an interim answer."""
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        if self.status < 100 or self.status == 101:
            raise ProtocolError(f"answered with status {self.status}")
        first = self.first = first_values(self.headers)
        coding = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if coding and (coding != [b"chunked"] or self._parser.get_http_version() != "1.1"):
            raise ProtocolError(f"answers in the transfer coding {b', '.join(coding)!r}")
        if self.status < 200:
            return
        length = first.get(b"content-length")
        self.is_chunked, self.length = bool(coding), None if length is None else int(length)
        self._keep_alive = bool(self._parser.should_keep_alive())
        self._head_done, self._phase = True, "next byte"
        self.complete = self._bodiless

    def on_chunk_header(self) -> None:
        """The size of a chunk is here."""
        self._between = False

    def on_chunk_complete(self) -> None:
        """A chunk has ended, with its line."""
        self._between = True

    def on_body(self, piece: bytes) -> None:
        """Payload, as much as has come."""
        if self._bodiless:
            raise ProtocolError("sent a body where none can be")
        self._pieces.append(piece)
        self._buffered += len(piece)

    def on_message_complete(self) -> None:
        """The end of an answer, or of an interim one."""
        self.complete = self._head_done

    # The body.

    @property
    def _until_close(self) -> bool:
        """Whether the body ends with the connection."""
        return not (self.is_chunked or self._bodiless) and self.length is None

    @property
    def between_chunks(self) -> bool:
        """Whether nothing of the next chunk has come yet."""
        return self._between and not self.complete

    def take(self) -> bytes:
        """The payload that has arrived; empty if there is none."""
        pieces, self._pieces, self._buffered = self._pieces, [], 0
        if self._full:
            self._pause(full=False, slow=self._slow)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @property
    def has_payload(self) -> bool:
        """Whether `take` would return any bytes."""
        return bool(self._pieces)

    def set_sink(self, sink: Sink) -> None:
        """Pass all payload to `sink` as soon as it arrives; an empty piece may come when `complete` is set. If the sink
        raises a `TransferError`, the connection ends."""
        self._sink = sink
        if self._pieces or self.complete:
            self._feed_sink()

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

    def _feed_sink(self) -> None:
        assert self._sink is not None
        if not (self._pieces or self.complete):
            return
        try:
            self._sink(self.take())
        except TransferError as error:
            self.fail(error)

    # Waiting.

    def _extend(self) -> None:
        self._deadline = inf if self._between_s is None or self.complete else self._loop.time() + self._between_s

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
        return self._head_done and (bool(self._pieces) or self.complete)

    @property
    def fits(self) -> bool:
        """Whether the body is here, or has a length, and may wait here until it is complete."""
        return self.complete or (self.length is not None and self.length <= _BUFFERED_BYTES)

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
        return self._keep_alive and self.complete and self.lost is None and not self.transport.is_closing()

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
        self._parser = None
        if self._fast is not None:
            self._fast.stop()
        self.transport.abort()

    def drop(self) -> None:
        """Close the connection, whether it is established or not."""
        if self._connected:
            self.close()
