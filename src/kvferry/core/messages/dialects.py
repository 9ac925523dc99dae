"""The format of errors on each path. Each API has its own, so that the API's official clients raise the error.

Paths below `/v1/messages` have Anthropic's error object, all others OpenAI's. The events of `/v1/responses` have types,
unlike the events of OpenAI's other streams, and the stream does not end with `[DONE]`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvferry.core.errors import RequestError
from kvferry.core.messages.openai import SSE_DONE, error_body, error_envelope, sse_event


class ErrorDialect(Protocol):
    """The errors of one API."""

    def body(self, error: RequestError, request_id: str) -> bytes:
        """The JSON body of an answer that is this error."""

    def stream_end(self, error: RequestError, request_id: str) -> bytes:
        """The last bytes of a stream of events that ends with this error."""


class AnswerTranslator(ErrorDialect, Protocol):
    """Translates the answer of one request to an answer of the client's API."""

    def answer(self, status: int, content: bytes) -> bytes:
        """The body of an unstreamed answer with this status. Raises `RequestError`."""

    def events(self, data: bytes) -> bytes:
        """The events for the next chunk of the engine's stream. An error is the last event."""

    def end(self) -> bytes:
        """The events that end the client's stream, once the engine's stream has ended."""


class OpenAIErrors:
    """`{"error": {…}}`; in a stream as data without an event's name, followed by `[DONE]`."""

    def body(self, error: RequestError, request_id: str) -> bytes:
        return error_envelope(error)

    def stream_end(self, error: RequestError, request_id: str) -> bytes:
        return sse_event(error_envelope(error)) + SSE_DONE


class ResponsesErrorEvent(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The event `error` of a stream of `/v1/responses`. OpenAI's clients raise because of the field `error`; other
    clients read the other fields."""

    error: dict[str, str | None]
    code: str | None
    message: str
    param: str | None
    sequence_number: int


class ResponsesErrors(OpenAIErrors):
    """OpenAI's error object, with a typed event in streams."""

    def stream_end(self, error: RequestError, request_id: str) -> bytes:
        return self.error_event(error, 0)

    @staticmethod
    def error_event(error: RequestError, number: int) -> bytes:
        """The event of a stream that has `number` events before it."""
        body = error_body(error)
        fields = msgspec.structs.asdict(body)
        event = ResponsesErrorEvent(fields, body.code or body.type, body.message, body.param, number)
        return b"event: error\n" + sse_event(msgspec.json.encode(event))


class AnthropicError(msgspec.Struct, frozen=True):
    """The error in Anthropic's error object."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """Anthropic's error object."""

    error: AnthropicError
    request_id: str


class AnthropicErrors:
    """`{"type": "error", "error": {"type": …, "message": …}, "request_id": …}`; in a stream as the event `error`."""

    def body(self, error: RequestError, request_id: str) -> bytes:
        content = AnthropicError(_anthropic_type(error.status), error_body(error).message)
        return msgspec.json.encode(AnthropicErrorBody(content, request_id))

    def stream_end(self, error: RequestError, request_id: str) -> bytes:
        return b"event: error\n" + sse_event(self.body(error, request_id))


_OPENAI, _RESPONSES, _ANTHROPIC = OpenAIErrors(), ResponsesErrors(), AnthropicErrors()

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _anthropic_type(status: int) -> str:
    return _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def dialect_of(path: str) -> ErrorDialect:
    """The error format of a path. `path`: without a query."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return _ANTHROPIC
    return _RESPONSES if path == "/v1/responses" or path.startswith("/v1/responses/") else _OPENAI
