"""Requests of Anthropic's Messages API, as chat requests."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec

from kvferry.api.dialects.messages_answer import MessagesTranslation
from kvferry.api.dialects.token_count import TokenCountTranslation
from kvferry.api.dialects.translated import (
    CHAT_PATH,
    TOKENIZE_PATH,
    PassedFields,
    TranslatedRequest,
    content_of,
    convert,
    convert_tagged,
    read_request,
    text_part,
    tool_call,
    without_none,
)
from kvferry.api.requests import Integer, Name, StopString
from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.dialects import AnthropicErrors

MESSAGES_PATH, COUNT_TOKENS_PATH = "/v1/messages", "/v1/messages/count_tokens"

_IGNORED_FIELDS = frozenset(
    [
        *("betas", "cache_control", "diagnostics", "inference_geo", "service_tier", "speed", "user_profile_id"),
        "workspace_id",
    ]
)
"""Fields that do not change what the model says."""

_REFUSAL_REASONS = {
    "container": "code is not executed by this server",
    "mcp_servers": "MCP servers are not called by this server; call them and send their tools in tools",
    "response_format": "use output_config.format",
    "functions": "use tools",
    "stop": "use stop_sequences",
    "max_completion_tokens": "use max_tokens",
}

_ATTRIBUTION = "x-anthropic-billing-header"
"""Begins a system block of Claude Code's that is meant for Anthropic's accounting, not for the model. It differs in
each request, so that no prefix would be found in a cache (vLLM 0.32 drops it too)."""


class Metadata(msgspec.Struct):
    """`user_id` names the user, and the conversation."""

    user_id: str | None = None


class JsonOutputFormat(msgspec.Struct):
    """A JSON schema for the answer."""

    schema: dict[str, Any]
    type: Literal["json_schema"]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The effort and the format of an answer."""

    effort: Name | None = None
    format: JsonOutputFormat | None = None


class Thinking(msgspec.Struct):
    """The thinking before an answer. `budget_tokens`: the largest number of its tokens, of type "enabled" only.
    `display` "omitted": the thoughts are left out of the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(msgspec.Struct):
    """The tools that the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Tool(msgspec.Struct):
    """A tool of the client's."""

    name: Name
    input_schema: dict[str, Any]
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class CountTokensRequest(PassedFields, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    model: Name
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], msgspec.Meta(max_length=32)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    metadata: Metadata | None = None
    output_format: JsonOutputFormat | None = None
    """The former name of `output_config.format`."""


# Content blocks.


class TextBlock(msgspec.Struct):
    """A text."""

    text: str


class ImageSource(msgspec.Struct):
    """An image, in the request or at a URL."""

    type: Literal["base64", "url"]
    url: str | None = None
    media_type: str | None = None
    data: str | None = None


class ImageBlock(msgspec.Struct):
    """An image."""

    source: ImageSource


class ThinkingBlock(msgspec.Struct):
    """The model's thoughts in an earlier answer. The signature is not checked."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct):
    """Encrypted thoughts of another server, which no model here can read."""

    data: str


class ToolUseBlock(msgspec.Struct):
    """A call in an earlier answer."""

    id: Name
    name: Name
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct):
    """The result of a call. `is_error` is not part of the prompt; the content says it."""

    tool_use_id: Name
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


_TEXT: dict[str, type[Any]] = {"text": TextBlock}
_MEDIA: dict[str, type[Any]] = {**_TEXT, "image": ImageBlock}
_BLOCKS: dict[str, dict[str, type[Any]]] = {
    "user": {**_MEDIA, "tool_result": ToolResultBlock},
    "assistant": {
        **_TEXT,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
    },
    "system": _TEXT,
}


def translate_messages(raw: bytes, request_id: str) -> TranslatedRequest:
    """Translate a request. Raises `InvalidRequest`. Takes up to about 100 ms for the largest bodies."""
    request = read_request(raw, MessagesRequest, _IGNORED_FIELDS, _REFUSAL_REASONS)
    user = None if request.metadata is None else request.metadata.user_id
    streams = request.stream is True
    chat = _prompt(request) | without_none(
        max_tokens=request.max_tokens,
        stream=streams or None,
        stream_options={"include_usage": True, "continuous_usage_stats": True} if streams else None,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        user=user,
        tool_choice=_tool_choice(request.tool_choice),
        response_format=_response_format(request),
        thinking_token_budget=_thinking_budget(request),
    )
    if request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use:
        chat["parallel_tool_calls"] = False
    translation = MessagesTranslation(request_id, shows_thoughts=not _hides_thoughts(request.thinking))
    return TranslatedRequest(CHAT_PATH, msgspec.json.encode({**request.passed(), **chat}), translation, user)


def translate_token_count(raw: bytes, request_id: str) -> TranslatedRequest:
    """Translate a request for the number of a prompt's tokens. Raises `InvalidRequest`."""
    request = read_request(raw, CountTokensRequest, _IGNORED_FIELDS, _REFUSAL_REASONS)
    translation = TokenCountTranslation(request_id, AnthropicErrors(), lambda count: {"input_tokens": count})
    return TranslatedRequest(TOKENIZE_PATH, msgspec.json.encode(_prompt(request)), translation)


