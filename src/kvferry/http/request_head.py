"""What is wrong with a request's head that the parser lets pass, but that two readers might still read in two ways."""

from __future__ import annotations

import re
from operator import itemgetter

from kvferry.core.errors import RequestError
from kvferry.http.errors import BadHttp, NotImplementedHere
from kvferry.http.headers import RawHeaders

_AUTHORITY = re.compile(
    rb"(?:(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+|\[[0-9A-Fa-f:.]+(?:%[\w.~-]+)?\])(?::[0-9]{0,5})?[ \t]*"
)
"""A host, and perhaps a port (RFC 3986), without a user; the parser leaves white space after a header's value."""
_AUTHORITY_END = re.compile(rb"[/?#]")
_NAME = itemgetter(0)


def origin_form(target: str) -> str:
    """Path and query of a target that names the server too, as a client of a proxy sends it."""
    if target.startswith("/") or "://" not in target:
        return target
    _, slash, path = target.partition("://")[2].partition("/")
    return slash + path or "/"


def _coding_error(version: str, headers: RawHeaders) -> RequestError | None:
    """What is wrong with transfer codings."""
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    for value in codings:
        if value.strip().lower() != b"chunked":
            return NotImplementedHere(f"transfer coding {value.decode('latin-1')!r} is not supported; use chunked")
    if len(codings) > 1 or version == "1.0":
        return BadHttp("a request must have at most one Transfer-Encoding header, and only in HTTP/1.1")
    return None


def head_error(version: str, url: bytes, headers: RawHeaders) -> RequestError | None:
    """What is wrong with a header that the parser accepts, but that two parsers could read differently."""
    if version not in ("1.1", "1.0"):
        return BadHttp(f"HTTP/{version} is not supported; use HTTP/1.1")
    names = list(map(_NAME, headers))
    hosts = names.count(b"host")
    if b"transfer-encoding" in names and (error := _coding_error(version, headers)) is not None:
        return error
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return BadHttp(f"a request must have exactly one Host header; this one has {hosts}")
    if hosts and _AUTHORITY.fullmatch(host := headers[names.index(b"host")][1]) is None:
        return BadHttp(f"Host {host[:64].decode('latin-1')!r} is not a host's name or address, with or without a port")
    if url.startswith(b"/") or url == b"*":
        return None
    scheme, slashes, rest = url.partition(b"://")
    if scheme not in (b"http", b"https") or not slashes:
        return BadHttp("the target of a request must be a path")
    if _AUTHORITY.fullmatch(_AUTHORITY_END.split(rest, 1)[0]) is None:
        return BadHttp("the URL of a request must name a host, with or without a port and no user")
    return None
