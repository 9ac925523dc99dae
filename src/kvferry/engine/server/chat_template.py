"""Renders chat messages to the prompt's text, with the model's chat template."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from kvferry.api.decoding import decode_value
from kvferry.api.requests import ChatCompletionRequest
from kvferry.core.errors import InvalidRequest
from kvferry.engine.server.text_codec import THREAD_ABOVE_CHARACTERS, TextCodec

_PART_SEPARATOR = "\n"
"""What joins the text parts of one message, as in vLLM."""

_NOT_FOR_TEMPLATES = frozenset(
    [
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    ]
)
"""Names in `chat_template_kwargs` that would change the rendering instead of reaching the template."""


async def render_chat(body: ChatCompletionRequest, codec: TextCodec) -> str:
    """The prompt's text. Raises `InvalidRequest` if the messages are not acceptable."""
    if not body.messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    options = _template_options(body)
    if not codec.tokenizer.chat_template:
        raise InvalidRequest(
            "this model has no chat template; use /v1/completions, or serve it with a tokenizer that has one",
            param="messages",
        )
    big = not _is_small([body.messages, options], THREAD_ABOVE_CHARACTERS)
    return await codec.off_loop.run_if(big, _render, codec.tokenizer, body.messages, options)


def _is_small(value: Any, most: int) -> bool:
    """Whether the value has at most `most` characters and entries in all; stops counting there."""
    waiting = [value]
    while waiting and most >= 0:
        one = waiting.pop()
        most -= len(one) if isinstance(one, str | list | dict) else 1
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return most >= 0


def _render(tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    messages = [_plain_message(message, index) for index, message in enumerate(messages)]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        text.encode()  # arguments of tool calls are JSON within JSON, and may contain half of a surrogate pair
    except TemplateError as error:
        raise InvalidRequest(f"the chat template does not accept these messages: {error}", param="messages") from error
    except Exception as error:  # templates are programs that run on what the client sent: anything may be raised
        raise InvalidRequest(
            f"the chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
        ) from error
    return text


def _template_options(body: ChatCompletionRequest) -> dict[str, Any]:
    options = dict(body.chat_template_kwargs or {})
    for name in _NOT_FOR_TEMPLATES & options.keys():
        raise InvalidRequest(f"chat_template_kwargs must not contain {name}", param="chat_template_kwargs")
    if body.chat_template is not None:
        raise InvalidRequest(
            "chat_template: templates are programs, and those in requests are not run; leave it out,"
            " and the model's own is used",
            param="chat_template",
        )
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    return {
        **options,
        "tools": body.tools or None,
        "documents": body.documents or None,
        "add_generation_prompt": _opens_answer(body),
        "continue_final_message": bool(body.continue_final_message),
    }


def _opens_answer(body: ChatCompletionRequest) -> bool:
    """Whether the prompt ends with the beginning of a new answer; False if the last message is to be continued."""
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    return not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt


_SAYS_OTHERWISE = frozenset({"tool_calls", "function_call", "reasoning_content", "refusal", "audio"})
"""What an assistant's message may have in place of content."""


def _plain_message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """The message as templates expect it: content as a string, arguments of tool calls as objects."""
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise InvalidRequest(f"{where}.role is required, and a string", param=f"{where}.role")
    if message.get("content") is None and not (message["role"] == "assistant" and _SAYS_OTHERWISE & message.keys()):
        raise InvalidRequest(
            f"{where}.content is required: only an assistant's message with tool_calls may be without",
            param=f"{where}.content",
        )
    plain = dict(message)
    if "content" in plain:
        plain["content"] = _plain_content(plain["content"], f"{where}.content")
    if plain.get("tool_calls"):
        plain["tool_calls"] = _plain_tool_calls(plain["tool_calls"], f"{where}.tool_calls")
    return plain


def _plain_content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or an array of parts", param=where)
    return _PART_SEPARATOR.join([_text_of_part(part, f"{where}[{place}]") for place, part in enumerate(content)])


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise InvalidRequest(f"{where}: parts of type {kind!r} are not supported, only text", param=where)
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text is required, and a string", param=f"{where}.text")
    return text


def _plain_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidRequest(f"{where} must be an array of objects", param=where)
    return [_plain_tool_call(call) for call in calls]


def _plain_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's clients send arguments as JSON in a string; templates print them, and would quote them twice."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = decode_value((function["arguments"] or "{}").encode())
    except InvalidRequest:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
