"""A client's request as the router has read it."""

from __future__ import annotations

import msgspec

from kvferry.core.messages.openai import sane_request_id
from kvferry.http.headers import RawHeaders
from kvferry.router.body import RequestBody
from kvferry.router.headers import REQUEST_ID


class ClientRequest(msgspec.Struct, frozen=True):
    """One request as it came. `target` is `path` and query, which are not decoded; `arrived` is in seconds since the
    epoch."""

    method: str
    target: str
    path: str
    headers: RawHeaders
    first: dict[bytes, bytes]
    """The first value of each header."""
    body: bytes
    request_id: bytes
    arrived: float

    def named_by(self, body: RequestBody | bytes | None) -> ClientRequest:
        """The request under the `request_id` of its body, as vLLM reads it where no header names the request."""
        if REQUEST_ID in self.first or not isinstance(body, RequestBody):
            return self
        value = body.get("request_id")
        if not isinstance(value, str):
            return self
        return msgspec.structs.replace(self, request_id=sane_request_id(value).encode())
