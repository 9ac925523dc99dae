"""One connection to an instance: bytes to answers, one answer after the other.

Owns the transport. It is free between two calls, and closed for good once `error` is set. Input that the parser
refuses, a byte that belongs to no answer, and an answer that ends early end the connection. Its `Call` receives the
answer.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Protocol, cast

import httptools
import msgspec

from kvferry.core.errors import PeerLost, ProtocolError, TransferError
from kvferry.http.headers import RawHeaders
from kvferry.http.message import MessageParser
from kvferry.http.tls import advice, closed_early_advice

_ANSWER_OVERHEAD = 64 * 1024
"""Maximum number of bytes of an answer's head, of a chunk's size or of trailers."""


class AnswerHead(msgspec.Struct, frozen=True):
    """An answer without its body. `first`: the first value of each header."""

    status: int
    headers: RawHeaders
    first: dict[bytes, bytes]
    chunked: bool
    keep_alive: bool
    """Another answer may come on the same connection."""

    @property
    def is_event_stream(self) -> bool:
        """True if it is a stream of server-sent events to which an event can be added."""
        kind = self.first.get(b"content-type", b"").partition(b";")[0]
        return kind.rstrip() == b"text/event-stream" and b"content-encoding" not in self.first


class OutgoingRequest(msgspec.Struct, frozen=True, eq=False):
    """The request of a call. `connect_s`: limit of the wait for a connection; `repeatable`: it is sent once more if the
    connection had just been closed; `bodiless`: its answer has no body, whatever the answer's headers."""

    data: tuple[bytes, ...]
    connect_s: float
    repeatable: bool
    bodiless: bool


class Receiver(Protocol):
    """A call, as its connection uses it."""

    @property
    def request(self) -> OutgoingRequest:
        """Its request."""

    def receive(self, head: AnswerHead, payload: bytes, num_bytes: int, complete: bool) -> None:
        """Called when more of the answer has arrived: `num_bytes` bytes, with this part of its body."""

    def lose(self, error: TransferError) -> None:
        """Called when the connection is closed."""


class ClientConnection(MessageParser, asyncio.Protocol):
    """A connection of a pool, used by one call at a time. `name`: of the instance; `client_name`: of this side, both
    for errors."""

    def __init__(self, name: str, client_name: str) -> None:
        super().__init__(httptools.HttpResponseParser, _ANSWER_OVERHEAD)
        self._name, self._client_name = name, client_name
        self.transport: asyncio.Transport | None = None
        self.error: TransferError | None = None
        """The reason why it is closed."""
        self.is_proven = False
        """The server has proved, on this connection, that it holds the deployment's token."""
        self.on_closed: Callable[[ClientConnection], None] | None = None
        self.num_calls = 0
        self.call: Receiver | None = None
        """The call that uses it."""
        self.head: AnswerHead | None = None
        """The head of the answer, once it has come."""
        self._chunks: list[bytes] = []
        """Received bytes of the body that the call has not received yet."""
        self.complete = False
        """All of the answer has come, so that another one may follow if its head allows."""

    @property
    def is_usable(self) -> bool:
        """True if a request may be sent."""
        transport = self.transport
        return self.error is None and self.call is None and transport is not None and not transport.is_closing()

    def has_unread(self) -> bool:
        """True if unread bytes, or the end, have come: a second answer to an earlier request would be mistaken for the
        answer to the next one."""
        source = None if self.transport is None else self.transport.get_extra_info("socket")
        if source is None:
            return False
        poll = select.poll()
        poll.register(source.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def begin(self, call: Receiver) -> None:
        """Send the request of `call`, which receives its answer."""
        assert self.transport is not None
        self.call, self.head, self.complete = call, None, False
        self.end_head()  # of an earlier answer
        self.num_calls += 1
        for part in call.request.data:
            self.transport.write(part)

    def close(self, error: TransferError | None = None) -> None:
        """Close the connection, because of `error`; the instance notices, and stops its work."""
        if self.error is not None:
            return
        self.error = error or PeerLost(f"the connection to {self._name} was closed on this side")
        call, self.call = self.call, None
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
        if self.error is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes, from the transport or returned by the compiled relay."""
        call = self.call
        if call is None:
            self.close(ProtocolError(f"{self._name} sent more than its answer"))
            return
        try:
            self.feed(data)
        except ProtocolError as error:
            self.close(ProtocolError(f"{self._name} does not answer in HTTP/1.1: {error}"))
            return
        if self.head is not None:
            chunks, self._chunks = self._chunks, []
            call.receive(self.head, b"".join(chunks), len(data), self.complete)

    def eof_received(self) -> None:
        """Handle the end of input, which ends an answer without a length; the transport closes itself."""
        call, head = self.call, self.head
        if call is not None and head is not None and not head.chunked and b"content-length" not in head.first:
            call.receive(head, b"", 0, True)  # the parser does not know, so no other answer may follow

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        reason = "the connection was closed" if error is None else advice(error, self._name, self._client_name)
        if error is None and self.num_calls == 1 and self.call is not None and self.head is None:
            reason += f" ({closed_early_advice(self._name, self._client_name)})"
        self.close(PeerLost(f"{self._name} broke off: {reason}"))
        self.stop_parsing()

    # The parser's calls.

    def on_message_begin(self) -> None:
        """The status line begins."""
        if self.complete:
            raise ProtocolError("more than one answer came")
        self.begin_head()

    def on_headers_complete(self) -> None:
        """The head is complete."""
        status, headers, first = self._parser.get_status_code(), self.headers, self.first
        if status < 100 or status == 101:
            raise ProtocolError(f"its status is {status}")
        if chunked := b"transfer-encoding" in first:
            codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
            if codings != [b"chunked"] or self._parser.get_http_version() != "1.1":
                raise ProtocolError(f"its transfer coding is {b', '.join(codings)[:40]!r}")
        if status < 200:
            return  # of an interim answer; another head follows
        bodiless = self.call is not None and self.call.request.bodiless
        self.end_head()
        self.complete = bodiless
        # After a bodiless answer, the parser would wait for the body.
        keep_alive = self._parser.should_keep_alive() and not bodiless
        self.head = AnswerHead(status, headers, first, chunked, keep_alive)

    def on_body(self, chunk: bytes) -> None:
        """A part of the body."""
        if self.complete:
            raise ProtocolError("a body came where there is none")
        self.num_overhead = 0
        self._chunks.append(chunk)

    def on_message_complete(self) -> None:
        """The end, also of an interim answer."""
        self.complete = self.complete or not self.in_head
