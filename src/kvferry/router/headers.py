"""Which headers are forwarded, and which ones the router adds."""

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

TIMING_WANTED = b"x-kvferry-server-timing"
"""A client that sends it, with whatever value, gets `SERVER_TIMING` with its answer."""
AGGREGATE = b"x-kvferry-aggregate"
"""With `1`, a client asks for an answer from one instance, without a hand-off."""
SERVER_TIMING = b"server-timing"

OWN_PREFIX = b"x-kvferry-"
"""Ours; what a client sends under it is dropped."""
_DROPPED_PREFIXES = (OWN_PREFIX, b"x-override-")
"""SGLang lets `x-override-bootstrap-host` and others of that prefix replace fields of the body, from which D learns
where to fetch KV."""

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers"
    b" transfer-encoding upgrade".split()
)
_OF_THE_MESSAGE = frozenset([b"host", b"content-length", b"content-encoding", b"expect"])
_OF_THE_ROUTER = frozenset([b"x-data-parallel-rank", b"forwarded", b"via"])
"""What tells an instance where the request goes, or came from: not a client's to say."""

_NOT_FOR_INSTANCES = _HOP_BY_HOP | _OF_THE_MESSAGE | _OF_THE_ROUTER

_OF_A_LEG = frozenset([b"accept-encoding", b"traceparent", b"tracestate"])
"""What legs replace of a client's headers, each for itself."""

_OF_THE_SERVER = frozenset(
    b"date server via alt-svc location content-location refresh link x-upstream x-served-by x-backend-server".split()
) | {PROGRESS}
"""What names a server, leads to one, or is between it and the router: instances are no business of clients."""

_NOT_FOR_CLIENTS = _HOP_BY_HOP | _OF_THE_SERVER
_NOT_WITHOUT_LENGTH = _NOT_FOR_CLIENTS | {b"content-length"}


def content_type(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The media type, in lower case and without parameters; None when there is none."""
    value = find_header(headers, b"content-type")
    return None if value is None else value.partition(b";")[0].strip().lower()


def for_instance(headers: RawHeaders, own: RawHeaders) -> RawHeaders:
    """A client's headers as an instance gets them: end-to-end headers unchanged, then the router's own, which replace
    those of the same name."""
    left_out, ours = _of_the_connection(headers, _NOT_FOR_INSTANCES), dict(own)
    kept = [
        one for one in headers if not (one[0] in left_out or one[0] in ours or one[0].startswith(_DROPPED_PREFIXES))
    ]
    return kept + own


class LegHeaders:
    """The headers of one request's legs. The client's, and those that the router sends with each of its legs
    (`always`), are formatted once. Raises `ValueError` for a header that cannot be sent."""

    __slots__ = ("_differing", "_lines")

    def __init__(self, headers: RawHeaders, always: RawHeaders) -> None:
        every = for_instance(headers, always)
        self._differing = [one for one in every if one[0] in _OF_A_LEG]
        if self._differing:
            every = [one for one in every if one[0] not in _OF_A_LEG]
        self._lines = header_lines(every)

    def with_own(self, own: RawHeaders) -> bytes:
        """The lines of a leg that has headers of its own, of `_OF_A_LEG` or not a client's to send."""
        if not self._differing:
            return self._lines + _own_lines(*own) if own else self._lines
        ours = dict(own)
        return self._lines + header_lines([one for one in self._differing if one[0] not in ours] + own)


@lru_cache(64)
def _own_lines(*own: tuple[bytes, bytes]) -> bytes:
    """These lines as bytes; cached, as most legs have the same few."""
    return header_lines(list(own))


def for_client(headers: RawHeaders, *, with_length: bool = True) -> RawHeaders:
    """An instance's headers as the client gets them."""
    left_out = _of_the_connection(headers, _NOT_FOR_CLIENTS if with_length else _NOT_WITHOUT_LENGTH)
    return [one for one in headers if one[0] not in left_out]


def _of_the_connection(headers: RawHeaders, more: frozenset[bytes]) -> frozenset[bytes]:
    """`more`, which has all names that are always of one connection only, and the names that a message says are
    (RFC 9110, 7.6.1)."""
    if b"connection" not in dict(headers):
        return more
    named = [value for name, value in headers if name == b"connection"]
    return more.union(token.strip().lower() for value in named for token in value.split(b","))
