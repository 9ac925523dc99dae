"""Errors in the form of each API, by path."""

from __future__ import annotations

import json

import pytest

from kvferry.core.errors import InvalidRequest, QueueFull, RequestError, Unavailable, UnknownModel
from kvferry.core.messages.dialects import AnthropicErrors, OpenAIErrors, ResponsesErrors, dialect_of


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/messages", AnthropicErrors),
        ("/v1/messages/count_tokens", AnthropicErrors),
        ("/v1/messagesx", OpenAIErrors),
        ("/v1/responses", ResponsesErrors),
        ("/v1/responses/resp_1", ResponsesErrors),
        ("/v1/responsesx", OpenAIErrors),
        ("/v1/chat/completions", OpenAIErrors),
        ("", OpenAIErrors),
    ],
)
def test_a_path_has_the_errors_of_its_api(path: str, dialect: type) -> None:
    assert type(dialect_of(path)) is dialect


def test_openais_stream_ends_with_done() -> None:
    error = InvalidRequest("no prompt", param="prompt")
    dialect = dialect_of("/v1/completions")
    assert json.loads(dialect.body(error, "r"))["error"]["param"] == "prompt"
    assert dialect.stream_end(error, "r") == b"data: " + dialect.body(error, "r") + b"\n\ndata: [DONE]\n\n"


def test_the_event_of_responses_is_typed_numbered_and_not_done() -> None:
    event = ResponsesErrors.error_event(UnknownModel("there is no model x"), 4)
    assert event.startswith(b"event: error\ndata: {")
    fields = json.loads(event.partition(b"data: ")[2])
    assert (fields["type"], fields["sequence_number"]) == ("error", 4)
    assert fields["code"] == fields["error"]["code"] == "model_not_found"
    assert b"[DONE]" not in dialect_of("/v1/responses").stream_end(UnknownModel("x"), "r")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("wrong"), "invalid_request_error"),
        (UnknownModel("none"), "not_found_error"),
        (QueueFull("later"), "rate_limit_error"),
        (Unavailable("later"), "overloaded_error"),
        (RequestError("a fault"), "api_error"),
    ],
)
def test_anthropics_errors_have_its_types_and_the_request_id(error: RequestError, kind: str) -> None:
    body = json.loads(AnthropicErrors().body(error, "req-1"))
    assert body == {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": "req-1"}
    assert AnthropicErrors().stream_end(error, "req-1").startswith(b"event: error\ndata: ")
