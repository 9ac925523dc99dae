"""The OpenAI API as router and engine share it: headers, request ids, errors, server-sent events."""

from __future__ import annotations

import re

import msgspec

from kvferry.core.entropy import secret_hex
from kvferry.core.errors import (
    DeadlineExceeded,
    HandOffFailed,
    InvalidRequest,
    QueueFull,
    RequestError,
    Unavailable,
    UnknownModel,
)
from kvferry.core.text import shortened

REQUEST_ID_HEADER = "X-Request-Id"
"""Names a request in every log and on both legs; taken from the client, and sent back."""

TIMELINE_HEADER = "X-Kvferry-Timeline"
"""JSON of a `Timeline`: the router's stamps `arrived` and `routed`."""

RETRY_AFTER_HEADER = "Retry-After"

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Longest request body by default."""

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Without it, nginx and similar proxies buffer small chunks.
    "X-Accel-Buffering": "no",
}

SSE_DONE = b"data: [DONE]\n\n"

_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


class ContextLengthExceeded(InvalidRequest):
    """400: prompt and answer do not fit into the model's context."""

    code = "context_length_exceeded"


class BodyTooLarge(RequestError):
    """413: the body is longer than the server reads."""

    status = 413
    kind = "invalid_request_error"
    code = "body_too_large"


class UnknownRoute(RequestError):
    """404: there is no such path."""

    status = 404
    kind = "invalid_request_error"
    code = "unknown_url"


class ErrorBody(msgspec.Struct, frozen=True):
    """The content of OpenAI's error object. `code` is for programs, `message` for people."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """`{"error": {…}}`: the body of every answer that is not a success."""

    error: ErrorBody


_CODES: dict[type[RequestError], str] = {
    UnknownModel: "model_not_found",
    DeadlineExceeded: "deadline_exceeded",
    QueueFull: "queue_full",
    HandOffFailed: "hand_off_failed",
    Unavailable: "unavailable",
}


def error_code(error: RequestError) -> str | None:
    """The error's machine-readable `code`; None if its type says everything."""
    return getattr(error, "code", None) or _CODES.get(type(error))


def error_body(error: RequestError) -> ErrorBody:
    """OpenAI's error object."""
    param = None if error.param is None else _sendable(error.param)
    return ErrorBody(message=_sendable(error.message), type=error.kind, param=param, code=error_code(error))


def error_envelope(error: RequestError) -> bytes:
    """The JSON body of the answer to a request that failed with `error`."""
    return msgspec.json.encode(ErrorEnvelope(error_body(error)))


def _sendable(text: str) -> str:
    """The message, shortened and made valid UTF-8, because errors quote what clients sent."""
    return shortened(text, 2000).encode("utf-8", "replace").decode()


def error_headers(error: RequestError) -> dict[str, str]:
    """The headers that go with `error_envelope`."""
    headers = {"Content-Type": "application/json"}
    if isinstance(error, (QueueFull, Unavailable)):
        headers[RETRY_AFTER_HEADER] = str(error.retry_after_s)
    return headers


def internal_error(request_id: str) -> RequestError:
    """The error that a client gets for an unexpected failure; the log has the details under `request_id`."""
    return RequestError(f"Internal server error. The server's log names it by request id {request_id}.")


def sse_event(payload: bytes) -> bytes:
    """One server-sent event with a single line of data; `payload` must not contain a newline (JSON does not)."""
    return b"data: " + payload + b"\n\n"


def sane_request_id(client_id: str | None) -> str:
    """The client's request id if it can be used in logs, headers and URLs; a new id otherwise."""
    if client_id is not None and _SANE_REQUEST_ID.fullmatch(client_id):
        return client_id
    return secret_hex()
