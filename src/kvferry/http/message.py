"""Parses HTTP/1.1 messages: what requests and answers have in common. No I/O.

The parser is llhttp in its strict form (httptools). What it accepts but two parsers might still interpret differently
is refused here, and so is input without an end: a head, a chunk size or trailers that never finish.
"""

from __future__ import annotations

from typing import Any

import httptools

from kvferry.core.errors import KvferryError, ProtocolError
from kvferry.http.headers import RawHeaders

FRAMING = (b"content-length", b"transfer-encoding")


def joined(kept: bytes | bytearray, piece: bytes) -> bytes | bytearray:
    """Both, one after the other. A single piece, as most bodies are, is not copied."""
    if not kept:
        return piece
    if isinstance(kept, bytes):
        kept = bytearray(kept)
    kept += piece
    return kept


class MessageParser:
    """httptools calls the methods `on_…`."""

    def __init__(self, parser: type[httptools.HttpRequestParser | httptools.HttpResponseParser], most: int) -> None:
        self._parser: Any = parser(self)
        self._max_overhead = most
        self.headers: RawHeaders = []
        self.first: dict[bytes, bytes] = {}
        """The first value of each header."""
        self.in_head = False
        self.num_overhead = 0
        """Bytes received since the last head, piece of a body, or end of a message."""
        self._replaying = False
        self._in_chunk = self.between_chunks = False
        """`between_chunks`: whether a chunk would begin with the next byte."""

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
        """Nothing more is fed. The parser and this object refer to each other: without it, only the garbage collector
        could free them."""
        self._parser = None

    def _upgrade(self, rest: bytes) -> None:
        """The other side requests a change of protocol, and the parser has stopped before `rest`."""
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
