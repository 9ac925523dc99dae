"""A client's request as the router has read it."""

from __future__ import annotations

import msgspec

from kvferry.http.headers import RawHeaders


class ClientRequest(msgspec.Struct, frozen=True):
    """One request as it came. `path` and `query` are not decoded; `arrived` is in seconds since the epoch."""

    method: str
    path: str
    query: str
    headers: RawHeaders
    first: dict[bytes, bytes]
    """Of each header, the first value."""
    body: bytes
    request_id: bytes
    arrived: float

    @property
    def target(self) -> str:
        """Path and query."""
        return f"{self.path}?{self.query}" if self.query else self.path
