"""An instance's answer as it arrives: read here, or forwarded to a client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvferry.core.errors import ProtocolError
from kvferry.http.client_connection import ClientConnection
from kvferry.http.fast_path import Pattern
from kvferry.http.headers import RawHeaders
from kvferry.http.response import Response

if TYPE_CHECKING:
    from kvferry.http.pool import Pool


class Passage(Protocol):
    """Makes of one body's payload what the client gets; as in `fast_path.Reader`."""

    def take(self, payload: bytes) -> bytes:
        """What is sent of the next piece. Raises `TransferError`."""

    def pattern(self) -> Pattern | None:
        """Which chunks may be forwarded without `take`."""

    def passed(self, kept: bytes) -> None:
        """What was kept of those."""


class Mask(NamedTuple):
    """A passage that changes pieces that contain `word`, but not their length. `change` must be quick, and raise
    nothing."""

    word: bytes
    change: Callable[[bytes], bytes]

    def take(self, payload: bytes) -> bytes:
        """As in `Passage`."""
        return self.change(payload) if self.word in payload else payload

    def pattern(self) -> Pattern:
        """Whatever is not changed."""
        return Pattern(stops=(self.word,))

    def passed(self, kept: bytes) -> None:
        """Nothing is kept."""


class _Unchanged:
    def take(self, payload: bytes) -> bytes:
        return payload

    def pattern(self) -> Pattern:
        return _ANY

    def passed(self, kept: bytes) -> None:
        pass


_ANY = Pattern()
UNCHANGED = _Unchanged()


class Answer:
    """Status and headers (names in lower case) have arrived; the body may still be to come.

    Its user reads it once, by `chunks`, `read` or `relay`, and calls `close` in any case: an answer that was read to
    its end gives its connection back, any other has it cut, so that the instance stops. All of them raise `PeerLost` if
    the connection breaks, `AnswerTimeout` if nothing comes in time, and `ProtocolError` if the answer is not HTTP.
    """

    def __init__(self, connection: ClientConnection, pool: Pool) -> None:
        self.status = connection.status
        self.headers: RawHeaders = connection.headers
        self.first = connection.first
        """Of each header, the first value."""
        self._connection, self._pool = connection, pool
        self._closed = self._done = False

    @property
    def is_event_stream(self) -> bool:
        """Whether it is a stream of server-sent events to which an event can be added."""
        kind = self.first.get(b"content-type", b"")
        return kind.startswith(b"text/event-stream") and b"content-encoding" not in self.first

    def progress(self) -> tuple[int, bool]:
        """How many bytes have come, and whether the reader is what makes the instance wait."""
        return self._connection.num_received_so_far, self._connection.paused

    async def ready(self) -> None:
        """Wait for the payload's first bytes, or its end. A proxy that waits for them can still choose another
        answer."""
        connection = self._connection
        while not (connection.complete or connection.has_payload):
            if connection.lost is not None:
                raise connection.lost
            await connection.wait()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The payload as it comes."""
        connection = self._connection
        while not self._done:
            await self.ready()
            if piece := connection.take():
                yield piece
            else:
                self._done = True

    async def read(self, max_bytes: int) -> bytes:
        """The whole payload. Raises `ProtocolError` when it is longer than `max_bytes`."""
        body = bytearray()
        async for piece in self.chunks():
            body += piece
            if len(body) > max_bytes:
                raise ProtocolError(f"an answer is longer than {max_bytes} bytes")
        self._give_back()
        return bytes(body)

    def read_now(self, max_bytes: int) -> bytes | None:
        """Like `read`, if all has arrived; otherwise None, and nothing was read. Raises `ProtocolError` only."""
        if not self._connection.complete:
            return None
        body, self._done = self._connection.take(), True
        self._give_back()
        if len(body) > max_bytes:
            raise ProtocolError(f"an answer is longer than {max_bytes} bytes")
        return body

    def relay_now(self, response: Response, passage: Passage = UNCHANGED) -> bool:
        """Like `relay`, if all has arrived; otherwise False, and nothing was forwarded."""
        if not self._connection.complete:
            return False
        body, self._done = self._connection.take(), True
        self._give_back()
        response.end(passage.take(body))
        return True

    async def relay(self, response: Response, passage: Passage = UNCHANGED, *, ends: bool = True) -> None:
        """Forward what `passage` makes of the payload as it comes, to a response that has been started, no faster than
        its client reads. `ends`: the answer's end is the response's; otherwise the response is left open, as it is if
        the instance's connection breaks: call its `fail`, or continue with another answer's payload."""
        connection = self._connection
        relay = _Relay(self, response, passage, ends=ends)
        response.pauses(connection)
        try:
            connection.set_sink(relay.feed)
            if self._pool.fast_path is not None and connection.is_chunked and not self._done:
                self._pool.fast_path.forward(connection, response, relay)
            while not self._done:
                if connection.lost is not None:
                    raise connection.lost
                await connection.wait()
        finally:
            response.pauses(None)
            connection.clear_sink()
        self._give_back()

    def _ended(self) -> None:
        self._done = True
        self._connection.clear_sink()
        self._connection.wake()

    def _give_back(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.give_back(self._connection)

    def close(self) -> None:
        """Give the connection back, or cut it if the answer's end has not come. May be called several times."""
        if self._closed:
            return
        self._connection.clear_sink()
        if self._done or self._connection.complete:
            self._connection.take()
            self._give_back()
            return
        self._closed = True
        self._connection.close()
        self._pool.discard(self._connection)


class _Relay:
    """Moves one body from an instance's socket to a client's, each piece within one call."""

    __slots__ = ("_answer", "_connection", "_ends", "_passage", "_response", "_take", "passed")

    def __init__(self, answer: Answer, response: Response, passage: Passage, *, ends: bool) -> None:
        self._answer, self._connection, self._response = answer, answer._connection, response
        self._passage, self._take, self._ends = passage, passage.take, ends
        self.passed = passage.passed

    def feed(self, payload: bytes) -> None:
        """The next piece; with the last one, the connection's `complete` is true."""
        if not self._connection.complete:
            self._response.write(self._take(payload))
            return
        if self._ends:
            self._response.end(self._take(payload))
        else:
            self._response.write(self._take(payload))
        self._answer._ended()

    def pattern(self) -> Pattern | None:
        """As in `fast_path.Reader`: the passage's, between two chunks."""
        return self._passage.pattern() if self._connection.between_chunks and not self._response.ended else None
