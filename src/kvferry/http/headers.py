"""Header lists, and the first bytes of a message made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from email.utils import formatdate
from http import HTTPStatus

from kvferry.core.clock import SYSTEM_CLOCK

RawHeaders = list[tuple[bytes, bytes]]
"""In order, duplicates kept, names in lower case."""

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


def find_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first value of `name` (lower case), or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def as_raw(headers: Mapping[str, str]) -> RawHeaders:
    """Headers written as text, for the wire."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def response_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Status line and headers, with the blank line. Raises `ValueError` for a value that would end its own line."""
    line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n".encode()
    return _with_blank_line(line, headers)


def request_head(method: str, target: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Request line and headers, with the blank line. Raises `ValueError` as `response_head` does."""
    line = f"{method} {target} HTTP/1.1\r\n"
    if line.count(" ") != 2:
        raise ValueError(f"not a request line: {line!r}")
    return _with_blank_line(line.encode("latin-1"), headers)


def _with_blank_line(line: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    lines = [b"%b: %b\r\n" % header for header in headers]
    head = line + b"".join(lines) + b"\r\n"
    most = len(lines) + 2
    if head.count(b"\n") != most or head.count(b"\r") != most or b"\0" in head:
        raise ValueError("a header holds a line break or a NUL")
    return head


class HttpDate:
    """The `date` header, made once a second."""

    def __init__(self) -> None:
        self._second, self._header = -1, (b"date", b"")

    def header(self) -> tuple[bytes, bytes]:
        """The `Date` header of now, made at most once a second."""
        now = int(SYSTEM_CLOCK.wall())
        if now != self._second:
            self._second, self._header = now, (b"date", formatdate(now, usegmt=True).encode())
        return self._header