def _prompt(request: CountTokensRequest) -> dict[str, Any]:
    """The fields that determine the prompt."""
    _require_no_edits(request.context_management)
    messages: list[dict[str, Any]] = []
    if request.system is not None:
        messages += _system_message(request.system, "system", "system")
    for index, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{index}]")
    chat = without_none(
        model=request.model,
        messages=messages,
        tools=None if request.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)],
        reasoning_effort=None if request.output_config is None else request.output_config.effort,
        chat_template_kwargs=_template_options(request),
    )
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant":
        if last.get("tool_calls"):
            raise InvalidRequest("messages: the last message has tool_use blocks without results", param="messages")
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    return chat


def _template_options(request: CountTokensRequest) -> dict[str, Any] | None:
    """The client's options of the chat template. The two names for thinking are the ones that templates read."""
    options = dict(request.chat_template_kwargs or {})
    if request.thinking is not None and request.thinking.type != "adaptive":
        thinks = request.thinking.type == "enabled"
        options = {"enable_thinking": thinks, "thinking": thinks} | options
    return options or None


def _thinking_budget(request: MessagesRequest) -> int | None:
    """The largest number of tokens of the thinking. A budget under vLLM's name, which may be smaller than Anthropic's
    1,024, is the client's last word."""
    thinking = request.thinking
    if request.thinking_token_budget is not None or thinking is None or thinking.type != "enabled":
        return None
    return thinking.budget_tokens


def _hides_thoughts(thinking: Thinking | None) -> bool:
    return thinking is not None and thinking.display == "omitted"


def _require_no_edits(management: dict[str, Any] | None) -> None:
    """Raise `InvalidRequest` for edits of the conversation, except for those that keep everything."""
    for edit in (management or {}).get("edits") or []:
        if not (isinstance(edit, dict) and edit.get("keep") == "all"):
            raise InvalidRequest(
                "context_management: conversations are not edited by this server; leave the content out in the client",
                param="context_management",
            )


def _messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """A message as chat messages: results of tools come before the rest of a user's message."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _BLOCKS:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_BLOCKS)}", param=f"{where}.role")
    if role == "system":
        return _system_message(content, "developer", f"{where}.content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = _blocks(content, _BLOCKS[role], f"{where}.content")
    if role == "assistant":
        return [_assistant_message(blocks)]
    messages: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            messages.append(_tool_message(block, f"{where}.content[{index}].content"))
        else:
            parts.append(_part(block, f"{where}.content[{index}]"))
    return [*messages, {"role": "user", "content": content_of(parts)}] if parts else messages


def _blocks(content: Any, kinds: dict[str, type[Any]], where: str) -> list[Any]:
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or an array of blocks", param=where)
    return [convert_tagged(block, kinds, f"{where}[{index}]", "blocks") for index, block in enumerate(content)]


def _system_message(content: Any, role: str, where: str) -> list[dict[str, Any]]:
    """A system prompt. One between other messages is a developer's: engines merge it into the first one for templates
    without that role, most of which accept no other system message."""
    texts = [content] if isinstance(content, str) else [str(block.text) for block in _blocks(content, _TEXT, where)]
    parts = [text_part(text) for text in texts if text and not text.startswith(_ATTRIBUTION)]
    return [{"role": role, "content": content_of(parts)}] if parts else []


def _assistant_message(blocks: list[Any]) -> dict[str, Any]:
    parts = [text_part(block.text) for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        tool_call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return {"role": "assistant", "content": content_of(parts) if parts else None if calls else ""} | without_none(
        reasoning="".join(thoughts) or None, tool_calls=calls or None
    )


def _tool_message(block: ToolResultBlock, where: str) -> dict[str, Any]:
    content: str | list[dict[str, Any]] = block.content if isinstance(block.content, str) else ""
    if isinstance(block.content, list):
        parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(_blocks(block.content, _MEDIA, where))]
        content = content_of(parts) if parts else ""
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _part(block: Any, where: str) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return text_part(block.text)
    assert isinstance(block, ImageBlock)
    source = block.source
    if source.type == "url":
        url = source.url
    else:
        url = f"data:{source.media_type};base64,{source.data}" if source.media_type and source.data else None
    if not url:
        needed = "url" if source.type == "url" else "media_type and data"
        raise InvalidRequest(f"{where}.source needs {needed}", param=f"{where}.source")
    return {"type": "image_url", "image_url": {"url": url}}


def _tool(value: dict[str, Any], where: str) -> dict[str, Any]:
    if value.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"{where}: tools of type {str(value.get('type'))[:60]!r} are not run by this server; only tools with an"
            " input_schema, which the client runs, are supported",
            param=f"{where}.type",
        )
    tool = convert(value, Tool, where)
    function = without_none(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if not choice.name:
        raise InvalidRequest("tool_choice.name is required", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(request: MessagesRequest) -> dict[str, Any] | None:
    output_format = request.output_format or (request.output_config and request.output_config.format)
    if not output_format:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": output_format.schema, "strict": True}}
