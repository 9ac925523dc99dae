"""Messages become the prompt's text."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import msgspec
import pytest

from kvferry.api.requests import ChatCompletionRequest
from kvferry.core.errors import InvalidRequest
from kvferry.engine.server.chat_template import render_chat
from kvferry.engine.server.text_codec import TextCodec

USER = {"role": "user", "content": "hi"}


def body(*messages: Any, **fields: Any) -> ChatCompletionRequest:
    return msgspec.convert({"messages": list(messages), **fields}, ChatCompletionRequest)


async def render(tokenizer: Any, *messages: Any, template: str | None = None, **fields: Any) -> str:
    """With the tokenizer's own chat template, or another in its place."""
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = template or tokenizer.chat_template
    return await render_chat(body(*messages, **fields), TextCodec(tokenizer))


async def test_messages_and_the_beginning_of_the_answer(tokenizer: Any) -> None:
    text = await render(tokenizer, {"role": "system", "content": "be kind"}, USER)
    assert text == "<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>"


async def test_text_parts_are_joined(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, "three"]
    assert "one\ntwo\nthree<|end|>" in await render(tokenizer, {"role": "user", "content": parts})


async def test_a_message_can_be_continued(tokenizer: Any) -> None:
    begun = {"role": "assistant", "content": "It is"}
    assert (await render(tokenizer, USER, begun, continue_final_message=True)).endswith("<|assistant|>It is")
    with pytest.raises(InvalidRequest, match="exclude each other"):
        await render(tokenizer, USER, begun, continue_final_message=True, add_generation_prompt=True)


async def test_tools_and_keywords_reach_the_template(tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    text = await render(tokenizer, USER, tools=tools, chat_template_kwargs={"flavour": "vanilla"})
    assert "look_up" in text
    assert "vanilla" in text


async def test_arguments_of_tool_calls_are_objects(tokenizer: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    template = "{{ messages[0].tool_calls[0].function.arguments.x }}"
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert await render(tokenizer, message, template=template) == "1"


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([], {}, "messages"),
        ([{"content": "x"}], {}, "messages[0].role"),
        ([USER, {"role": 5, "content": "x"}], {}, "messages[1].role"),
        ([{"role": "user", "content": 5}], {}, "messages[0].content"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], {}, "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": "f"}], {}, "messages[0].tool_calls"),
        ([{"role": "pirate", "content": "x"}], {}, "messages"),
        ([USER], {"chat_template": "{{ 1 }}"}, "chat_template"),
        ([USER], {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ([USER], {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
async def test_what_is_not_acceptable_is_named(tokenizer: Any, messages: Any, fields: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await render(tokenizer, *messages, **fields)
    assert caught.value.param == param


async def test_a_template_that_breaks_is_the_clients_error(tokenizer: Any) -> None:
    for template in ("{% for", "{{ 1 / 0 }}", "{{ messages[0].nothing.at_all }}"):
        with pytest.raises(InvalidRequest, match="chat template"):
            await render(tokenizer, USER, template=template)


async def test_a_model_without_a_template_says_so(tokenizer: Any) -> None:
    bare = deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(InvalidRequest, match="no chat template"):
        await render(bare, USER)


async def test_long_messages_are_rendered_in_a_thread(tokenizer: Any) -> None:
    text = "a" * 100_000
    assert text in await render(tokenizer, {"role": "user", "content": text})


@pytest.mark.parametrize(
    "arguments", ['{"x":' + "[" * 990 + "]" * 990 + "}", "[" * 100_000, '{"x": "\\ud800"}', "NaN", "é\0"]
)
async def test_arguments_that_cannot_be_read_stay_a_string(tokenizer: Any, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    template = "{{ messages[0].tool_calls[0].function.arguments | length }}"
    assert await render(tokenizer, {"role": "assistant", "tool_calls": [call]}, template=template) == str(
        len(arguments)
    )
