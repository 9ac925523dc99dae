"""Names that are unknown, nearly known, or known elsewhere."""

from __future__ import annotations

import pytest

from kvferry.api.fields import ignored_fields, warning_of
from kvferry.api.other_fields import REFUSED, WITHOUT_EFFECT
from kvferry.api.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ReleaseRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from kvferry.core.errors import InvalidRequest

TYPES = [
    *(ChatCompletionRequest, CompletionRequest, DetokenizeRequest, ReleaseRequest),
    *(TokenizeChatRequest, TokenizeCompletionRequest),
]


@pytest.mark.parametrize(
    ("name", "meant", "body_type"),
    [
        ("max_token", "max_tokens", CompletionRequest),
        ("maxTokens", "max_tokens", CompletionRequest),
        ("Temperature", "temperature", CompletionRequest),
        ("temprature", "temperature", ChatCompletionRequest),
        ("top-k", "top_k", CompletionRequest),
        ("max_new_tokens", "max_tokens", CompletionRequest),
        ("stop_sequences", "stop", CompletionRequest),
        ("message", "messages", ChatCompletionRequest),
        ("logprob", "logprobs", ChatCompletionRequest),
        ("respons_format", "response_format", ChatCompletionRequest),
        ("token", "tokens", DetokenizeRequest),
        ("transferId", "transfer_id", ReleaseRequest),
        ("prompts", "prompt", TokenizeCompletionRequest),
    ],
)
def test_near_misses_are_refused(name: str, meant: str, body_type: type) -> None:
    with pytest.raises(InvalidRequest, match=f"unknown field '{name}'; did you mean '{meant}'") as caught:
        ignored_fields([name], body_type)
    assert caught.value.param == name


@pytest.mark.parametrize("body_type", TYPES)
def test_what_others_know_is_never_taken_for_a_typo(body_type: type) -> None:
    known = set(body_type.__struct_fields__)
    foreign = [*(WITHOUT_EFFECT - known), *(REFUSED.keys() - known), "provider", "x", "", "é" * 9]
    assert ignored_fields(foreign, body_type) == tuple(foreign)


@pytest.mark.parametrize("body_type", TYPES)
def test_known_names_are_known(body_type: type) -> None:
    assert ignored_fields(body_type.__struct_fields__, body_type) == ()


def test_warnings_are_short_and_fit_for_a_header() -> None:
    assert warning_of(()) is None
    assert warning_of(("store", "x")) == "fields without effect: store, x"
    hostile = warning_of(("a\r\nSet-Cookie: b", "é,\ud800\0", "long" * 1000, *(f"field_{i}" for i in range(100_000))))
    assert hostile is not None
    assert len(hostile) < 500
    assert hostile.isascii()
    assert hostile.isprintable()
    assert hostile.endswith("and 99995 more")
