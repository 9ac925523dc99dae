"""Requests of OpenAI's Responses API, as chat requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from kvferry.api.dialects.translated import (
    PassedFields,
    content_of,
    convert,
    convert_tagged,
    read_request,
    text_part,
    tool_call,
    without_none,
)
from kvferry.api.requests import Integer, Name
from kvferry.core.entropy import secret_hex
from kvferry.core.errors import InvalidRequest

RESPONSES_PATH, INPUT_TOKENS_PATH = "/v1/responses", "/v1/responses/input_tokens"

LOGPROBS = "message.output_text.logprobs"

_IGNORED_FIELDS = frozenset(
    [
        *("access_programs", "background_options", "image", "max_tool_calls", "moderation", "prompt_cache_options"),
        *("prompt_cache_retention", "service_tier", "stream_options"),
    ]
)
"""Fields that are ignored: they do not change the model's answer, or do so only together with another field, which is
refused."""

_REFUSAL_REASONS = {
    "conversation": "this server stores no conversations; use previous_response_id",
    "prompt": "this server stores no prompt templates; send instructions and input",
    "context_management": "this server does not compact conversations; send the items that the model needs",
    "messages": "use input",
    "response_format": "use text.format",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "reasoning_effort": "use reasoning.effort",
}
"""Fields that are refused, and what the error says."""


class Reasoning(msgspec.Struct):
    """`summary` is accepted and has no effect: the answer has the reasoning itself, and no summary."""

    effort: Name | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(msgspec.Struct):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    """Options of the answer's text. `verbosity` has no effect."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesTool(msgspec.Struct):
    """A tool of the client's."""

    name: Name
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class InputTokensRequest(PassedFields, kw_only=True):
    """`POST /v1/responses/input_tokens`."""

    model: Name | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ResponsesRequest(InputTokensRequest, kw_only=True):
    """`POST /v1/responses`. A prompt that is too long is refused, whatever `truncation` is."""

    max_output_tokens: Integer | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    top_logprobs: Integer | None = None
    include: list[str] | None = None
    stop: Any = None
    user: Name | None = None
    prompt_cache_key: Name | None = None
    safety_identifier: Name | None = None
    metadata: dict[str, str] | None = None

    @property
    def has_logprobs(self) -> bool:
        """True if the answer's log-probabilities are requested."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


def read_responses_request(raw: bytes) -> ResponsesRequest:
    """Decode a request. Raises `InvalidRequest`."""
    request = read_request(raw, ResponsesRequest, _IGNORED_FIELDS, _REFUSAL_REASONS)
    if request.background:
        raise InvalidRequest(
            "background: responses are not computed in the background by this server", param="background"
        )
    text_format = None if request.text is None else request.text.format
    if text_format is not None and text_format.type == "json_schema" and text_format.schema is None:
        raise InvalidRequest("text.format.schema is required", param="text.format.schema")
    return request


def read_input_tokens_request(raw: bytes) -> InputTokensRequest:
    """Decode a request. Raises `InvalidRequest`."""
    return read_request(raw, InputTokensRequest, _IGNORED_FIELDS, _REFUSAL_REASONS)


def input_items(request: InputTokensRequest) -> list[dict[str, Any]]:
    """The items of the request's own input, each with an id. Raises `InvalidRequest`."""
    if request.input is None:
        raise InvalidRequest("input is required", param="input")
    if isinstance(request.input, str):
        content = [{"type": "input_text", "text": request.input}]
        return [{"type": "message", "role": "user", "content": content, "id": f"msg_{secret_hex()}"}]
    items = []
    for index, item in enumerate(request.input):
        kind = item.get("type", "message")
        if not isinstance(kind, str) or kind not in _ITEMS:
            raise _unsupported_item(kind, f"input[{index}]")
        items.append({"id": f"{_ITEMS[kind]}_{secret_hex()}", **_with_parts(item), "type": kind})
    return items


def _with_parts(item: dict[str, Any]) -> dict[str, Any]:
    """The item as `GET /v1/responses/ID/input_items` lists it: the content of a message is a list of parts."""
    content, is_answer = item.get("content"), item.get("role") == "assistant"
    if isinstance(content, str):
        part = {"type": "output_text" if is_answer else "input_text", "text": content}
        item = {**item, "content": [part | ({"annotations": []} if is_answer else {})]}
    return without_none(**item)


def chat_request(request: ResponsesRequest, items: list[dict[str, Any]]) -> bytes:
    """The chat request for a conversation of these items. Raises `InvalidRequest`."""
    streams = request.stream is True
    chat = chat_prompt(request, items) | without_none(
        max_completion_tokens=request.max_output_tokens,
        stream=streams or None,
        stream_options={"include_usage": True} if streams else None,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        logprobs=request.has_logprobs or None,
        top_logprobs=request.top_logprobs if request.has_logprobs else None,
        stop=request.stop,
        user=request.user,
        prompt_cache_key=request.prompt_cache_key,
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request.text),
    )
    return msgspec.json.encode({**request.passed(), **chat})


