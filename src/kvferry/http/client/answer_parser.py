"""Answers made of bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import httptools

from kvferry.core.errors import ProtocolError
from kvferry.http.headers import RawHeaders
from kvferry.http.message import MessageParser

_ANSWER_OVERHEAD = 64 * 1024
"""Most bytes of an answer's head, of a chunk's size or of trailers."""


class AnswerHead(NamedTuple):
    """All of an answer but its body. `first`: of each header, the first value."""

    status: int
    headers: RawHeaders
    first: dict[bytes, bytes]
    chunked: bool
    keep_alive: bool


class AnswerParser(MessageParser):
    """One answer after the other; `next` says when another may come. `begin` is called with each answer once its head
    has arrived, and returns whether a body follows."""

    def __init__(self, begin: Callable[[AnswerHead], bool]) -> None:
        super().__init__(httptools.HttpResponseParser, _ANSWER_OVERHEAD)
        self._begin = begin
        self.pieces: list[bytes] = []
        """Received bytes of the body, until they are taken."""
        self.complete = False

    def next(self) -> None:
        """Another answer may come."""
        self.complete, self.in_head, self.num_overhead = False, False, 0

    def on_message_begin(self) -> None:
        """The status line begins."""
        if self.complete:
            raise ProtocolError("more than one answer came")
        self.in_head, self.headers = True, []

    def on_headers_complete(self) -> None:
        """The head is here."""
        status, headers = self._parser.get_status_code(), self.headers
        if status < 100 or status == 101:
            raise ProtocolError(f"its status is {status}")
        codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or self._parser.get_http_version() != "1.1"):
            raise ProtocolError(f"its transfer coding is {b', '.join(codings)[:40]!r}")
        if status < 200:
            return  # of an interim answer; another head follows
        self.num_overhead, self.in_head, self._in_chunk = 0, False, False
        keep_alive = bool(self._parser.should_keep_alive())
        self.complete = not self._begin(AnswerHead(status, headers, dict(reversed(headers)), bool(codings), keep_alive))

    def on_body(self, piece: bytes) -> None:
        """A part of the body."""
        if self.complete:
            raise ProtocolError("a body came where there is none")
        self.num_overhead = 0
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        """The end, also of an interim answer."""
        self.complete = self.complete or not self.in_head
