"""One connection to an instance: bytes to answers, one answer after the other.

Owns the transport. Whatever the parser refuses, a byte that belongs to no answer, and an answer that ends early end the
connection. What an answer says is told to its `Call`.

    free      between two calls: nothing may come
    sent      a request is on its way; its answer's head is not here
    body      status and headers are here
    complete  all of the answer is here
    closed    for good; `error` says why
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol, cast

from kvferry.core.errors import PeerLost, ProtocolError, TransferError
from kvferry.http.message import AnswerHead, AnswerParser
from kvferry.http.tls import advice, closed_at_once


class CallPhase(Enum):
    """What the connection does now; see the module."""

    FREE = auto()
    SENT = auto()
    BODY = auto()
    COMPLETE = auto()
    CLOSED = auto()


class Receiver(Protocol):
    """A call, as its connection uses it."""

    def begin(self, head: AnswerHead) -> bool:
        """Status and headers are here; returns whether a body comes."""

    def receive(self, payload: bytes, num_bytes: int) -> None:
        """More of the answer has come."""

    def lose(self, error: TransferError) -> None:
        """The connection is closed."""

    @property
    def ends_with_connection(self) -> bool:
        """Whether the end of the connection is the end of the body."""


class ClientConnection(asyncio.Protocol):
    """Made by a pool, used by one call at a time. `name`: of the instance, for errors; `who`: whose connection it
    is."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, who: str) -> None:
        self._loop, self._name, self._who = loop, name, who
        self.transport: asyncio.Transport | None = None
        self.phase = CallPhase.FREE
        self.error: TransferError | None = None
        self.on_closed: Callable[[ClientConnection], None] | None = None
        self.num_calls = 0
        self.free_since = 0.0
        self._parser = AnswerParser(self._head_is_here)
        self._call: Receiver | None = None
        self._reusable = True

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent."""
        return self.phase is CallPhase.FREE and self.transport is not None and not self.transport.is_closing()

    @property
    def is_complete(self) -> bool:
        """Whether all of the answer is here."""
        return self.phase is CallPhase.COMPLETE

    @property
    def between_chunks(self) -> bool:
        """Whether a chunk would begin with the next byte."""
        return self._parser.between_chunks

    def begin(self, call: Receiver, data: tuple[bytes, ...]) -> None:
        """Send a request; `call` is told of its answer."""
        assert self.transport is not None
        self._call, self.phase = call, CallPhase.SENT
        self._parser.next()
        self.num_calls += 1
        for part in data:
            self.transport.write(part)

    def release(self) -> bool:
        """The call is over; returns whether the connection can take another one."""
        self._call = None
        if self.phase is not CallPhase.COMPLETE or not self._reusable:
            return False
        self.phase, self.free_since = CallPhase.FREE, self._loop.time()
        return self.is_usable

    def close(self, error: TransferError | None = None) -> None:
        """Close it, because of `error`; the instance notices, and stops its work."""
        if self.phase is CallPhase.CLOSED:
            return
        self.phase = CallPhase.CLOSED
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
        if self.phase is CallPhase.CLOSED:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes have come, from the transport or handed back by the fast path."""
        call, parser = self._call, self._parser
        if call is None or self.phase is CallPhase.COMPLETE:
            self.close(ProtocolError(f"{self._name} sent more than its answer"))
            return
        try:
            parser.feed(data)
        except ProtocolError as error:
            self.close(ProtocolError(f"{self._name} does not answer in HTTP/1.1: {error}"))
            return
        if parser.complete:
            self.phase = CallPhase.COMPLETE
        if pieces := parser.pieces:
            parser.pieces = []
            call.receive(pieces[0] if len(pieces) == 1 else b"".join(pieces), len(data))
        elif not parser.in_head:
            call.receive(b"", len(data))

    def _head_is_here(self, head: AnswerHead) -> bool:
        self.phase, self._reusable = CallPhase.BODY, head.keep_alive
        assert self._call is not None
        if self._call.begin(head):
            return True
        self._reusable = False  # the parser would wait for a body
        return False

    def eof_received(self) -> None:
        """The instance sends no more, which is the end of an answer without a length; the transport closes itself."""
        if self.phase is CallPhase.BODY and self._call is not None and self._call.ends_with_connection:
            self.phase, self._reusable = CallPhase.COMPLETE, False
            self._call.receive(b"", 0)

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        why = "the connection was closed" if error is None else advice(error, self._name, self._who)
        if error is None and self.num_calls == 1 and self.phase is CallPhase.SENT:
            why += f" ({closed_at_once(self._name, self._who)})"
        self.close(PeerLost(f"{self._name} broke off: {why}"))
