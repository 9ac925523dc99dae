"""Selects the headers that are forwarded, and adds the router's own."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from kvferry.core.messages.continuation import PROGRESS_HEADER
from kvferry.core.messages.openai import REQUEST_ID_HEADER, TIMELINE_HEADER
from kvferry.http.headers import RawHeaders, find_header, header_lines

REQUEST_ID = REQUEST_ID_HEADER.lower().encode()
TIMELINE = TIMELINE_HEADER.lower().encode()
PROGRESS = PROGRESS_HEADER.lower().encode()
JSON = (b"content-type", b"application/json")
NOT_COMPRESSED = (b"accept-encoding", b"identity")
"""The header for answers that the router reads itself."""

TIMING_REQUEST = b"x-kvferry-server-timing"
"""A client that sends this header, with any value, gets `SERVER_TIMING` with its answer."""
AGGREGATE = b"x-kvferry-aggregate"
"""With the value `1`, a client requests an answer of one instance, without a hand-off."""
SERVER_TIMING = b"server-timing"

OWN_PREFIX = b"x-kvferry-"
"""Prefix of kvferry's headers; dropped from clients' requests."""
_DROPPED_PREFIXES = (OWN_PREFIX, b"x-override-")
"""SGLang lets `x-override-bootstrap-host` and others of that prefix replace fields of the body, from which D learns
where to fetch KV."""

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers"
    b" transfer-encoding upgrade".split()
)
_MESSAGE_HEADERS = frozenset([b"host", b"content-length", b"content-encoding", b"expect"])
_ROUTING_HEADERS = frozenset([b"x-data-parallel-rank", b"forwarded", b"via"])
"""Headers about the route of a request, which clients must not set."""

_NOT_FOR_INSTANCES = _HOP_BY_HOP | _MESSAGE_HEADERS | _ROUTING_HEADERS

_LEG_HEADERS = frozenset([b"accept-encoding", b"traceparent", b"tracestate"])
"""A client's headers that each leg may replace."""

_SERVER_HEADERS = frozenset(
    b"date server via alt-svc location content-location refresh link x-upstream x-served-by x-backend-server".split()
) | {PROGRESS}
"""Headers that name or locate a server, or concern its connection to the router; hidden from clients."""

_NOT_FOR_CLIENTS = _HOP_BY_HOP | _SERVER_HEADERS
_NOT_WITHOUT_LENGTH = _NOT_FOR_CLIENTS | {b"content-length"}


def content_type(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The media type, in lower case and without parameters; None: there is none."""
    value = find_header(headers, b"content-type")
    return None if value is None else value.partition(b";")[0].strip().lower()


def for_instance(headers: RawHeaders, added_headers: RawHeaders) -> RawHeaders:
    """A client's headers as an instance gets them: end-to-end headers unchanged, then the router's own, which replace
    headers of the same name."""
    dropped, own_names = _dropped_headers(headers, _NOT_FOR_INSTANCES), dict(added_headers)
    forwarded = [
        header
        for header in headers
        if not (header[0] in dropped or header[0] in own_names or header[0].startswith(_DROPPED_PREFIXES))
    ]
    return forwarded + added_headers


class LegHeaders:
    """The headers of one request's legs. The client's and the router's common headers (`always`) are formatted once.
    Raises `ValueError` for a header that cannot be sent."""

    __slots__ = ("_lines", "_replaceable")

    def __init__(self, headers: RawHeaders, always: RawHeaders) -> None:
        lines = for_instance(headers, always)
        self._replaceable = [header for header in lines if header[0] in _LEG_HEADERS]
        if self._replaceable:
            lines = [header for header in lines if header[0] not in _LEG_HEADERS]
        self._lines = header_lines(lines)

    def with_extra(self, added_headers: RawHeaders) -> bytes:
        """The lines of a leg with extra headers, which are in `_LEG_HEADERS` or must not come from clients."""
        if not self._replaceable:
            return self._lines + _own_lines(*added_headers) if added_headers else self._lines
        own_names = dict(added_headers)
        return self._lines + header_lines(
            [header for header in self._replaceable if header[0] not in own_names] + added_headers
        )


@lru_cache(64)
def _own_lines(*headers: tuple[bytes, bytes]) -> bytes:
    """These headers as bytes; cached, as most legs have the same few."""
    return header_lines(list(headers))


def for_client(headers: RawHeaders, *, with_length: bool = True) -> RawHeaders:
    """An instance's headers as the client gets them."""
    dropped = _dropped_headers(headers, _NOT_FOR_CLIENTS if with_length else _NOT_WITHOUT_LENGTH)
    return [header for header in headers if header[0] not in dropped]


def _dropped_headers(headers: RawHeaders, always: frozenset[bytes]) -> frozenset[bytes]:
    """`always`, and the names that the message's `Connection` header lists (RFC 9110, 7.6.1)."""
    if b"connection" not in dict(headers):
        return always
    connection_values = [value for name, value in headers if name == b"connection"]
    return always.union(token.strip().lower() for value in connection_values for token in value.split(b","))
