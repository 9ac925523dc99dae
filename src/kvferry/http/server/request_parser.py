"""Parses requests, and refuses heads that the parser accepts but two parsers could read differently."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from operator import itemgetter

import httptools

from kvferry.core.errors import KvferryError, RequestError
from kvferry.http.errors import BadHttp, HeadersTooLarge, NotImplementedHere
from kvferry.http.headers import KEY_HEADERS, RawHeaders
from kvferry.http.message import FRAMING, MessageParser
from kvferry.http.server.body import Body
from kvferry.http.server.limits import HttpLimits

_AUTHORITY = re.compile(
    rb"(?:(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+|\[[0-9A-Fa-f:.]+(?:%[\w.~-]+)?\])(?::[0-9]{0,5})?[ \t]*"
)
"""A host, and perhaps a port (RFC 3986), without a user; the parser leaves white space after a header's value."""
_AUTHORITY_END = re.compile(rb"[/?#]")
_NAME = itemgetter(0)
_UNIQUE_HEADERS = (b"content-type", b"content-encoding", *KEY_HEADERS)
"""Headers that must be unique: of duplicates, some readers take the first and others the last."""

Begin = Callable[[str, bytes, RawHeaders, str, bool], Body]
"""Called with a request's method, target, headers, version, and True if its connection is kept; returns the body to
fill."""


class RequestParser(MessageParser):
    """Parses requests, one after the other. `begin` is called with each request once its head has arrived, `end` once
    its body has."""

    def __init__(self, limits: HttpLimits, begin: Begin, end: Callable[[], None]) -> None:
        super().__init__(httptools.HttpRequestParser, limits.http_header_bytes)
        self._limits, self._begin, self._end = limits, begin, end
        self._url = b""
        self.num_heads = 0
        """Requests whose head has arrived."""
        self.body: Body | None = None
        """The incomplete body of the request whose head has arrived."""

    def stop_parsing(self) -> None:
        """Stop parsing, and break the reference cycles with the owner of the callbacks."""
        super().stop_parsing()
        del self._begin, self._end

    def on_message_begin(self) -> None:
        """The request line begins."""
        if not self._replaying:
            self.begin_head()
            self._url = b""

    def on_url(self, part: bytes) -> None:
        """The target, or a part of it."""
        if not self._replaying:
            self._url += part

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self._replaying:
            return
        version, headers = self._parser.get_http_version(), self.headers
        num_bytes = len(self._url) + sum(map(len, chain.from_iterable(headers))) + 4 * len(headers)
        if len(headers) > self._limits.http_header_count or num_bytes > self._limits.http_header_bytes:
            raise self._head_too_large()
        if (error := head_error(version, self._url, headers)) is not None:
            raise error
        self.end_head()
        self.num_heads += 1
        parser = self._parser
        self.body = self._begin(parser.get_method().decode(), self._url, headers, version, parser.should_keep_alive())

    def on_body(self, data: bytes) -> None:
        """A part of the body."""
        assert self.body is not None
        self.num_overhead = 0
        self.body.feed(data)

    def on_message_complete(self) -> None:
        """The body is complete."""
        body = self.body
        if body is not None and not self._skips_body():
            self.num_overhead, self.body = 0, None
            self._end()
            body.end()

    def _skips_body(self) -> bool:
        """True if the parser skips a body because the client offers to change to another protocol after the head.

        No other protocol is available, so the request is served as it is, with its body (clients that offer HTTP/2
        begin like this).
        """
        return bool(self.body is not None and self._parser.should_upgrade() and self._framing)

    @property
    def _framing(self) -> RawHeaders:
        return [header for header in self.headers if header[0] in FRAMING and header[1] != b"0"]

    def _upgrade(self, rest: bytes) -> None:
        if self._skips_body():  # a new parser begins where that body does
            self._parser, self._replaying = httptools.HttpRequestParser(self), True
            lines = b"".join(b"%b: %b\r\n" % header for header in self._framing)
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % lines)
            self._replaying = False
        if rest:
            self.feed(rest)

    def _too_much(self) -> KvferryError:
        if self.in_head:
            return self._head_too_large()
        return BadHttp("the framing of the body is larger than the body; send it in larger chunks")

    def _head_too_large(self) -> HeadersTooLarge:
        limits = self._limits
        return HeadersTooLarge(
            f"the header is longer than {limits.http_header_bytes} bytes or {limits.http_header_count} lines"
        )


def origin_form(target: str) -> str:
    """Path and query of a target, also of an absolute URL as a client of a proxy sends it."""
    if target.startswith("/") or "://" not in target:
        return target
    _, slash, path = target.partition("://")[2].partition("/")
    return slash + path or "/"


def _coding_error(version: str, headers: RawHeaders) -> RequestError | None:
    """The error in the transfer codings, or None."""
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    for value in codings:
        if value.strip().lower() != b"chunked":
            return NotImplementedHere(f"transfer coding {value.decode('latin-1')!r} is not supported; use chunked")
    if len(codings) > 1 or version == "1.0":
        return BadHttp("a request must have at most one Transfer-Encoding header, and only in HTTP/1.1")
    return None


@lru_cache(64)
def _is_authority(text: bytes) -> bool:
    """True if this is a host with or without a port. Cached, as most requests have the same one."""
    return _AUTHORITY.fullmatch(text) is not None


def head_error(version: str, url: bytes, headers: RawHeaders) -> RequestError | None:
    """The error in a head that the parser accepts but two parsers could read differently, or None."""
    if version not in ("1.1", "1.0"):
        return BadHttp(f"HTTP/{version} is not supported; use HTTP/1.1")
    names = list(map(_NAME, headers))
    hosts = names.count(b"host")
    if b"transfer-encoding" in names and (error := _coding_error(version, headers)) is not None:
        return error
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return BadHttp(f"a request must have exactly one Host header; this one has {hosts}")
    if hosts and not _is_authority(host := headers[names.index(b"host")][1]):
        return BadHttp(f"Host {host[:64].decode('latin-1')!r} is not a host's name or address, with or without a port")
    if len(set(names)) < len(names) and (
        duplicate := next((name for name in _UNIQUE_HEADERS if names.count(name) > 1), None)
    ):
        return BadHttp(f"a request must not have two {duplicate.decode().title()} headers")
    if url.startswith(b"/") or url == b"*":
        return None
    scheme, slashes, rest = url.partition(b"://")
    if scheme not in (b"http", b"https") or not slashes:
        return BadHttp("the target of a request must be a path")
    if not _is_authority(_AUTHORITY_END.split(rest, 1)[0]):
        return BadHttp("the URL of a request must name a host, with or without a port and no user")
    return None
