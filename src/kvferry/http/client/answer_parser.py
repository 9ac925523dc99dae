"""Answers made of bytes."""

from __future__ import annotations

import httptools
import msgspec

from kvferry.core.errors import ProtocolError
from kvferry.http.headers import RawHeaders
from kvferry.http.message import MessageParser

_ANSWER_OVERHEAD = 64 * 1024
"""Most bytes of an answer's head, of a chunk's size or of trailers."""


class AnswerHead(msgspec.Struct, frozen=True):
    """All of an answer but its body. `first`: of each header, the first value."""

    status: int
    headers: RawHeaders
    first: dict[bytes, bytes]
    chunked: bool
    keep_alive: bool
    """Whether another answer may come on the same connection."""

    @property
    def is_event_stream(self) -> bool:
        """Whether it is a stream of server-sent events to which an event can be added."""
        kind = self.first.get(b"content-type", b"").partition(b";")[0]
        return kind.rstrip() == b"text/event-stream" and b"content-encoding" not in self.first


class AnswerParser(MessageParser):
    """One answer after the other; `next` says when another may come."""

    def __init__(self) -> None:
        super().__init__(httptools.HttpResponseParser, _ANSWER_OVERHEAD)
        self.head: AnswerHead | None = None
        """Of the answer, once it is here."""
        self.pieces: list[bytes] = []
        """Received bytes of the body, until they are taken."""
        self.complete = self._bodiless = False

    def next(self, *, bodiless: bool) -> None:
        """Another answer may come; `bodiless`: without a body, whatever its headers say."""
        self.complete, self.in_head, self.num_overhead, self._bodiless, self.head = False, False, 0, bodiless, None

    def on_message_begin(self) -> None:
        """The status line begins."""
        if self.complete:
            raise ProtocolError("more than one answer came")
        self.in_head, self.headers, self.first = True, [], {}

    def on_headers_complete(self) -> None:
        """The head is here."""
        status, headers, first = self._parser.get_status_code(), self.headers, self.first
        if status < 100 or status == 101:
            raise ProtocolError(f"its status is {status}")
        if chunked := b"transfer-encoding" in first:
            codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
            if codings != [b"chunked"] or self._parser.get_http_version() != "1.1":
                raise ProtocolError(f"its transfer coding is {b', '.join(codings)[:40]!r}")
        if status < 200:
            return  # of an interim answer; another head follows
        self.num_overhead, self.in_head, self._in_chunk, self.complete = 0, False, False, self._bodiless
        # After a bodiless one, the parser would wait for the body.
        keep_alive = self._parser.should_keep_alive() and not self._bodiless
        self.head = AnswerHead(status, headers, first, chunked, keep_alive)

    def on_body(self, piece: bytes) -> None:
        """A part of the body."""
        if self.complete:
            raise ProtocolError("a body came where there is none")
        self.num_overhead = 0
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        """The end, also of an interim answer."""
        self.complete = self.complete or not self.in_head
