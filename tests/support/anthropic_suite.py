"""What every endpoint of kvferry's must do for Anthropic's client: an engine, or a router before many.

Each check takes an unmodified `anthropic.Anthropic` client, an `openai.OpenAI` client of the same server, and a model
name. What must be equal is asked for with temperature 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

USER: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
NEVER_ENDING = {"extra_body": {"ignore_eos": True}}


def create(client: Anthropic, model: str, **options: Any) -> Any:
    body = GREEDY | options.pop("extra_body", {})
    return client.messages.create(model=model, **{"max_tokens": 12, "messages": USER, "extra_body": body, **options})


def stream(client: Anthropic, model: str, **options: Any) -> tuple[list[Any], Any]:
    """All events, and the message that the client makes of them."""
    arguments = {"max_tokens": 12, "messages": USER, "extra_body": GREEDY, **options}
    with client.messages.stream(model=model, **arguments) as received:
        return list(received), received.get_final_message()


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def chat_text(client: OpenAI, model: str, messages: list[Any], **options: Any) -> str:
    answer = client.chat.completions.create(
        model=model, messages=messages, **{"max_tokens": 12, "temperature": 0, **NEVER_ENDING, **options}
    )
    return answer.choices[0].message.content or ""


def a_message_has_its_parts(client: Anthropic, openai: OpenAI, model: str) -> None:
    message = create(client, model)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", model)
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert text_of(message) == chat_text(openai, model, USER) != ""
    usage = message.usage
    assert usage.output_tokens == 12
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) > 0


def a_stream_is_the_whole_message(client: Anthropic, openai: OpenAI, model: str) -> None:
    whole = create(client, model)
    events, message = stream(client, model)
    kinds = [event.type for event in events if not event.type.startswith("text")]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert (text_of(message), message.stop_reason) == (text_of(whole), whole.stop_reason)
    usage = message.usage
    assert usage.output_tokens == 12
    assert (
        usage.input_tokens + usage.cache_read_input_tokens
        == client.messages.count_tokens(model=model, messages=USER).input_tokens
    )


def stop_sequences_are_named(client: Anthropic, openai: OpenAI, model: str) -> None:
    text = text_of(create(client, model, max_tokens=24))
    stop = text[6:8]
    message = create(client, model, max_tokens=24, stop_sequences=["no such text", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == text[: text.index(stop)]
    assert stream(client, model, max_tokens=24, stop_sequences=[stop])[1].stop_sequence == stop


def the_system_prompt_and_blocks_are_the_chats(client: Anthropic, openai: OpenAI, model: str) -> None:
    system: list[Any] = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=0123"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    blocks = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}]
    message = create(client, model, system=system, messages=blocks)
    assert text_of(message) == chat_text(openai, model, [{"role": "system", "content": "Be brief."}, *USER])


def tools_and_results_are_the_chats(client: Anthropic, openai: OpenAI, model: str) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    messages: list[Any] = [
        *USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "It is."}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    call = {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Paris"}'}}
    chat: list[Any] = [
        *USER,
        {"role": "assistant", "content": "Let me look.", "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "It is."},
        {"role": "user", "content": "So?"},
    ]
    tools: list[Any] = [{"name": "look", "description": "Looks.", "input_schema": schema}]
    function = {"name": "look", "description": "Looks.", "parameters": schema}
    text = chat_text(openai, model, chat, tools=[{"type": "function", "function": function}], tool_choice="none")
    assert text_of(create(client, model, messages=messages, tools=tools, tool_choice={"type": "none"})) == text


def the_last_message_is_continued(client: Anthropic, openai: OpenAI, model: str) -> None:
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    extra = {"extra_body": {"ignore_eos": True, "continue_final_message": True, "add_generation_prompt": False}}
    assert text_of(create(client, model, messages=begun)) == chat_text(openai, model, begun, **extra)


def tokens_are_counted(client: Anthropic, openai: OpenAI, model: str) -> None:
    few = client.messages.count_tokens(model=model, messages=USER).input_tokens
    many = client.messages.count_tokens(model=model, messages=USER, system="Be brief.").input_tokens
    assert 0 < few < many


def a_json_schema_is_followed(client: Anthropic, openai: OpenAI, model: str) -> None:
    schema = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    closed = schema | {"additionalProperties": False}
    config: Any = {"format": {"type": "json_schema", "schema": closed}}
    message = create(client, model, max_tokens=64, output_config=config, extra_body={"ignore_eos": False})
    assert message.stop_reason == "end_turn"
    assert "".join(text_of(message).split()) in ('{"sunny":true}', '{"sunny":false}')


CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}


def a_forced_call_is_a_block(client: Anthropic, openai: OpenAI, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"sunny": {"type": "boolean"}},
        "required": ["sunny"],
        "additionalProperties": False,
    }
    tools: list[Any] = [{"name": "report", "description": "Reports.", "input_schema": schema}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "report", "disable_parallel_tool_use": True}):
        options: dict[str, Any] = {"max_tokens": 256, "tools": tools, "tool_choice": choice}
        whole = create(client, model, extra_body={"ignore_eos": False}, **options)
        _, streamed = stream(client, model, extra_body={"temperature": 0}, **options)
        for message in (whole, streamed):
            assert message.stop_reason == "tool_use"
            calls = [block for block in message.content if block.type == "tool_use"]
            assert all(call.name == "report" and call.input["sunny"] in (True, False) for call in calls)
        inputs = [[block.input for block in one.content if block.type == "tool_use"] for one in (whole, streamed)]
        assert inputs[0] == inputs[1] != []
        result = {"type": "tool_result", "tool_use_id": whole.content[-1].id, "content": "Thanks.", "is_error": False}
        answered = [*USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        assert text_of(create(client, model, messages=answered, tools=tools, tool_choice={"type": "none"}))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"n": 2}, "n"),
    ({"top_kk": 2}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [{"name": "x"}]}, r"tools\[0\].input_schema"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"system": [{"type": "image"}]}, r"system\[0\]"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, r"messages\[0\].content\[0\].*document"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"messages\[0\].content\[0\].text"),
    ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content"),
    (
        {
            "messages": [
                *USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "x", "input": {}}]},
            ]
        },
        "without results",
    ),
]


def what_is_not_honoured_is_refused_by_name(client: Anthropic, openai: OpenAI, model: str) -> None:
    from anthropic import BadRequestError

    for fields, named in REFUSED:
        for streamed in (False, True):
            with pytest.raises(BadRequestError, match=named) as caught:
                create(client, model, extra_body={"stream": streamed, **fields})
            body: Any = caught.value.body
            assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error"), fields


def what_is_harmless_is_accepted(client: Anthropic, openai: OpenAI, model: str) -> None:
    harmless: dict[str, Any] = {
        "metadata": {"user_id": "u1"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "container": None,
        "thinking": {"type": "adaptive"},
    }
    headers = {"anthropic-beta": "interleaved-thinking-2025-05-14"}
    message = create(client, model, extra_body=harmless, extra_headers=headers)
    assert text_of(message)


def a_budget_of_thinking_is_accepted(client: Anthropic, openai: OpenAI, model: str) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert text_of(create(client, model, extra_body={**GREEDY, "thinking": thinking}))


CHECKS: list[Callable[[Anthropic, OpenAI, str], None]] = [
    a_message_has_its_parts,
    a_stream_is_the_whole_message,
    stop_sequences_are_named,
    the_system_prompt_and_blocks_are_the_chats,
    tools_and_results_are_the_chats,
    the_last_message_is_continued,
    tokens_are_counted,
    what_is_not_honoured_is_refused_by_name,
    what_is_harmless_is_accepted,
    a_budget_of_thinking_is_accepted,
]

OF_OTHER_ENGINES: list[Callable[[Anthropic, OpenAI, str], None]] = [
    a_message_has_its_parts,
    a_stream_is_the_whole_message,
    stop_sequences_are_named,
    tools_and_results_are_the_chats,
    the_last_message_is_continued,
    what_is_harmless_is_accepted,
]
"""For vLLM and SGLang. Without system messages, which vLLM gives to the model's template as parts that it cannot join,
and without a budget of thinking, which vLLM refuses without a parser of reasoning."""

STRUCTURED_CHECKS: list[Callable[[Anthropic, OpenAI, str], None]] = [
    a_json_schema_is_followed,
    a_forced_call_is_a_block,
]
"""For engines that follow grammars."""
