"""Request ids, and errors as OpenAI's clients read them."""

from __future__ import annotations

import json

import pytest

from kvferry.core.errors import DeadlineExceeded, InvalidRequest, QueueFull, RequestError, Unavailable, UnknownModel
from kvferry.core.messages.openai import (
    BodyTooLarge,
    ContextLengthExceeded,
    error_code,
    error_envelope,
    error_headers,
    internal_error,
    sane_request_id,
    sse_event,
)


@pytest.mark.parametrize("text", ["a", "req-1", "a.b_c:d@e/f+g=h", "x" * 128])
def test_a_clients_request_id_is_taken_over(text: str) -> None:
    assert sane_request_id(text) == text


@pytest.mark.parametrize("text", [None, "", "x" * 129, "a b", "a\n", "a\r\nx: y", "\u00fc", "a\0"])
def test_a_request_id_that_cannot_stand_in_headers_is_replaced(text: str | None) -> None:
    first, second = sane_request_id(text), sane_request_id(text)
    assert first not in (text, second)
    assert sane_request_id(first) == first


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnknownModel("x"), "model_not_found"),
        (DeadlineExceeded("x"), "deadline_exceeded"),
        (QueueFull("x"), "queue_full"),
        (Unavailable("x"), "unavailable"),
        (ContextLengthExceeded("x"), "context_length_exceeded"),
        (BodyTooLarge("x"), "body_too_large"),
        (InvalidRequest("x"), None),
    ],
)
def test_programs_tell_errors_apart_by_their_code(error: RequestError, code: str | None) -> None:
    assert error_code(error) == code
    assert json.loads(error_envelope(error))["error"]["code"] == code


def test_a_message_is_bounded_and_always_text() -> None:
    message = json.loads(error_envelope(InvalidRequest("\ud800" + "x" * 5000, param="\udfff")))["error"]
    assert len(message["message"]) == 2000
    assert message["message"].endswith("\u2026")
    assert message["message"].startswith("?")
    assert message["param"] == "?"


def test_who_shall_come_again_is_told_when() -> None:
    assert error_headers(InvalidRequest("x")) == {"Content-Type": "application/json"}
    for error in (QueueFull("x"), Unavailable("x")):
        assert int(error_headers(error)["Retry-After"]) == error.retry_after_s >= 1


def test_a_fault_is_named_by_its_request_only() -> None:
    error = internal_error("req-9")
    assert error.status == 500
    assert "req-9" in error.message


def test_an_event_is_one_line_of_data() -> None:
    assert sse_event(b"{}") == b"data: {}\n\n"
