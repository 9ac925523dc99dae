"""Parses HTTP/1.1 messages, requests and answers alike. No I/O.

The parser is llhttp in its strict form (httptools). Input that it accepts but that two parsers might interpret
differently is refused, and so is endless input: a head, a chunk size or trailers that never finish.
"""

from __future__ import annotations

from typing import Any

import httptools

from kvferry.core.errors import KvferryError, ProtocolError
from kvferry.http.headers import RawHeaders

FRAMING = (b"content-length", b"transfer-encoding")


def concat(buffer: bytes | bytearray, data: bytes) -> bytes | bytearray:
    """Append bytes to a buffer. To an empty buffer, as for most bodies, they are not copied."""
    if not buffer:
        return data
    if isinstance(buffer, bytes):
        buffer = bytearray(buffer)
    buffer += data
    return buffer


class MessageParser:
    """Base of the parsers; httptools calls the methods `on_…`."""

    def __init__(
        self, parser: type[httptools.HttpRequestParser | httptools.HttpResponseParser], max_overhead: int
    ) -> None:
        self._parser: Any = parser(self)
        self._max_overhead = max_overhead
        self.headers: RawHeaders = []
        self.first: dict[bytes, bytes] = {}
        """The first value of each header."""
        self.in_head = False
        self.num_overhead = 0
        """Bytes received since the last head, bytes of a body, or end of a message."""
        self._replaying = False
        self._in_chunk = self.between_chunks = False
        """`between_chunks`: a chunk would begin with the next byte."""

    def begin_head(self) -> None:
        """Begin with the head of a message."""
        self.in_head, self.headers, self.first = True, [], {}

    def end_head(self) -> None:
        """End a head; a body may follow."""
        self.in_head, self._in_chunk, self.num_overhead = False, False, 0

    def feed(self, data: bytes) -> None:
        """Parse received bytes. Raises `ProtocolError`, or the error with which a message was refused."""
        self.num_overhead += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[int(upgrade.args[0]) :]
            self.num_overhead -= len(rest)
            self._upgrade(rest)
        except httptools.HttpParserError as error:
            refused = error.__context__
            raise (refused if isinstance(refused, KvferryError) else ProtocolError(str(error))) from None
        self.between_chunks = not self._in_chunk and data.endswith(b"\r\n")
        if self.num_overhead > self._max_overhead:
            raise self._too_much()

    def stop_parsing(self) -> None:
        """Stop parsing, and break the reference cycle of the parser and this object."""
        self._parser = None

    def _upgrade(self, rest: bytes) -> None:
        """Handle a requested change of protocol; the parser has stopped before `rest`."""
        raise ProtocolError("it changes to another protocol")

    def _too_much(self) -> KvferryError:
        return ProtocolError(f"{self.num_overhead} bytes came of a head, or of a chunk's size")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which is ignored."""
        if self.in_head:
            name = name.lower()
            self.headers.append((name, value))
            self.first.setdefault(name, value)
        elif not self._replaying and name.lower() in FRAMING:
            raise ProtocolError("it states the length of its body after the body")

    def on_chunk_header(self) -> None:
        """A chunk begins."""
        self._in_chunk = True

    def on_chunk_complete(self) -> None:
        """The chunk is complete."""
        self._in_chunk = False
