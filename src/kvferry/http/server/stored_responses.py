"""The routes of stored responses (`api.dialects.response_store`): to read, list, delete and cancel them."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from kvferry.api.dialects.response_store import ResponseStore, StoredResponse
from kvferry.api.dialects.responses import RESPONSES_PATH
from kvferry.core.errors import InvalidRequest, RequestError
from kvferry.http.headers import KEY_HEADERS
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Route


class ResponseNotFound(RequestError):
    """404: there is no stored response of this id that belongs to the client's key."""

    status = 404
    kind = "not_found_error"
    code = "response_not_found"


def owner_of(request: HttpRequest, tenant_header: bytes = b"") -> bytes:
    """The owner of the responses to a request: its key, if it has one, and the value of `tenant_header`."""
    key = request.caller.name if request.caller.is_known else _presented_key(request)
    tenant = request.first.get(tenant_header, b"")
    return hashlib.sha256(b"%d %b %b" % (len(key), key, tenant)).digest()


def _presented_key(request: HttpRequest) -> bytes:
    """The digest of a key that this server does not check, but its instances may."""
    keys = [request.first.get(name, b"") for name in KEY_HEADERS]
    return hashlib.sha256(b"\0".join(keys)).digest() if any(keys) else b""


class StoredResponses:
    """One method for each route."""

    max_listed, default_listed = 100, 20

    def __init__(self, store: ResponseStore, tenant_header: bytes = b"") -> None:
        self._store, self._tenant_header = store, tenant_header

    def routes(self) -> list[Route]:
        """All routes."""
        path = f"{RESPONSES_PATH}/{{id}}"
        return [
            Route("GET", path, self.read),
            Route("DELETE", path, self.delete),
            Route("POST", f"{path}/cancel", self.cancel),
            Route("GET", f"{path}/input_items", self.list_input),
        ]

    def _find(self, request: HttpRequest) -> StoredResponse:
        stored = self._store.get(request.rest, owner_of(request, self._tenant_header))
        if stored is None:
            raise _not_found(request.rest)
        return stored

    async def read(self, request: HttpRequest, response: Response) -> None:
        """GET /v1/responses/{id}."""
        stored = self._find(request)
        if request.parameter("stream", "false") != "false":
            raise InvalidRequest("stream: the events of a response are not stored by this server", param="stream")
        response.send_json(stored.response)

    async def list_input(self, request: HttpRequest, response: Response) -> None:
        """GET /v1/responses/{id}/input_items: a page of its input, with earlier turns."""
        stored = self._find(request)
        limit, order = request.number("limit", self.default_listed), request.parameter("order", "desc")
        if not 1 <= limit <= self.max_listed:
            raise InvalidRequest(f"limit must be from 1 to {self.max_listed}", param="limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order must be asc or desc", param="order")
        items: list[dict[str, Any]] = stored.input_items()
        ids = [item.get("id") for item in items]
        if order == "desc":
            items, ids = items[::-1], ids[::-1]
        begin = 0
        if after := request.parameter("after"):
            if after not in ids:
                raise InvalidRequest(f"after: there is no item {after[:80]!r}", param="after")
            begin = ids.index(after) + 1
        listed = items[begin : begin + limit]
        ends = {"first_id": listed[0].get("id"), "last_id": listed[-1].get("id")} if listed else {}
        answer = {"object": "list", "data": listed, "has_more": begin + limit < len(items), **ends}
        response.send_json(msgspec.json.encode(answer))

    async def delete(self, request: HttpRequest, response: Response) -> None:
        """DELETE /v1/responses/{id}."""
        response_id = request.rest
        if not self._store.delete(response_id, owner_of(request, self._tenant_header)):
            raise _not_found(response_id)
        response.send_json(msgspec.json.encode({"id": response_id, "object": "response", "deleted": True}))

    async def cancel(self, request: HttpRequest, response: Response) -> None:
        """POST /v1/responses/{id}/cancel, which only a response in the background could be."""
        self._find(request)
        raise InvalidRequest(
            "only responses with background true can be cancelled, which this server does not have; a client that"
            " closes its connection ends its request"
        )


def _not_found(response_id: str) -> ResponseNotFound:
    return ResponseNotFound(
        f"there is no stored response {response_id[:80]!r}: it was not stored, was deleted, has expired, or belongs to"
        " another key"
    )
