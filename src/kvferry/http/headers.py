"""Header lists, and the first bytes of a message made of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError

RawHeaders = list[tuple[bytes, bytes]]
"""Headers in order, duplicates kept, names in lower case."""

KEY_HEADERS = (b"authorization", b"x-api-key")
"""Headers with a client's key: OpenAI's clients use the first, Anthropic's the second."""

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


_REQUEST_LINE = re.compile(rb"[^\r\n\0 ]* [^\r\n\0 ]* HTTP/1\.1\r\n").fullmatch


def first_values(headers: RawHeaders) -> dict[bytes, bytes]:
    """The first value of each name, for several look-ups."""
    return dict(reversed(headers))


def find_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first value of `name` (lower case), or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def as_raw(headers: Mapping[str, str]) -> RawHeaders:
    """Encode text headers for the wire."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def header_lines(headers: RawHeaders) -> bytes:
    """Headers as they are sent, without a blank line. Raises `ValueError` for one with a line break or a NUL."""
    lines, num_lines = b"\r\n".join([*map(b": ".join, headers), b""]), len(headers)
    if lines.count(b"\n") != num_lines or lines.count(b"\r") != num_lines or b"\0" in lines:
        raise ValueError("a header holds a line break or a NUL")
    return lines


def response_head(status: int, headers: RawHeaders) -> bytes:
    """Status line and headers, with the blank line. Raises `ValueError` as `header_lines` does."""
    line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
    return b"%b%b\r\n" % (line, header_lines(headers))


def request_line(method: str, target: str) -> bytes:
    """The first line of a request. Raises `ValueError` for an invalid method or target."""
    return _cached_line(method, target) if len(target) < _MAX_CACHED_TARGET else _request_line(method, target)


def _request_line(method: str, target: str) -> bytes:
    line = f"{method} {target} HTTP/1.1\r\n".encode("latin-1")
    if _REQUEST_LINE(line) is None:
        raise ValueError(f"not a request line: {line!r}")
    return line


_cached_line = lru_cache(64)(_request_line)
_MAX_CACHED_TARGET = 256
"""Length limit of targets whose request lines are cached: most requests have one of a few short targets."""


def date_header() -> tuple[bytes, bytes]:
    """The `date` header, formatted once a second."""
    return _date_of(int(SYSTEM_CLOCK.wall()))


@lru_cache(1)
def _date_of(second: int) -> tuple[bytes, bytes]:
    return b"date", formatdate(second, usegmt=True).encode()


def require_key(key: str, flag: str) -> None:
    """Raise `ConfigError` that names the flag if no client could send the key."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{flag}: a key must be printable ASCII without spaces, and not empty")
