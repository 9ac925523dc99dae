"""Requests drawn from the client libraries' own types: each is translated to a chat that is read in full, or refused by
the name of a field."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from openai.types.responses import ResponseInputParam
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from kvferry.api.decoding import decode_body
from kvferry.api.dialects.response_store import ResponseStore
from kvferry.api.dialects.translated import CHAT_PATH, TranslatedRequest
from kvferry.api.dialects.translator import Translator
from kvferry.api.other_fields import WITHOUT_EFFECT
from kvferry.api.requests import ChatCompletionRequest, TokenizeChatRequest
from kvferry.core.clock import SystemClock
from kvferry.core.errors import InvalidRequest
from support.typed_values import Undrawable, draw_value, mutate

TYPES: dict[str, Any] = {
    "/v1/messages": MessageCreateParamsNonStreaming,
    "/v1/messages/count_tokens": MessageCountTokensParams,
    "/v1/responses": ResponseCreateParamsNonStreaming,
    "/v1/responses/input_tokens": InputTokenCountParams,
}


def translate(path: str, value: Any) -> TranslatedRequest:
    """The translation of a request. Raises `InvalidRequest`."""
    clock = SystemClock()
    translator = Translator(ResponseStore(None, clock), clock)
    return asyncio.run(translator.translate(path, json.dumps(value).encode(), "r", b""))


def refusal(path: str, value: Any) -> InvalidRequest | None:
    """Why a request is refused; None: it is translated to a chat that is read in full."""
    try:
        translated = translate(path, value)
        kind = ChatCompletionRequest if translated.path == CHAT_PATH else TokenizeChatRequest
        decoded = decode_body(translated.body, kind)
    except InvalidRequest as error:
        return error
    assert set(decoded.ignored) <= WITHOUT_EFFECT
    assert decoded.unsupported == {}
    return None


def is_named(error: InvalidRequest, value: Any) -> bool:
    """True if the error names a field that the client sent, or one that is missing."""
    if not isinstance(value, dict):
        return error.param is None
    field = (error.param or "").partition(".")[0].partition("[")[0]
    return field in value or "is required" in str(error)


@pytest.mark.parametrize("path", TYPES)
@pytest.mark.parametrize("change", [lambda value, draw: value, mutate], ids=["as typed", "mutated"])
def test_typed_requests(path: str, change: Callable[[Any, Random], Any]) -> None:
    counts, unnamed = Counter[str](), dict[str, Any]()
    for seed in range(1500):
        draw = Random(seed)
        try:
            value = draw_value(TYPES[path], draw)
            if "responses" in path and draw.random() < 0.9:  # optional in the type
                value["input"] = draw_value(str | ResponseInputParam, draw)
            value = change(value, draw)
        except Undrawable:
            continue
        error = refusal(path, value)
        counts["translated" if error is None else "refused"] += 1
        if error is not None and not is_named(error, value):
            unnamed[f"{error.param}: {error}"] = value
    assert list(unnamed) == [], counts
    assert min(counts["translated"], counts["refused"]) > 20
