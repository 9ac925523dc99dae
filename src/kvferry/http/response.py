"""The answer to one request, on its way out.

A handler either calls `send` once, or `start`, `write` as often as it likes, and `end`. None of these waits or makes a
task; who writes much awaits `drain` in between, which waits only for a client that reads slowly. What a handler leaves
undone when it returns cuts the connection, so that a client cannot take a part for the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from kvferry.core.errors import RequestError
from kvferry.core.openai import REQUEST_ID_HEADER, SSE_DONE, error_envelope, error_headers, sse_event
from kvferry.http.errors import HttpRefusal
from kvferry.http.headers import RawHeaders, as_raw, find_header, response_head
from kvferry.http.request import Request

_REQUEST_ID = REQUEST_ID_HEADER.lower().encode()
_CHUNKED = (b"transfer-encoding", b"chunked")
_CLOSE = (b"connection", b"close")
_KEEP_ALIVE = (b"connection", b"keep-alive")
_LAST_CHUNK = b"0\r\n\r\n"
_NO_CONTENT = frozenset([204, 304])
JSON = (b"content-type", b"application/json")


class Framing(Enum):
    """How the client is told where the body ends."""

    CHUNKED = "chunked"
    LENGTH = "length"
    CLOSE = "close"
    NONE = "none"
    """There is no body: HEAD, 204, 304."""


class Producer(Protocol):
    """Who can be told to stop for a slow client: an upstream transport."""

    def pause_reading(self) -> None:
        """Produce no more."""

    def resume_reading(self) -> None:
        """Go on."""


class Wire(Protocol):
    """The connection, as a response uses it."""

    def transmit(self, data: bytes) -> None:
        """Send, or keep until it can be sent."""

    def answered(self, response: Response) -> None:
        """The response is complete."""

    def cut(self) -> None:
        """Break the connection off."""

    async def drain(self) -> None:
        """Wait until the client has read most of what was sent."""

    def set_producer(self, producer: Producer | None) -> None:
        """Pause this one while the client is slow."""

    @property
    def slow(self) -> bool:
        """Whether more is kept for the client than it has read."""

    @property
    def closing(self) -> bool:
        """Whether the connection ends with this response."""

    def date(self) -> tuple[bytes, bytes]:
        """The `date` header."""


class Response:
    """One response. `status` is None until it has begun; `num_bytes` counts what was sent of the body."""

    __slots__ = (
        "_added",
        "_declared",
        "_events",
        "_head",
        "_last",
        "_wire",
        "ended",
        "framing",
        "mid_chunk",
        "num_bytes",
        "request",
        "status",
        "version_1_0",
    )

    def __init__(self, wire: Wire, request: Request, *, version_1_0: bool) -> None:
        self._wire = wire
        self.request = request
        self.version_1_0 = version_1_0
        self.status: int | None = None
        self.ended = False
        self.framing = Framing.NONE
        self.num_bytes = 0
        self.mid_chunk = False
        """Whether bytes already framed were written that end within a chunk."""
        self._added: RawHeaders = []
        self._declared = b""
        self._head = b""
        self._last = b""
        self._events = False

    @property
    def started(self) -> bool:
        """Whether the status is settled, so that nothing else can be answered any more."""
        return self.status is not None

    def send(self, status: int, body: bytes = b"", headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """The whole answer. `content-length` is added."""
        length: RawHeaders = [] if status in _NO_CONTENT else [(b"content-length", b"%d" % len(body))]
        self.start(status, [*headers, *length])
        self.end(body)

    def send_json(self, body: bytes, status: int = 200) -> None:
        """The whole answer, `body` being JSON."""
        self.send(status, body, [JSON])

    def add_header(self, name: bytes, value: bytes) -> None:
        """Have a header go with whatever will be answered, an error too; before the answer has begun."""
        self._added.append((name, value))

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Status and headers; names in lower case. They go out with the first byte of the body, with `flush` or `end`.

        The body is framed by `content-length` where the headers have it, else in chunks. Headers of the connection
        (`connection`, `transfer-encoding`) are the room's: leave them out.
        """
        assert self.status is None, "a response is started once"
        self.status = status
        sent = [*headers, *self._added]
        self.framing = self._choose_framing(sent)
        if self.framing is Framing.CHUNKED:
            sent.append(_CHUNKED)
        if find_header(sent, _REQUEST_ID) is None:
            sent.append((_REQUEST_ID, self.request.id.encode()))
        sent.append(self._wire.date())
        if self._wire.closing or self.framing is Framing.CLOSE:
            sent.append(_CLOSE)
        elif self.version_1_0:
            sent.append(_KEEP_ALIVE)
        kind = find_header(sent, b"content-type") or b""
        self._events = kind.startswith(b"text/event-stream") and find_header(sent, b"content-encoding") is None
        self._head = response_head(status, sent)

    def _choose_framing(self, headers: RawHeaders) -> Framing:
        if self.request.method == "HEAD" or self.status in _NO_CONTENT:
            return Framing.NONE
        if (declared := find_header(headers, b"content-length")) is not None:
            self._declared = declared
            return Framing.LENGTH
        return Framing.CLOSE if self.version_1_0 else Framing.CHUNKED

    def write(self, data: bytes) -> None:
        """More of the body."""
        if not data or self.ended:
            return
        self.num_bytes += len(data)
        self._last = data
        if self.framing is Framing.CHUNKED:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        elif self.framing is Framing.NONE:
            data = b""
        self._transmit(data)

    def write_framed(self, data: bytes, *, mid_chunk: bool = False) -> None:
        """More of the body, framed already as `framing` says, and never with the last chunk. `mid_chunk`: `data` ends
        within a chunk, so that nothing of ours could follow."""
        if self.ended:
            return
        self.num_bytes += len(data)
        self._last = data
        self.mid_chunk = mid_chunk
        self._transmit(data if self.framing is not Framing.NONE else b"")

    def flush(self) -> None:
        """Send status and headers now."""
        self._transmit(b"")

    def end(self, data: bytes = b"") -> None:
        """The body is complete, with `data` as its last piece. The connection then takes the next request."""
        if self.ended:
            return
        if self.framing is Framing.CHUNKED:
            self.num_bytes += len(data)
            data = b"%x\r\n%b\r\n%b" % (len(data), data, _LAST_CHUNK) if data else _LAST_CHUNK
            self._transmit(data)
        else:
            self.write(data)
            if self._head:
                self._transmit(b"")
        self._finish()

    def end_framed(self, data: bytes) -> None:
        """As `end`, with `data` framed already, the last chunk included."""
        if self.ended:
            return
        self.write_framed(data)
        self.mid_chunk = False
        self._finish()

    def _finish(self) -> None:
        # A body of another length than was said would have the client take the next answer for a part of this one.
        if self.framing is Framing.LENGTH and self._declared != b"%d" % self.num_bytes:
            self.cut()
            return
        self.ended = True
        self._wire.answered(self)

    @property
    def slow(self) -> bool:
        """Whether `drain` would wait; for who writes so often that an await is dear."""
        return self._wire.slow

    async def drain(self) -> None:
        """Wait while the client is slow to read; returns at once when it is not. Await it between writes."""
        await self._wire.drain()

    def pauses(self, producer: Producer | None) -> None:
        """While the client is slow, have `producer` wait; for who writes without awaiting `drain`."""
        self._wire.set_producer(producer)

    def fail(self, error: RequestError) -> None:
        """Tell the client of `error` as well as still can be: with its status and OpenAI's envelope when nothing was
        sent; in an event stream as an error event and `[DONE]`; else by a connection that breaks off."""
        if self.ended:
            return
        if self.status is None or self._head:
            self.status, self._head = None, b""
            self.send(error.status, error_envelope(error), answer_headers(error))
        elif self._events and not self.mid_chunk and self.framing is not Framing.LENGTH:
            whole = self._last.endswith((b"\n\n", b"\n\n\r\n"))
            self.end((b"" if whole else b"\n\n") + sse_event(error_envelope(error)) + SSE_DONE)
        else:
            self.cut()

    def cut(self) -> None:
        """Break off, visibly: what was sent must not look complete."""
        if not self.ended:
            self.ended = True
            self._wire.cut()

    def _transmit(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self._wire.transmit(data)


def answer_headers(error: RequestError) -> RawHeaders:
    """The headers that go with an error's envelope."""
    own = error.headers if isinstance(error, HttpRefusal) else []
    return [*as_raw(error_headers(error)), *own]
