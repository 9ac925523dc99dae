"""Structured output by the unmodified OpenAI client, for an engine that applies it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel, Field

from support.openai_suite import chat, complete, texts_of

if TYPE_CHECKING:
    from openai import OpenAI

WORDS = "([a-z]{2,6} ){3,9}end"


class Boat(BaseModel):
    name: str = Field(max_length=8)
    kind: Literal["ferry", "tug"]
    decks: list[int] = Field(max_length=3)
    captain: str | None = Field(max_length=5)


def a_model_is_parsed(client: OpenAI, model: str) -> None:
    messages: Any = [{"role": "user", "content": "A boat?"}]
    answer = client.chat.completions.parse(
        model=model, messages=messages, response_format=Boat, max_tokens=600, seed=4, temperature=1.0
    )
    choice = answer.choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(choice.message.parsed, Boat)


def a_json_object_is_json(client: OpenAI, model: str) -> None:
    for seed in range(4):
        choice = chat(
            client, model, max_tokens=500, temperature=1.0, seed=seed, response_format={"type": "json_object"}
        ).choices[0]
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


def every_choice_is_permitted(client: OpenAI, model: str) -> None:
    body = {"structured_outputs": {"choice": ["yes", "no", "a", "yes or no"]}}
    answer = complete(client, model, n=8, temperature=1.0, seed=1, extra_body=body)
    texts = [choice.text for choice in answer.choices]
    assert set(texts) <= {"yes", "no", "a", "yes or no"}
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    stream = complete(client, model, n=8, temperature=1.0, seed=1, stream=True, extra_body=body)
    assert texts_of(stream) == dict(enumerate(texts))


def a_choice_of_one_token_is_whole(client: OpenAI, model: str) -> None:
    for choices in (["a"], ["a", "b", "c"]):
        body = {"structured_outputs": {"choice": choices}, "ignore_eos": True, "min_tokens": 5}
        answer = complete(client, model, extra_body=body)
        assert answer.choices[0].text in choices
        assert answer.choices[0].finish_reason == "stop"


def a_regular_expression_is_followed(client: OpenAI, model: str) -> None:
    for options in ({}, {"temperature": 1.0, "seed": 3}, {"frequency_penalty": 1.0, "logit_bias": {"20": 5}}):
        body = {"structured_outputs": {"regex": WORDS}, "return_token_ids": True}
        answer = complete(client, model, max_tokens=200, logprobs=3, extra_body=body, **options)
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        assert re.fullmatch(WORDS, choice.text), choice.text
        assert len(choice.logprobs.token_logprobs) == answer.usage.completion_tokens


def a_stop_string_ends_a_constrained_answer(client: OpenAI, model: str) -> None:
    body = {"structured_outputs": {"regex": WORDS}}
    whole = complete(client, model, max_tokens=200, extra_body=body).choices[0].text
    word = whole.split()[1]
    cut = complete(client, model, max_tokens=200, stop=f" {word}", extra_body=body).choices[0]
    assert cut.text == whole[: whole.index(f" {word}")]
    assert cut.finish_reason == "stop"


def words_and_tokens_are_excluded(client: OpenAI, model: str) -> None:
    plain = complete(client, model, extra_body={"return_token_ids": True, "ignore_eos": True}).choices[0]
    allowed = plain.model_extra["token_ids"][2:5]
    answer = complete(
        client, model, extra_body={"allowed_token_ids": allowed, "return_token_ids": True, "ignore_eos": True}
    ).choices[0]
    assert set(answer.model_extra["token_ids"]) <= set(allowed)
    body = {"structured_outputs": {"regex": "[abc]{12}"}, "bad_words": ["ab", "c"]}
    choice = complete(client, model, temperature=1.0, seed=2, max_tokens=50, logprobs=0, extra_body=body).choices[0]
    assert re.fullmatch("[abc]{12}", choice.text), choice.text
    assert "c" not in choice.logprobs.tokens  # as a token of its own; others that contain it are not excluded


def what_leaves_no_token_is_an_error(client: OpenAI, model: str) -> None:
    import openai

    body = {"structured_outputs": {"regex": "[0-9]+x"}, "allowed_token_ids": [0]}
    with pytest.raises(openai.BadRequestError, match="leave no token"):
        complete(client, model, extra_body=body)


def what_cannot_be_compiled_is_refused(client: OpenAI, model: str) -> None:
    import openai

    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match="/properties/a/uniqueItems") as caught:
        chat(client, model, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
    assert caught.value.param == "response_format"


STRUCTURED_CHECKS: list[Callable[[OpenAI, str], None]] = [
    a_model_is_parsed,
    a_json_object_is_json,
    every_choice_is_permitted,
    a_choice_of_one_token_is_whole,
    a_regular_expression_is_followed,
    a_stop_string_ends_a_constrained_answer,
    words_and_tokens_are_excluded,
    what_leaves_no_token_is_an_error,
    what_cannot_be_compiled_is_refused,
]
"""For `pytest.mark.parametrize`."""
