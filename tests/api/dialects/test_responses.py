"""OpenAI's Responses API as a translation of chats, checked with the types of OpenAI's client."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kvferry.api.dialects.responses import chat_request, input_items, read_responses_request
from kvferry.api.dialects.responses_answer import ResponsesTranslation
from kvferry.core.errors import InvalidRequest
from support.chat_answers import ChatAnswer, divided, draw

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def translation(stored: list[Any] | None = None, **fields: Any) -> ResponsesTranslation:
    request = read_responses_request(json.dumps({"model": "m", "input": "x", **fields}).encode())
    return ResponsesTranslation("1", "resp_1", request, 1.0, None if stored is None else stored.append)


def read_events(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each of which is one of the client's types, and numbered."""
    events: list[dict[str, Any]] = []
    for event in data.decode().removesuffix("\n\n").split("\n\n"):
        name, content = event.split("\n")
        parsed = json.loads(content.removeprefix("data: "))
        assert name == f"event: {parsed['type']}"
        assert parsed["sequence_number"] == len(events)
        _EVENT.validate_python(parsed, strict=True)
        events.append(parsed)
    return events


def accumulate(events: list[dict[str, Any]]) -> list[Any]:
    """The output that a stream's events are, of which at most one item is open at a time."""
    items: list[Any] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            continue
        if "output_index" not in event:
            continue
        assert event["output_index"] == len(items) - 1
        item = items[-1]
        if kind == "output_item.done":
            assert event["item"] == item | {"status": event["item"]["status"]}
            items[-1] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        match kind:
            case "content_part.added":
                item["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                item["content"][0]["text"] += event["delta"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert item["content"][0]["text"] == event["text"]
            case "content_part.done":
                assert item["content"] == [event["part"]]
            case "function_call_arguments.done":
                assert (item["name"], item["arguments"]) == (event["name"], event["arguments"])
            case _:
                raise AssertionError(kind)
    return items


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if isinstance(value, dict):
        return {name: without_ids(one) for name, one in value.items() if name != "id"}
    return value


@pytest.mark.parametrize("seed", range(150))
def test_a_stream_is_the_whole_answer_however_it_is_divided(seed: int) -> None:
    random, stored = Random(seed), list[Any]()
    answer = draw(random)
    whole = json.loads(translation(stored).answer(200, answer.whole()))
    Response.model_validate(whole, strict=True)
    streaming = translation(stored)
    written = b"".join(streaming.events(chunk) for chunk in divided(answer.stream(random), random))
    events = read_events(written + streaming.end())
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert accumulate(events) == last["output"]
    assert without_ids(last) == without_ids(whole)
    assert stored == [whole, last]


@pytest.mark.parametrize("seed", range(50))
def test_a_stream_that_is_cut_anywhere_never_looks_whole_and_is_not_stored(seed: int) -> None:
    random, stored = Random(seed), list[Any]()
    data = draw(random).stream(random)
    cut = data[: random.randrange(len(data) - len(b"data: [DONE]\n\n"))]
    streaming = translation(stored)
    events = read_events(streaming.events(cut) + streaming.end())
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["message"]
    assert stored == []


def test_an_error_names_the_field_of_this_api() -> None:
    error = {"message": "no", "type": "invalid_request_error", "param": "messages", "code": "c"}
    body = json.loads(translation().answer(400, json.dumps({"error": error}).encode()))
    assert body["error"] == {**error, "param": "input"}
    deeper = {**error, "param": "response_format.json_schema"}
    body = json.loads(translation().answer(400, json.dumps({"error": deeper}).encode()))
    assert body["error"]["param"] == "text.format.json_schema"


def test_the_limit_makes_a_response_incomplete() -> None:
    answer = ChatAnswer("reasoning", "", "Hm.", [], "length", None, None)
    response = json.loads(translation().answer(200, answer.whole()))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"


def chat(**fields: Any) -> dict[str, Any]:
    """The chat request."""
    request = read_responses_request(json.dumps({"model": "m", "input": "x", **fields}).encode())
    parsed: dict[str, Any] = json.loads(chat_request(request, input_items(request)))
    return parsed


def test_a_request_is_a_chat_request() -> None:
    function = {"name": "look", "parameters": {"type": "object"}, "strict": True}
    assert chat(
        instructions="Be brief.",
        input=[
            {"role": "system", "content": "Hurry."},
            {"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y", "detail": "low"}]},
        ],
        tools=[{"type": "function", **function}],
        tool_choice={
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "look"}],
        },
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        max_output_tokens=5,
        stream=True,
        top_logprobs=2,
        user="u",
        prompt_cache_key="k",
        seed=5,
    ) == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": "Hurry."},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y", "detail": "low"}}]},
        ],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]},
        },
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        "max_completion_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
        "user": "u",
        "prompt_cache_key": "k",
        "seed": 5,
    }


def test_items_of_one_answer_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    text = {"role": "assistant", "content": "A."}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "3"}]}
    as_chat = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = chat(input=[thought, text, call, call, output, thought, call, output, text, text, thought])["messages"]
    assert messages == [
        {"role": "assistant", "reasoning": "Hm.", "content": "A.", "tool_calls": [as_chat, as_chat]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
        {"role": "assistant", "reasoning": "Hm.", "content": None, "tool_calls": [as_chat]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
        {"role": "assistant", "content": "A."},
        {"role": "assistant", "content": "A."},
        {"role": "assistant", "reasoning": "Hm.", "content": ""},
    ]


@pytest.mark.parametrize("seed", range(100))
def test_a_malformed_request_is_refused_and_nothing_else(seed: int) -> None:
    """Any part of a valid request is replaced by something else."""
    random = Random(seed)
    part = {"type": "input_text", "text": "x"}
    request: Any = {
        "model": "m",
        "instructions": "x",
        "input": [
            {"role": "user", "content": [part]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [part]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
        ],
        "tools": [{"type": "function", "name": "t", "parameters": {}}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "t"}]},
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "metadata": {"a": "b"},
        "include": ["message.output_text.logprobs"],
    }
    parent = request
    while True:
        key = random.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        if not parent[key] or not isinstance(parent[key], dict | list) or random.random() < 0.3:
            break
        parent = parent[key]
    parent[key] = random.choice([None, 5, -1, 1e300, "", "x", [], [[]], {}, {"type": "x"}, [5], True, "\x00"])
    try:
        read = read_responses_request(json.dumps(request).encode())
        chat_request(read, input_items(read))
    except InvalidRequest as error:
        assert len(error.message) < 400  # noqa: PT017
