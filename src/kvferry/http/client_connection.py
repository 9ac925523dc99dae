"""One connection to an instance: bytes to answers, one answer after the other.

Owns the transport and the parser, which is llhttp in its strict form (httptools): whatever it refuses, a byte that
belongs to no answer, and an answer that ends early end the connection. What an answer says is told to its `Call`.

    free      between two calls: nothing may come
    sent      a request is on its way; nothing of its answer has come
    head      a part of the answer's head is here
    body      status and headers are here
    complete  all of the answer is here
    closed    for good; `error` says why
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, cast

import httptools

from kvferry.core.errors import PeerLost, ProtocolError, TransferError
from kvferry.http.headers import RawHeaders, first_values
from kvferry.http.tls import advice, closed_at_once

if TYPE_CHECKING:
    from kvferry.http.call import Call

_MOST_OVERHEAD = 64 * 1024
"""Bytes of a head, of a chunk's size or of trailers."""


class Phase(Enum):
    """What the connection does now; see the module."""

    FREE = auto()
    SENT = auto()
    HEAD = auto()
    BODY = auto()
    COMPLETE = auto()
    CLOSED = auto()


class ClientConnection(asyncio.Protocol):
    """Made by a pool, used by one call at a time. `name`: of the instance, for errors; `who`: whose connection it
    is."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, who: str) -> None:
        self._loop, self._name, self._who = loop, name, who
        self.transport: asyncio.Transport | None = None
        self.phase = Phase.FREE
        self.error: TransferError | None = None
        self.on_closed: Callable[[ClientConnection], None] | None = None
        self.num_calls = 0
        self.free_since = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._call: Call | None = None
        self._reusable = True
        self._headers: RawHeaders = []
        self._pieces: list[bytes] = []
        self._num_overhead = 0
        self._in_chunk = False
        self.between_chunks = False
        """Whether a chunk would begin with the next byte."""

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent."""
        return self.phase is Phase.FREE and self.transport is not None and not self.transport.is_closing()

    @property
    def is_complete(self) -> bool:
        """Whether all of the answer is here."""
        return self.phase is Phase.COMPLETE

    def begin(self, call: Call, data: tuple[bytes, ...]) -> None:
        """Send a request; `call` is told of its answer."""
        assert self.transport is not None
        self._call, self.phase, self._num_overhead = call, Phase.SENT, 0
        self.num_calls += 1
        for part in data:
            self.transport.write(part)

    def release(self) -> bool:
        """The call is over; returns whether the connection can take another one."""
        self._call = None
        if self.phase is not Phase.COMPLETE or not self._reusable:
            return False
        self.phase, self.free_since = Phase.FREE, self._loop.time()
        return self.is_usable

    def close(self, error: TransferError | None = None) -> None:
        """Close it, because of `error`; the instance notices, and stops its work."""
        if self.phase is Phase.CLOSED:
            return
        self.phase = Phase.CLOSED
        self.error = error or PeerLost(f"the connection to {self._name} was closed here")
        call, self._call = self._call, None
        if call is not None:
            call.lose(self.error)  # before the socket is closed, which the fast path may still read
        if self.transport is not None:
            self.transport.abort()
        if self.on_closed is not None:
            self.on_closed(self)

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self.transport = cast(asyncio.Transport, transport)
        if self.phase is Phase.CLOSED:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes have come, from the transport or handed back by the fast path."""
        call = self._call
        if call is None or self.phase is Phase.COMPLETE:
            self.close(ProtocolError(f"{self._name} sent more than its answer"))
            return
        self._num_overhead += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            cause = error.__context__ if isinstance(error.__context__, ProtocolError) else error
            self.close(ProtocolError(f"{self._name} does not answer in HTTP/1.1: {cause}"))
            return
        self.between_chunks = not self._in_chunk and data.endswith(b"\r\n")
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            self._num_overhead = 0
            call.receive(pieces[0] if len(pieces) == 1 else b"".join(pieces), len(data))
        elif self._num_overhead > _MOST_OVERHEAD:
            self.close(ProtocolError(f"{self._name} sent {self._num_overhead} bytes of a head, or of a chunk's size"))
        elif self.phase is not Phase.HEAD:
            call.receive(b"", len(data))

    def eof_received(self) -> None:
        """The instance sends no more, which is the end of an answer without a length; the transport closes itself."""
        if self.phase is Phase.BODY and self._call is not None and self._call.ends_with_connection:
            self.phase, self._reusable = Phase.COMPLETE, False
            self._call.receive(b"", 0)

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        why = "the connection was closed" if error is None else advice(error, self._name, self._who)
        if error is None and self.num_calls == 1 and self.phase is Phase.SENT:
            why += f" ({closed_at_once(self._name, self._who)})"
        self.close(PeerLost(f"{self._name} broke off: {why}"))

    # The parser's calls.

    def on_message_begin(self) -> None:
        """An answer begins."""
        if self.phase is Phase.COMPLETE:
            raise ProtocolError("more than one answer came")
        self.phase, self._headers = Phase.HEAD, []

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which nobody reads."""
        if self.phase is Phase.HEAD:
            self._headers.append((name.lower(), value))
        elif name.lower() in (b"content-length", b"transfer-encoding"):
            raise ProtocolError("it says behind its body how long that was")

    def on_headers_complete(self) -> None:
        """Status and headers are here."""
        status, call = self._parser.get_status_code(), self._call
        if status < 100 or status == 101:
            raise ProtocolError(f"its status is {status}")
        codings = [value.strip().lower() for name, value in self._headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or self._parser.get_http_version() != "1.1"):
            raise ProtocolError(f"its transfer coding is {b', '.join(codings)[:40]!r}")
        if status < 200 or call is None:
            return  # of an interim answer
        first = first_values(self._headers)
        self._reusable = bool(self._parser.should_keep_alive())
        self._num_overhead, self._in_chunk = 0, False
        self.phase = Phase.BODY
        call.begin(status, self._headers, first, chunked=bool(codings))
        if call.bodiless:
            self.phase, self._reusable = Phase.COMPLETE, False  # the parser would wait for a body

    def on_body(self, piece: bytes) -> None:
        """A part of the body."""
        if self.phase is Phase.COMPLETE:
            raise ProtocolError("a body came where there is none")
        self._pieces.append(piece)

    def on_chunk_header(self) -> None:
        """A chunk begins."""
        self._in_chunk = True

    def on_chunk_complete(self) -> None:
        """It is here."""
        self._in_chunk = False

    def on_message_complete(self) -> None:
        """All of an answer is here."""
        if self.phase is Phase.BODY:
            self.phase = Phase.COMPLETE
