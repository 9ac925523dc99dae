"""Which headers travel, and which ones the router adds."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.core.continuation import PROGRESS_HEADER
from kvferry.core.openai import REQUEST_ID_HEADER, TIMELINE_HEADER
from kvferry.http.headers import RawHeaders, find_header

REQUEST_ID = REQUEST_ID_HEADER.lower().encode()
TIMELINE = TIMELINE_HEADER.lower().encode()
PROGRESS = PROGRESS_HEADER.lower().encode()
JSON = (b"content-type", b"application/json")

TIMING_WANTED = b"x-kvferry-server-timing"
"""A client that sends it, with whatever value, gets `SERVER_TIMING` with its answer."""
SERVER_TIMING = b"server-timing"

OWN_PREFIX = b"x-kvferry-"
"""Ours; what a client sends under it is dropped."""

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers"
    b" transfer-encoding upgrade".split()
)
_OF_THE_MESSAGE = frozenset([b"host", b"content-length", b"content-encoding", b"expect"])
_OF_THE_ROUTER = frozenset([b"x-data-parallel-rank", b"forwarded", b"via"])
"""What tells an instance where the request goes, or came from: not a client's to say."""

_NOT_FOR_INSTANCES = _OF_THE_MESSAGE | _OF_THE_ROUTER

_OF_THE_SERVER = frozenset(
    b"date server via alt-svc location content-location refresh link x-upstream x-served-by x-backend-server".split()
) | {PROGRESS}
"""What names a server, leads to one, or is between it and the router: instances are no business of clients."""


def content_type(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The media type, in lower case and without parameters; None when there is none."""
    value = find_header(headers, b"content-type")
    return None if value is None else value.partition(b";")[0].strip().lower()


def for_instance(headers: RawHeaders, own: RawHeaders) -> RawHeaders:
    """A client's headers as an instance gets them: end-to-end ones untouched, then the router's own."""
    ours = {name for name, _ in own}
    kept = [
        one
        for one in _end_to_end(headers)
        if one[0] not in _NOT_FOR_INSTANCES and one[0] not in ours and not one[0].startswith(OWN_PREFIX)
    ]
    return kept + own


def for_client(headers: RawHeaders) -> RawHeaders:
    """An instance's headers as the client gets them."""
    return [one for one in _end_to_end(headers) if one[0] not in _OF_THE_SERVER]


def _end_to_end(headers: RawHeaders) -> RawHeaders:
    """Without the headers that concern one connection only (RFC 9110, 7.6.1)."""
    kept = [one for one in headers if one[0] not in _HOP_BY_HOP]
    if len(kept) == len(headers):
        return kept
    named = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    return [one for one in kept if one[0] not in named]
