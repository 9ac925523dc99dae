"""The Responses API as every endpoint of kvferry's must serve it for OpenAI's client: an engine, or a router before
many.

Each check takes an unmodified `openai.OpenAI` client and a model name. What must be equal is asked for with
temperature 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from openai import OpenAI

QUESTION = "What is the capital of France?"
NEVER_ENDING = {"extra_body": {"ignore_eos": True}}


def create(client: OpenAI, model: str, **options: Any) -> Any:
    arguments = {"input": QUESTION, "max_output_tokens": 12, "temperature": 0, **NEVER_ENDING, **options}
    return client.responses.create(model=model, **arguments)


def chat_text(client: OpenAI, model: str, messages: list[Any], **options: Any) -> str:
    answer = client.chat.completions.create(
        model=model, messages=messages, **{"max_tokens": 12, "temperature": 0, **NEVER_ENDING, **options}
    )
    return answer.choices[0].message.content or ""


def a_response_has_its_parts(client: OpenAI, model: str) -> None:
    response = create(client, model, instructions="Be brief.", metadata={"order": "66"})
    assert response.id.startswith("resp_")
    assert (response.object, response.model, response.status) == ("response", model, "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.metadata == {"order": "66"}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    assert response.output_text == chat_text(client, model, messages) != ""
    usage = response.usage
    assert usage.output_tokens == 12
    assert usage.total_tokens == usage.input_tokens + 12
    assert 0 <= usage.input_tokens_details.cached_tokens <= usage.input_tokens


def a_stream_is_the_whole_response(client: OpenAI, model: str) -> None:
    whole = create(client, model)
    events = list(create(client, model, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-2:] == ["response.output_item.done", "response.incomplete"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == 12
    stop = {"ignore_eos": True, "stop": [text[6:8]]}
    arguments: Any = {"input": QUESTION, "max_output_tokens": 12, "temperature": 0, "extra_body": stop}
    with client.responses.stream(model=model, **arguments) as stream:
        final = stream.until_done().get_final_response()
    assert (final.status, final.output_text) == ("completed", text[: text.index(text[6:8])])


def a_conversation_goes_on(client: OpenAI, model: str) -> None:
    first = create(client, model)
    second = create(client, model, input="And of Spain?", previous_response_id=first.id, instructions="Be brief.")
    third = create(client, model, input="And?", previous_response_id=second.id, stream=True, store=False)
    *_, last = third
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of Spain?"},
    ]
    briefly = [{"role": "system", "content": "Be brief."}, *messages]
    assert second.output_text == chat_text(client, model, briefly)
    assert second.previous_response_id == first.id
    messages += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "And?"}]
    assert last.response.output_text == chat_text(client, model, messages)  # instructions are of one turn
    items = client.responses.input_items.list(second.id, order="asc", limit=100)
    assert [item.type for item in items.data] == ["message"] * 3


def responses_are_stored_and_deleted(client: OpenAI, model: str) -> None:
    from openai import BadRequestError, NotFoundError

    response = create(client, model)
    assert client.responses.retrieve(response.id) == response
    page = client.responses.input_items.list(response.id)
    assert [item.content[0].text for item in page.data] == [QUESTION]  # type: ignore[union-attr]
    with pytest.raises(BadRequestError, match="background"):
        client.responses.cancel(response.id)
    client.responses.delete(response.id)
    for forget in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(NotFoundError, match=response.id):
            forget(response.id)
    with pytest.raises(BadRequestError, match=response.id) as caught:
        create(client, model, previous_response_id=response.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    unstored = create(client, model, store=False)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(unstored.id)


def tools_and_results_are_the_chats(client: OpenAI, model: str) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "Let me look."},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "It is."},
        {"role": "user", "content": "So?"},
    ]
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Paris"}'}}
    chat: list[Any] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "Let me look.", "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It is."},
        {"role": "user", "content": "So?"},
    ]
    function = {"name": "look", "description": "Looks.", "parameters": schema}
    tools: list[Any] = [{"type": "function", **function, "strict": None}]
    text = chat_text(client, model, chat, tools=[{"type": "function", "function": function}], tool_choice="none")
    assert create(client, model, input=items, tools=tools, tool_choice="none").output_text == text


def tokens_are_counted(client: OpenAI, model: str) -> None:
    few = client.responses.input_tokens.count(model=model, input=QUESTION).input_tokens
    many = client.responses.input_tokens.count(model=model, input=QUESTION, instructions="Be brief.").input_tokens
    assert 0 < few < many
    assert few == create(client, model).usage.input_tokens


def log_probabilities_are_the_chats(client: OpenAI, model: str) -> None:
    response = create(client, model, include=["message.output_text.logprobs"], top_logprobs=2)
    [part] = response.output[0].content
    assert len(part.logprobs) == 12
    assert [len(token.top_logprobs) for token in part.logprobs] == [2] * 12
    messages: Any = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(
        model=model, messages=messages, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2, **NEVER_ENDING
    )
    expected = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert [(token.token, token.bytes) for token in part.logprobs] == [(one.token, one.bytes) for one in expected]
    events = list(create(client, model, include=["message.output_text.logprobs"], top_logprobs=2, stream=True))
    assert events[-1].response.output[0].content[0].logprobs == part.logprobs


def a_json_schema_is_followed(client: OpenAI, model: str) -> None:
    schema = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    text: Any = {
        "format": {
            "type": "json_schema",
            "name": "weather",
            "schema": schema | {"additionalProperties": False},
            "strict": True,
        }
    }
    response = create(client, model, max_output_tokens=64, text=text, extra_body={})
    assert response.status == "completed"
    assert "".join(response.output_text.split()) in ('{"sunny":true}', '{"sunny":false}')


def a_forced_call_is_an_item(client: OpenAI, model: str) -> None:
    schema = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    function = {"name": "report", "parameters": schema | {"additionalProperties": False}, "strict": True}
    tools: list[Any] = [{"type": "function", **function}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "report"}]}
    for choice in ("required", {"type": "function", "name": "report"}, allowed):
        options: dict[str, Any] = {"max_output_tokens": 256, "tools": tools, "tool_choice": choice, "extra_body": {}}
        whole = create(client, model, **options)
        *_, last = create(client, model, stream=True, **options)
        arguments = [
            [item.arguments for item in response.output if item.type == "function_call"]
            for response in (whole, last.response)
        ]
        assert arguments[0] == arguments[1] != []
        assert whole.status == last.response.status == "completed"
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "Thanks."}
            for item in whole.output
            if item.type == "function_call"
        ]
        follow = create(client, model, input=outputs, previous_response_id=whole.id, tools=tools, tool_choice="none")
        assert follow.output_text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"messages": []}, "messages"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"tempreature": 2}, "tempreature"),
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
    ({"input": [{"type": "computer_call"}]}, "computer_call"),
    ({"input": [{"role": "tool", "content": "x"}]}, r"input\[0\].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, r"input\[0\].content\[0\].*input_file"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\].content\[0\].image_url"),
    ({"input": [{"type": "function_call", "name": "x"}]}, r"input\[0\].call_id"),
    ({"tools": [{"type": "web_search"}]}, r"tools\[0\].*web_search"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"previous_response_id": "resp_1"}, "resp_1"),
    ({"max_output_tokens": 10**6}, "max_output_tokens|maximum context length"),
]


def what_is_not_honoured_is_refused_by_name(client: OpenAI, model: str) -> None:
    from openai import BadRequestError

    for fields, named in REFUSED:
        for streamed in (False, True):
            with pytest.raises(BadRequestError, match=named):
                create(client, model, extra_body={"stream": streamed, **fields})


def what_is_harmless_is_accepted(client: OpenAI, model: str) -> None:
    harmless: dict[str, Any] = {
        "background": False,
        "conversation": None,
        "truncation": "auto",
        "service_tier": "auto",
        "stream_options": {"include_obfuscation": False},
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "text": {"verbosity": "low"},
        "prompt_cache_key": "k",
        "safety_identifier": "u",
        "parallel_tool_calls": True,
        "max_tool_calls": 3,
    }
    assert create(client, model, extra_body={"ignore_eos": True, **harmless}).output_text


CHECKS: list[Callable[[OpenAI, str], None]] = [
    a_response_has_its_parts,
    a_stream_is_the_whole_response,
    a_conversation_goes_on,
    responses_are_stored_and_deleted,
    tools_and_results_are_the_chats,
    tokens_are_counted,
    log_probabilities_are_the_chats,
    what_is_not_honoured_is_refused_by_name,
    what_is_harmless_is_accepted,
]

OF_OTHER_ENGINES: list[Callable[[OpenAI, str], None]] = [
    a_stream_is_the_whole_response,
    responses_are_stored_and_deleted,
    tools_and_results_are_the_chats,
    what_is_harmless_is_accepted,
]
"""For vLLM and SGLang."""

STRUCTURED_CHECKS: list[Callable[[OpenAI, str], None]] = [a_json_schema_is_followed, a_forced_call_is_an_item]
"""For engines that follow grammars."""