def chat_prompt(request: InputTokensRequest, items: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields that determine the prompt. Raises `InvalidRequest`."""
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    messages += _messages(items, is_first=not messages)
    return without_none(
        model=request.model,
        messages=messages,
        tools=None if request.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)],
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def function_tools(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The request's tools as its response repeats them."""
    tools = [convert(tool, ResponsesTool, "tools") for tool in request.tools or ()]
    return [{"type": "function", **msgspec.structs.asdict(tool)} for tool in tools]


# Items.


class MessageItem(msgspec.Struct):
    """A message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class FunctionCallItem(msgspec.Struct):
    """A call in an earlier answer."""

    call_id: Name
    name: Name
    arguments: str


class FunctionCallOutputItem(msgspec.Struct):
    """The result of a call."""

    call_id: Name
    output: str | list[dict[str, Any]]


class ReasoningText(msgspec.Struct):
    """A part of the model's reasoning."""

    text: str


class ReasoningItem(msgspec.Struct):
    """The model's reasoning in an earlier answer. Encrypted reasoning of another server cannot be read."""

    content: list[ReasoningText] | None = None


class ItemText(msgspec.Struct):
    """A text."""

    text: str


class ItemRefusal(msgspec.Struct):
    """The text of a refusal in an earlier answer."""

    refusal: str


class ItemImage(msgspec.Struct):
    """An image, at a URL or as a data URL."""

    image_url: str | None = None
    detail: str | None = None


_ITEMS = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""Types of items, and what their ids begin with."""

_TEXTS: dict[str, type[Any]] = {"input_text": ItemText, "output_text": ItemText, "text": ItemText}
_PARTS: dict[str, type[Any]] = {**_TEXTS, "refusal": ItemRefusal, "input_image": ItemImage}


def _messages(items: list[dict[str, Any]], *, is_first: bool) -> Iterator[dict[str, Any]]:
    """The items as chat messages. Reasoning, text and calls of one answer become one message of the assistant, as in
    the chat API. Only the first message may be a system message; later ones become developer messages. `is_first`: no
    message precedes these items."""
    answer: dict[str, Any] = {}
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match item.get("type", "message"):
            case "reasoning":
                thoughts = convert(item, ReasoningItem, where).content or ()
                if answer.keys() - {"role", "reasoning"}:
                    yield _with_content(answer)
                    answer = {}
                if text := "".join(part.text for part in thoughts):
                    answer = {"role": "assistant", "reasoning": answer.get("reasoning", "") + text}
            case "function_call":
                call = convert(item, FunctionCallItem, where)
                answer.setdefault("role", "assistant")
                answer.setdefault("tool_calls", []).append(tool_call(call.call_id, call.name, call.arguments))
            case "function_call_output":
                output = convert(item, FunctionCallOutputItem, where)
                if answer:
                    yield _with_content(answer)
                    answer = {}
                yield {
                    "role": "tool",
                    "tool_call_id": output.call_id,
                    "content": _content(output.output, f"{where}.output"),
                }
            case "message":
                message = convert(item, MessageItem, where)
                content = _content(message.content, f"{where}.content")
                if answer and (message.role != "assistant" or answer.keys() - {"role", "reasoning"}):
                    yield _with_content(answer)
                    answer = {}
                if message.role == "assistant":
                    answer |= {"role": "assistant", "content": content}
                    continue
                is_later = message.role == "system" and not (is_first and index == 0)
                yield {"role": "developer" if is_later else message.role, "content": content}
            case kind:
                raise _unsupported_item(kind, where)
    if answer:
        yield _with_content(answer)


def _with_content(answer: dict[str, Any]) -> dict[str, Any]:
    """A message of the assistant with `content`, which is null if the message has only calls."""
    return {"content": None if "tool_calls" in answer else "", **answer}


def _unsupported_item(kind: Any, where: str) -> InvalidRequest:
    reason = (
        "send the item itself, or previous_response_id" if kind == "item_reference" else f"only {', '.join(_ITEMS)}"
    )
    return InvalidRequest(
        f"{where}: items of type {str(kind)[:60]!r} are not supported: {reason}", param=f"{where}.type"
    )


def _content(content: str | list[dict[str, Any]], where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    return content_of(parts) if parts else ""


def _part(value: dict[str, Any], where: str) -> dict[str, Any]:
    part = convert_tagged(value, _PARTS, where, "parts")
    if isinstance(part, ItemText):
        return text_part(part.text)
    if isinstance(part, ItemRefusal):
        return text_part(part.refusal)
    if not part.image_url:
        raise InvalidRequest(f"{where}.image_url is required: files are not kept by this server", param=where)
    return {"type": "image_url", "image_url": without_none(url=part.image_url, detail=part.detail)}


# Tools and formats.


def _tool(value: dict[str, Any], where: str) -> dict[str, Any]:
    if value.get("type") != "function":
        raise InvalidRequest(
            f"{where}: tools of type {str(value.get('type'))[:60]!r} are not run by this server; only functions, which"
            " the client runs, are supported",
            param=f"{where}.type",
        )
    convert(value, ResponsesTool, where)
    names = ResponsesTool.__struct_fields__  # in the client's order, as templates print them
    function = {name: field for name, field in value.items() if name in names and field is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*tools]}:
            allowed = [_tool_choice(tool) if isinstance(tool, dict) else None for tool in tools]
            if all(isinstance(tool, dict) and tool["type"] == "function" for tool in allowed):
                return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    raise InvalidRequest(
        "tool_choice must be none, auto, required, a function or allowed_tools of functions", param="tool_choice"
    )


def _response_format(text: TextConfig | None) -> dict[str, Any] | None:
    text_format = None if text is None else text.format
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return {"type": "json_object"}
    schema = without_none(
        name=text_format.name or "output",
        schema=text_format.schema,
        description=text_format.description,
        strict=text_format.strict,
    )
    return {"type": "json_schema", "json_schema": schema}
