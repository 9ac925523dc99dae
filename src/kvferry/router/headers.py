"""Which headers travel, and which ones the router adds."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.core.openai import REQUEST_ID_HEADER, TIMELINE_HEADER, sane_request_id

REQUEST_ID = REQUEST_ID_HEADER.lower().encode()
TIMELINE = TIMELINE_HEADER.lower().encode()

OWN_PREFIX = b"x-kvferry-"
"""Ours; what a client sends under it is dropped."""

RawHeaders = list[tuple[bytes, bytes]]
"""As ASGI and aiohttp have them, in order, duplicates kept. Names from ASGI are lower case."""

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers"
    b" transfer-encoding upgrade".split()
)
_OF_THE_MESSAGE = frozenset([b"host", b"content-length", b"expect"])
_OF_THE_SERVER = frozenset([b"date", b"server"])


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The client's request id, or a new one: the same on both legs and in the answer."""
    wanted = next((value.decode("latin-1") for name, value in headers if name == REQUEST_ID), None)
    return sane_request_id(wanted).encode()


def for_instance(headers: RawHeaders, own: RawHeaders) -> RawHeaders:
    """A client's headers as an instance gets them: end-to-end ones untouched, then the router's own."""
    dropped = _OF_THE_MESSAGE | {name for name, _ in own}
    kept = [(n, v) for n, v in _end_to_end(headers) if n not in dropped and not n.startswith(OWN_PREFIX)]
    return kept + own


def for_client(headers: Iterable[tuple[bytes, bytes]], request_name: bytes) -> RawHeaders:
    """An instance's headers as the client gets them, with the request id if the instance left it out."""
    lowered = [(name.lower(), value) for name, value in headers]
    kept = [(name, value) for name, value in _end_to_end(lowered) if name not in _OF_THE_SERVER]
    if all(name != REQUEST_ID for name, _ in kept):
        kept.append((REQUEST_ID, request_name))
    return kept


def _end_to_end(headers: RawHeaders) -> RawHeaders:
    """Without the headers that concern one connection only (RFC 9110, 7.6.1)."""
    named = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP and name not in named]
