"""Anthropic's Messages API as a translation of chats, checked with the types of Anthropic's client."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from kvferry.api.dialects.chat import UnreadableAnswer
from kvferry.api.dialects.messages import translate_messages, translate_token_count
from kvferry.api.dialects.messages_answer import MessagesTranslation
from kvferry.core.errors import InvalidRequest
from support.chat_answers import ChatAnswer, divided, draw

_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USER = {"role": "user", "content": "x"}


def read_events(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each of which is one of the client's types."""
    events = []
    for event in data.decode().removesuffix("\n\n").split("\n\n"):
        name, content = event.split("\n")
        parsed = json.loads(content.removeprefix("data: "))
        assert name == f"event: {parsed['type']}"
        if parsed["type"] not in ("ping", "error"):
            _EVENT.validate_python(parsed, strict=True)
        events.append(parsed)
    return events


def accumulate(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events are, of which at most one block is open at a time."""
    message: dict[str, Any] = {}
    opened: int | None = None
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert opened is None
                opened = event["index"]
                assert opened == len(message["content"])
                block = event["content_block"]
                message["content"].append(block | {"input": ""} if "input" in block else block)
            case "content_block_delta":
                assert event["index"] == opened
                block, delta = message["content"][opened], event["delta"]
                field = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "input"}[delta["type"]]
                block[field] += delta.get("partial_json", delta.get(field))
            case "content_block_stop":
                assert event["index"] == opened
                opened = None
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(message["content"][-1]["input"] or "{}")
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    assert opened is None
    return message


@pytest.mark.parametrize("seed", range(150))
def test_a_stream_is_the_whole_answer_however_it_is_divided(seed: int) -> None:
    random = Random(seed)
    answer = draw(random)
    whole = json.loads(MessagesTranslation("1").answer(200, answer.whole()))
    Message.model_validate(whole, strict=True)
    translation = MessagesTranslation("1")
    written = b"".join(translation.events(chunk) for chunk in divided(answer.stream(random), random))
    events = read_events(written + translation.end())
    assert events[-1]["type"] == "message_stop"
    assert accumulate(events) == whole


@pytest.mark.parametrize("seed", range(50))
def test_a_stream_that_is_cut_anywhere_never_looks_whole(seed: int) -> None:
    random = Random(seed)
    data = draw(random).stream(random)
    cut = data[: random.randrange(len(data) - len(b"data: [DONE]\n\n"))]
    translation = MessagesTranslation("1")
    events = read_events(translation.events(cut) + translation.end())
    assert events[-1]["type"] == "error"
    assert "message_stop" not in [event["type"] for event in events]


@pytest.mark.parametrize(
    ("event", "kind", "text"),
    [
        (b'{"error": {"message": "no", "type": "unavailable_error"}}', "overloaded_error", "no"),
        (b'{"error": {"message": "no", "code": 400}}', "invalid_request_error", "no"),
        (b'{"error": "no"}', "api_error", "no"),
        (b'{"error": []}', "api_error", "no reason"),
        (b"{", "api_error", "cannot be read"),
        (b'{"choices": [{"delta": {"content": 5}}]}', "api_error", "cannot be read"),
        (b'{"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}', "api_error", "no id"),
        (b"[" * 10_000, "api_error", "cannot be read"),
        (b'{"choices": [{"delta": {}, "finish_reason": "abort"}]}', "api_error", "abort"),
    ],
)
def test_what_an_instance_must_not_send_ends_the_stream(event: bytes, kind: str, text: str) -> None:
    translation = MessagesTranslation("1")
    more = b'data: {"choices": [{"delta": {"content": "more"}}]}\n\ndata: [DONE]\n\n'
    events = read_events(translation.events(b"data: " + event + b"\n\ndata: [DONE]\n\n" + more) + translation.end())
    assert [one["type"] for one in events].count("error") == 1
    assert events[-1]["error"]["type"] == kind
    assert text in events[-1]["error"]["message"]


@pytest.mark.parametrize("arguments", ['{"x": "a', ""])
def test_arguments_that_the_limit_cut_off_are_left_out(arguments: str) -> None:
    answer = ChatAnswer("reasoning", "", "Hm.", [("look", arguments)], "length", None, None)
    message = json.loads(MessagesTranslation("1").answer(200, answer.whole()))
    assert [block["type"] for block in message["content"]] == ["text"]
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("value", ["1e999", "9" * 5000, r'"\ud800"', "0." + "1" * 50])
def test_arguments_are_the_models_text(value: str) -> None:
    arguments = f'{{"x": {value}}}'
    answer = ChatAnswer("reasoning", "", "", [("look", arguments)], "tool_calls", None, None)
    assert f'"input":{arguments}'.encode() in MessagesTranslation("1").answer(200, answer.whole())


@pytest.mark.parametrize("arguments", ['{"x": NaN}', '{"x": Infinity}', "[]", '{"x": 1', "nothing"])
def test_arguments_that_are_no_object_are_an_error(arguments: str) -> None:
    answer = ChatAnswer("reasoning", "", "", [("look", arguments)], "tool_calls", None, None)
    with pytest.raises(UnreadableAnswer, match="not a JSON object"):
        MessagesTranslation("1").answer(200, answer.whole())


def test_thoughts_may_be_omitted() -> None:
    answer = ChatAnswer("reasoning", "secret", "Hm.", [], "stop", None, None)
    translation = translate(messages=[USER], thinking={"type": "adaptive", "display": "omitted"})[1]
    assert b"secret" not in translation.answer(200, answer.whole())
    assert b"secret" not in translation.events(answer.stream(Random(1)))


def translate(**fields: Any) -> tuple[dict[str, Any], Any]:
    """The chat request, and the translation of its answer."""
    translated = translate_messages(json.dumps({"model": "m", "max_tokens": 8, **fields}).encode(), "1")
    return json.loads(translated.body), translated.translation


def test_a_request_is_a_chat_request() -> None:
    chat, _ = translate(
        system="Be brief.",
        messages=[
            USER,
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "?"}]},
            {"role": "system", "content": "Hurry."},
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/y"}}]},
        ],
        tools=[{"name": "look", "input_schema": {"type": "object"}, "strict": True}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        metadata={"user_id": "u"},
        stream=True,
        seed=5,
    )
    assert chat == {
        "model": "m",
        "max_tokens": 8,
        "messages": [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": ""},
            {"role": "developer", "content": "Hurry."},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": True}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
        },
        "user": "u",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "seed": 5,
    }


def test_the_options_of_the_template_are_the_clients() -> None:
    chat, _ = translate(
        messages=[USER], thinking={"type": "enabled"}, chat_template_kwargs={"enable_thinking": 7, "other": 1}
    )
    assert chat["chat_template_kwargs"] == {"enable_thinking": 7, "thinking": True, "other": 1}


def test_the_budget_of_thinking_is_the_engines() -> None:
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert translate(messages=[USER], thinking=enabled)[0]["thinking_token_budget"] == 1024
    assert translate(messages=[USER], thinking=enabled, thinking_token_budget=40)[0]["thinking_token_budget"] == 40
    for thinking in ({"type": "disabled", "budget_tokens": 5}, {"type": "adaptive"}, {"type": "enabled"}):
        assert "thinking_token_budget" not in translate(messages=[USER], thinking=thinking)[0]
    with pytest.raises(InvalidRequest, match="budget_tokens"):
        translate(messages=[USER], thinking={"type": "enabled", "budget_tokens": -1})


def test_counting_tokens_takes_what_makes_the_prompt() -> None:
    request = {"model": "m", "messages": [USER], "system": "s", "tools": [], "tool_choice": {"type": "auto"}}
    translated = translate_token_count(json.dumps(request).encode(), "1")
    assert translated.path == "/tokenize"
    messages = [{"role": "system", "content": "s"}, USER]
    assert json.loads(translated.body) == {"model": "m", "messages": messages, "tools": []}
    assert translated.translation.answer(200, b'{"count": 7, "tokens": [1]}') == b'{"input_tokens":7}'


@pytest.mark.parametrize("seed", range(100))
def test_a_malformed_request_is_refused_and_nothing_else(seed: int) -> None:
    """Any part of a valid request is replaced by something else."""
    random = Random(seed)
    block = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}]}
    request: Any = {
        "model": "m",
        "max_tokens": 8,
        "system": [{"type": "text", "text": "x"}],
        "messages": [{"role": "user", "content": [block, {"type": "image", "source": {"type": "url", "url": "u"}}]}],
        "tools": [{"name": "t", "input_schema": {}}],
        "tool_choice": {"type": "tool", "name": "t"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
    }
    parent = request
    while True:
        key = random.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        if not parent[key] or not isinstance(parent[key], dict | list) or random.random() < 0.3:
            break
        parent = parent[key]
    parent[key] = random.choice([None, 5, -1, 1e300, "", "x", [], [[]], {}, {"type": "x"}, [5], True, "\x00"])
    try:
        translate_messages(json.dumps(request).encode(), "1")
    except InvalidRequest as error:
        assert len(error.message) < 400  # noqa: PT017
