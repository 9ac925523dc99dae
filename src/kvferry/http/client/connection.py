"""One connection to an instance: bytes to answers, one answer after the other.

Owns the transport. It is free between two calls, and closed for good when `error` says why. Whatever the parser
refuses, a byte that belongs to no answer, and an answer that ends early end the connection. What an answer says is told
to its `Call`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

from kvferry.core.errors import PeerLost, ProtocolError, TransferError
from kvferry.http.client.answer_parser import AnswerHead, AnswerParser
from kvferry.http.tls import advice, closed_at_once


class Receiver(Protocol):
    """A call, as its connection uses it."""

    def receive(self, head: AnswerHead, payload: bytes, num_bytes: int, *, complete: bool) -> None:
        """More of the answer has arrived: so many bytes, with this part of its body."""

    def lose(self, error: TransferError) -> None:
        """The connection is closed."""


class ClientConnection(asyncio.Protocol):
    """Made by a pool, used by one call at a time. `name`: of the instance, for errors; `who`: whose connection it
    is."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, who: str) -> None:
        self._loop, self._name, self._who = loop, name, who
        self.transport: asyncio.Transport | None = None
        self.error: TransferError | None = None
        """Why it is closed."""
        self.on_closed: Callable[[ClientConnection], None] | None = None
        self.num_calls = 0
        self.free_since = 0.0
        self._parser = AnswerParser()
        self._call: Receiver | None = None

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent."""
        transport = self.transport
        return self.error is None and self._call is None and transport is not None and not transport.is_closing()

    @property
    def between_chunks(self) -> bool:
        """Whether a chunk would begin with the next byte."""
        return self._parser.between_chunks

    def begin(self, call: Receiver, data: tuple[bytes, ...], *, bodiless: bool) -> None:
        """Send a request; `call` receives its answer, which is `bodiless` or not."""
        assert self.transport is not None
        self._call = call
        self._parser.next(bodiless=bodiless)
        self.num_calls += 1
        for part in data:
            self.transport.write(part)

    def release(self) -> bool:
        """The call is over; returns whether the connection can take another one."""
        self._call, self.free_since, head = None, self._loop.time(), self._parser.head
        return self._parser.complete and head is not None and head.keep_alive and self.error is None

    def close(self, error: TransferError | None = None) -> None:
        """Close it, because of `error`; the instance notices, and stops its work."""
        if self.error is not None:
            return
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
        if self.error is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes, from the transport or returned by the compiled relay."""
        call, parser = self._call, self._parser
        if call is None:
            self.close(ProtocolError(f"{self._name} sent more than its answer"))
            return
        try:
            parser.feed(data)
        except ProtocolError as error:
            self.close(ProtocolError(f"{self._name} does not answer in HTTP/1.1: {error}"))
            return
        if parser.head is not None:
            pieces, parser.pieces = parser.pieces, []
            payload = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            call.receive(parser.head, payload, len(data), complete=parser.complete)

    def eof_received(self) -> None:
        """The instance sends no more, which is the end of an answer without a length; the transport closes itself."""
        call, head = self._call, self._parser.head
        if call is not None and head is not None and not head.chunked and b"content-length" not in head.first:
            call.receive(head, b"", 0, complete=True)  # to the parser it is not, so that no other answer may follow

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        why = "the connection was closed" if error is None else advice(error, self._name, self._who)
        if error is None and self.num_calls == 1 and self._call is not None and self._parser.head is None:
            why += f" ({closed_at_once(self._name, self._who)})"
        self.close(PeerLost(f"{self._name} broke off: {why}"))
        self._parser.close()
