"""Messages of HTTP/1.1 made of bytes: what the server's and the client's connections share. No I/O.

The parser is llhttp in its strict form (httptools). Refused here is what it lets pass and two readers might still read
in two ways, and bytes without an end: a head, a chunk's size or trailers, of which nothing comes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple, cast

import httptools

from kvferry.core.errors import KvferryError, ProtocolError
from kvferry.http.body import Body
from kvferry.http.errors import BadHttp, HeadersTooLarge
from kvferry.http.headers import RawHeaders
from kvferry.http.limits import HttpLimits
from kvferry.http.request_head import head_error

_FRAMING = (b"content-length", b"transfer-encoding")
_ANSWER_OVERHEAD = 64 * 1024
"""Most bytes of an answer's head, of a chunk's size or of trailers."""


class MessageParser:
    """What requests and answers have in common. httptools calls the methods `on_…`."""

    def __init__(self, parser: type[httptools.HttpRequestParser | httptools.HttpResponseParser], most: int) -> None:
        self._parser: Any = parser(self)
        self._most_overhead = most
        self.headers: RawHeaders = []
        self.in_head = False
        self.num_overhead = 0
        """Bytes that have come since the last head, piece of a body, or end."""
        self._replaying = False
        self._in_chunk = self.between_chunks = False
        """`between_chunks`: whether a chunk would begin with the next byte."""

    def feed(self, data: bytes) -> None:
        """Parse what has come. Raises `ProtocolError`, or what a message was refused with."""
        self.num_overhead += len(data)
        self._parse(data)
        self.between_chunks = not self._in_chunk and data.endswith(b"\r\n")
        if self.num_overhead > self._most_overhead:
            raise self._too_much()

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[int(upgrade.args[0]) :])
        except httptools.HttpParserError as error:
            refused = error.__context__
            raise (refused if isinstance(refused, KvferryError) else ProtocolError(str(error))) from None

    def _upgrade(self, rest: bytes) -> None:
        """The other side offers to change to another protocol, and the parser has stopped before `rest`."""
        raise ProtocolError("it changes to another protocol")

    def _too_much(self) -> KvferryError:
        return ProtocolError(f"{self.num_overhead} bytes came of a head, or of a chunk's size")

    def on_message_begin(self) -> None:
        """The first line begins."""
        self.in_head, self.headers = True, []

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which nobody reads."""
        if self.in_head:
            self.headers.append((name.lower(), value))
        elif not self._replaying and name.lower() in _FRAMING:
            raise ProtocolError("it says behind its body how long that was")

    def on_chunk_header(self) -> None:
        """A chunk begins."""
        self._in_chunk = True

    def on_chunk_complete(self) -> None:
        """It is here."""
        self._in_chunk = False


class RequestHead(NamedTuple):
    """All of a request but its body."""

    method: str
    target: bytes
    headers: RawHeaders
    version: str
    keep_alive: bool


class RequestParser(MessageParser):
    """Requests, one after the other. `begin` is told of each when its head is here, and returns the body to fill; `end`
    when the body is here."""

    def __init__(self, limits: HttpLimits, begin: Callable[[RequestHead], Body], end: Callable[[], None]) -> None:
        super().__init__(httptools.HttpRequestParser, limits.http_header_bytes)
        self._limits, self._begin, self._end = limits, begin, end
        self._url = b""
        self.body: Body | None = None
        """Of the request of which the head is here, and the end is not."""

    def on_message_begin(self) -> None:
        """The request line begins."""
        if not self._replaying:
            super().on_message_begin()
            self._url = b""

    def on_url(self, part: bytes) -> None:
        """The target, or a part of it."""
        if not self._replaying:
            self._url += part

    def on_headers_complete(self) -> None:
        """The head is here."""
        if self._replaying:
            return
        version, headers = self._parser.get_http_version(), self.headers
        num_bytes = len(self._url) + sum(map(len, chain.from_iterable(headers))) + 4 * len(headers)
        if len(headers) > self._limits.http_header_count or num_bytes > self._limits.http_header_bytes:
            raise self._head_too_large()
        if (error := head_error(version, self._url, headers)) is not None:
            raise error
        self.num_overhead, self.in_head = 0, False
        method, keep_alive = self._parser.get_method().decode(), bool(self._parser.should_keep_alive())
        self.body = self._begin(RequestHead(method, self._url, headers, version, keep_alive))

    def on_body(self, piece: bytes) -> None:
        """A part of the body."""
        self.num_overhead = 0
        cast(Body, self.body).feed(piece)

    def on_message_complete(self) -> None:
        """The body is here."""
        body = self.body
        if body is not None and not self._skips_body():
            self.num_overhead, self.body = 0, None
            self._end()
            body.end()

    def _skips_body(self) -> bool:
        """Whether the parser skips a body because the client offers to change to another protocol after the head.

        No other protocol is available, so the request is served as it is, with its body (clients that offer HTTP/2
        begin like this).
        """
        return bool(self.body is not None and self._parser.should_upgrade() and self._framing)

    @property
    def _framing(self) -> RawHeaders:
        return [one for one in self.headers if one[0] in _FRAMING and one[1] != b"0"]

    def _upgrade(self, rest: bytes) -> None:
        if self._skips_body():  # a new parser begins where that body does
            self._parser, self._replaying = httptools.HttpRequestParser(self), True
            lines = b"".join(b"%b: %b\r\n" % header for header in self._framing)
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % lines)
            self._replaying = False
        if rest:
            self._parse(rest)

    def _too_much(self) -> KvferryError:
        if self.in_head:
            return self._head_too_large()
        return BadHttp("the framing of the body is larger than the body; send it in larger chunks")

    def _head_too_large(self) -> HeadersTooLarge:
        limits = self._limits
        return HeadersTooLarge(
            f"the header is longer than {limits.http_header_bytes} bytes or {limits.http_header_count} lines"
        )


class AnswerHead(NamedTuple):
    """All of an answer but its body. `first`: of each header, the first value."""

    status: int
    headers: RawHeaders
    first: dict[bytes, bytes]
    chunked: bool
    keep_alive: bool


class AnswerParser(MessageParser):
    """One answer after the other; `next` says when another may come. `begin` is told of each when its head is here, and
    returns whether a body comes."""

    def __init__(self, begin: Callable[[AnswerHead], bool]) -> None:
        super().__init__(httptools.HttpResponseParser, _ANSWER_OVERHEAD)
        self._begin = begin
        self.pieces: list[bytes] = []
        """What has come of the body, until it is taken."""
        self.complete = False

    def next(self) -> None:
        """Another answer may come."""
        self.complete, self.in_head, self.num_overhead = False, False, 0

    def on_message_begin(self) -> None:
        """The status line begins."""
        if self.complete:
            raise ProtocolError("more than one answer came")
        super().on_message_begin()

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
