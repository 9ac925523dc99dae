"""Prompts are those of transformers' own `apply_chat_template`, for every kind of template: parts as they are where a
template iterates over them, and joined, as vLLM joins them, where it prints them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import msgspec
import pytest
from jinja2 import TemplateError

from kvferry.api.requests import ChatCompletionRequest
from kvferry.engine.server.chat_template import render_chat
from kvferry.engine.server.text_codec import TextCodec
from support.chat_templates import ITERATING, NOTHING, PARTS, PRINTING, TEXTS, from_packages

ONLY_PARTS = ("iterates", "iterates over texts")


async def render(tokenizer: Any, template: str, messages: list[dict[str, Any]]) -> str:
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = template
    body = msgspec.convert({"messages": messages}, ChatCompletionRequest)
    return await render_chat(body, TextCodec(tokenizer))


def oracle(tokenizer: Any, template: str, messages: list[dict[str, Any]]) -> str:
    text: str = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    return text


def as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**one, "content": [{"type": "text", "text": one["content"]}]} if isinstance(one["content"], str) else one
        for one in messages
    ]


def joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "content": "\n".join(part["text"] for part in one["content"])} for one in messages]


@pytest.mark.parametrize("kind", [*PRINTING, *ITERATING])
@pytest.mark.parametrize("messages", TEXTS.values(), ids=TEXTS)
async def test_texts(tokenizer: Any, kind: str, messages: Any) -> None:
    template = (PRINTING | ITERATING)[kind]
    expected = oracle(tokenizer, template, as_parts(messages) if kind in ONLY_PARTS else messages)
    assert await render(tokenizer, template, messages) == expected


@pytest.mark.parametrize("kind", ITERATING)
@pytest.mark.parametrize("messages", PARTS.values(), ids=PARTS)
async def test_parts_reach_a_template_that_iterates_over_them(tokenizer: Any, kind: str, messages: Any) -> None:
    assert await render(tokenizer, ITERATING[kind], messages) == oracle(tokenizer, ITERATING[kind], messages)


@pytest.mark.parametrize("kind", PRINTING)
@pytest.mark.parametrize("messages", PARTS.values(), ids=PARTS)
async def test_parts_are_joined_for_a_template_that_prints_them(tokenizer: Any, kind: str, messages: Any) -> None:
    assert await render(tokenizer, PRINTING[kind], messages) == oracle(tokenizer, PRINTING[kind], joined(messages))


@pytest.mark.parametrize("kind", [*PRINTING, *ITERATING])
@pytest.mark.parametrize("messages", NOTHING.values(), ids=NOTHING)
async def test_null_is_no_text(tokenizer: Any, kind: str, messages: Any) -> None:
    template = (PRINTING | ITERATING)[kind]
    empty = [{**one, "content": one.get("content") or ""} for one in messages]
    if kind in ONLY_PARTS:
        empty = [{**one, "content": []} if not one["content"] else one for one in as_parts(empty)]
        empty[1]["content"] = []
    assert await render(tokenizer, template, messages) == oracle(tokenizer, template, empty)


async def test_each_role_may_take_another_form(tokenizer: Any) -> None:
    template = (
        "{% for message in messages %}{% if message.role == 'user' %}"
        "{% for part in message.content %}<{{ part.text }}>{% endfor %}"
        "{% else %}{{ message.content + '.' }}{% endif %}{% endfor %}"
    )
    assert await render(tokenizer, template, PARTS["parts of all"]) == "be so\nkind.<aaa><bbb>ccc\nddd.<eee>"


async def test_no_tool_calls_are_none_and_a_result_is_one_text(tokenizer: Any) -> None:
    template = (
        "{% for message in messages %}{% if 'tool_calls' in message %}calls{% else %}{{ message.content }}{% endif %};"
        "{% endfor %}"
    )
    result = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    messages = [{"role": "assistant", "content": "hi", "tool_calls": []}, {"role": "tool", "content": result}]
    assert await render(tokenizer, template, messages) == "hi;1\n2;"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_thoughts_have_both_names(tokenizer: Any, name: str) -> None:
    template = "{{ messages[0].reasoning }} {{ messages[0].reasoning_content }}"
    assert await render(tokenizer, template, [{"role": "assistant", "content": "x", name: "hm"}]) == "hm hm"


async def test_developers_are_the_system_for_a_template_without_them(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "one"},
        {"role": "user", "content": "hi"},
        {"role": "developer", "content": [{"type": "text", "text": "two"}]},
    ]
    template = PRINTING["prints"]
    assert await render(tokenizer, template, messages) == "<|system|>one\n\ntwo<|end|><|user|>hi<|end|><|assistant|>"
    assert "<|system|>one<|end|>" in await render(
        tokenizer, template, [{"role": "developer", "content": "one"}, messages[1]]
    )
    knows = template + "{# 'developer' #}"
    assert "<|developer|>two<|end|>" in await render(tokenizer, knows, messages)


@pytest.mark.parametrize("name", from_packages())
async def test_templates_of_packages(tokenizer: Any, name: str) -> None:
    """Parts as the template itself renders them; joined, for a role of which it prints a literal or the first part
    only."""
    template = from_packages()[name]
    for messages in PARTS.values():
        expected = joined(messages)
        for number, message in enumerate(messages):
            one = [*joined(messages[:number]), message, *joined(messages[number + 1 :])]
            if shows(tokenizer, template, one, [part["text"] for part in message["content"]]):
                expected[number] = message
        assert await render(tokenizer, template, messages) == oracle(tokenizer, template, expected)


def shows(tokenizer: Any, template: str, messages: list[dict[str, Any]], texts: list[str]) -> bool:
    try:
        shown = oracle(tokenizer, template, messages)
    except (TemplateError, TypeError, AttributeError):
        return False
    return "{'type'" not in shown and all(text in shown for text in texts)
