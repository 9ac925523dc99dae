"""A client's request as the router has read it."""

from __future__ import annotations

import msgspec

from kvferry.http.headers import RawHeaders


class ClientRequest(msgspec.Struct, frozen=True):
    """A request as it arrived. `target`: `path` and query, not decoded; `arrived`: seconds since the epoch."""

    method: str
    target: str
    path: str
    headers: RawHeaders
    first: dict[bytes, bytes]
    """The first value of each header."""
    body: bytes
    request_id: bytes
    arrived: float
