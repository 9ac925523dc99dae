"""The outermost edge: every request gets an id and an answer, and no traceback leaves the process."""

from __future__ import annotations

import logging
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.core.errors import InvalidRequest, RequestError
from kvferry.core.openai import (
    REQUEST_ID_HEADER,
    UnknownRoute,
    error_envelope,
    error_headers,
    internal_error,
    sane_request_id,
)

logger = logging.getLogger(__name__)


class ErrorBoundary:
    """ASGI middleware: names the request, and answers whatever error comes out of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = sane_request_id(Headers(scope=scope).get(REQUEST_ID_HEADER))
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def named_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = scope["state"]["request_id"]
                headers.update(scope["state"].get("extra_headers", {}))
            await send(message)

        try:
            await self._app(scope, receive, named_send)
        except ClientDisconnect:
            return  # nobody is there to answer
        except Exception as error:  # noqa: BLE001 - the edge towards clients: whatever is left ends here
            answer = client_error(error, request_id)
            if not started:
                await error_response(answer)(scope, receive, named_send)


def client_error(error: Exception, request_id: str) -> RequestError:
    """What the client is told of `error`; one that nobody foresaw goes to the log, and only there."""
    if isinstance(error, RequestError):
        return error
    logger.error("request %s failed: %s", request_id, error, exc_info=error)
    return internal_error(request_id)


def error_response(error: RequestError) -> Response:
    """The error as OpenAI's envelope."""
    return Response(error_envelope(error), status_code=error.status, headers=error_headers(error))


async def http_error(request: Request, error: Exception) -> Response:
    """Answers what the routing itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        body: RequestError = UnknownRoute(f"Invalid URL ({where})")
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        body = InvalidRequest(f"Not allowed to {request.method} on {request.url.path}")
    else:
        body = InvalidRequest(f"{error.detail} ({where})")
    headers = {**error_headers(body), **(error.headers or {})}
    return Response(error_envelope(body), status_code=error.status_code, headers=headers)
