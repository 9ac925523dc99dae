"""Fields of other servers: every one of OpenAI's schemas is decided on, and what requests something is refused."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats

from kvferry.api.decoding import decode_body
from kvferry.api.other_fields import REFUSED, WITHOUT_EFFECT, refuse_unsupported
from kvferry.api.requests import ChatCompletionRequest, CompletionRequest, TokenizeChatRequest
from kvferry.core.errors import InvalidRequest
from support.request_schemas import undecided


def test_every_field_of_openai_is_decided_on() -> None:
    chat = get_type_hints(chats.CompletionCreateParamsNonStreaming) | get_type_hints(
        chats.CompletionCreateParamsStreaming
    )
    completion = get_type_hints(completions.CompletionCreateParamsNonStreaming)
    assert {"messages", "verbosity", "service_tier"} <= set(chat)
    assert "suffix" in completion
    assert undecided(chat, ChatCompletionRequest) == set()
    assert undecided(completion, CompletionRequest) == set()


def test_a_new_name_is_noticed() -> None:
    assert undecided(["messages", "store", "audio", "brand_new"], ChatCompletionRequest) == {"brand_new"}


def test_no_name_is_decided_on_twice() -> None:
    assert not WITHOUT_EFFECT & set(REFUSED)
    fields = set(CompletionRequest.__struct_fields__) & set(ChatCompletionRequest.__struct_fields__)
    assert not fields & (WITHOUT_EFFECT | set(REFUSED))


def chat_with(name: str, value: Any) -> bytes:
    return json.dumps({"messages": [], name: value}).encode()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json_schema", "{}"),
        ("regex", "a+"),
        ("ebnf", "root ::= 'a'"),
        ("stop_regex", "a"),
        ("lora_path", "adapter"),
        ("custom_logit_processor", "x"),
        ("grammar", "root ::= 'a'"),
        ("repeat_penalty", 1.3),
        ("guided_decoding", {"regex": "a"}),
        ("response_schema", {}),
        ("best_of", 3),
        ("enable_thinking", False),
        ("thinking", {"type": "enabled"}),
        ("extra_body", {"top_k": 1}),
        ("mirostat", 2),
        ("no_stop_trim", True),
    ],
)
def test_what_changes_the_answer_is_refused(name: str, value: Any) -> None:
    decoded = decode_body(chat_with(name, value), ChatCompletionRequest)
    assert decoded.ignored == ()
    with pytest.raises(InvalidRequest, match=name) as caught:
        refuse_unsupported(decoded.unsupported)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, refusal in REFUSED.items() for value in (None, *refusal.harmless)],
)
def test_values_that_request_nothing_are_accepted(name: str, value: Any) -> None:
    decoded = decode_body(chat_with(name, value), ChatCompletionRequest)
    refuse_unsupported(decoded.unsupported)
    assert decoded.ignored == ()


@pytest.mark.parametrize(("name", "value"), [("use_beam_search", 0), ("mirostat", False), ("repeat_penalty", True)])
def test_a_flag_is_no_number(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        refuse_unsupported(decode_body(chat_with(name, value), ChatCompletionRequest).unsupported)


def test_best_of_of_a_completion_is_a_field() -> None:
    assert decode_body(b'{"prompt": "a", "best_of": 2}', CompletionRequest).unsupported == {}


def test_tokenizing_a_chat_is_not_about_its_answer() -> None:
    decoded = decode_body(chat_with("regex", "a"), TokenizeChatRequest)
    assert decoded.unsupported == {"regex": "a"}  # and the route does not refuse it
