"""Renders chat messages to the prompt's text, with the model's chat template, in a form of content that it accepts.

Some templates print a message's content, others iterate over its parts, many do either, and some for certain roles
only. Which they accept is found by rendering small conversations. vLLM concludes the same from the template's syntax
tree; rendering also covers macros, filters and string operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from kvferry.api.decoding import decode_value
from kvferry.api.requests import ChatCompletionRequest
from kvferry.core.errors import InvalidRequest
from kvferry.engine.server.text_codec import THREAD_ABOVE_CHARACTERS, TextCodec

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


NO_DEFAULTS: Mapping[str, Any] = {}
_BETWEEN_SYSTEM_MESSAGES = "\n\n"

_Content = str | list[dict[str, Any]]
_Message = dict[str, Any]

_FIRST, _SECOND = "kvferryone", "kvferrytwo"
_PART_SEPARATOR = "\n"
"""Separator of the text parts of one message for a template without parts, as in vLLM."""


async def render_chat(body: ChatCompletionRequest, codec: TextCodec, defaults: Mapping[str, Any] = NO_DEFAULTS) -> str:
    """The prompt's text. `defaults`: variables of the template that the request may set. Raises `InvalidRequest` if the
    messages are not acceptable."""
    if not body.messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    options = _template_options(body, defaults)
    if not codec.tokenizer.chat_template:
        raise InvalidRequest(
            "this model has no chat template; use /v1/completions, or serve it with a tokenizer that has one",
            param="messages",
        )
    in_thread = not _is_small([body.messages, options], THREAD_ABOVE_CHARACTERS)
    return await codec.thread_offload.run_if(in_thread, _render, codec.tokenizer, body.messages, options)


def _is_small(value: Any, max_size: int) -> bool:
    """True if the value has at most `max_size` characters and entries in total. Stops counting beyond that."""
    pending = [value]
    while pending and max_size >= 0:
        item = pending.pop()
        max_size -= len(item) if isinstance(item, str | list | dict) else 1
        if isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return max_size >= 0


def _render(tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    for index, message in enumerate(messages):
        _require_message(message, f"messages[{index}]")
    try:
        forms = _content_forms(tokenizer, options["tools"])
        messages = _map_developer_role([_plain_message(message, forms) for message in messages], forms)
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        text.encode()  # arguments of tool calls are JSON within JSON, and may contain half of a surrogate pair
    except TemplateError as error:
        raise InvalidRequest(f"the chat template does not accept these messages: {error}", param="messages") from error
    except Exception as error:  # templates are programs that run on what the client sent: anything may be raised
        raise InvalidRequest(
            f"the chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
        ) from error
    return text


def _template_options(body: ChatCompletionRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    options = {**defaults, **(body.chat_template_kwargs or {})}
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
        "tools": [body.tools[position] for position in body.tool_use().shown] if body.tools else None,
        "documents": body.documents or None,
        "add_generation_prompt": _adds_generation_prompt(body),
        "continue_final_message": bool(body.continue_final_message),
    }


def _adds_generation_prompt(body: ChatCompletionRequest) -> bool:
    """True if the prompt ends with the beginning of a new answer; False if the last message is to be continued."""
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    return not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt


def _require_message(message: dict[str, Any], where: str) -> None:
    """Raise `InvalidRequest` unless this is a valid message. Its content may be null, as in vLLM."""
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise InvalidRequest(f"{where}.role is required, and a string", param=f"{where}.role")
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        for position, part in enumerate(content):
            _text_of_part(part, f"{where}.content[{position}]")
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest(f"{where}.content must be a string or an array of parts", param=f"{where}.content")
    if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise InvalidRequest(f"{where}.tool_calls must be an array of objects", param=f"{where}.tool_calls")


def _plain_message(message: dict[str, Any], forms: _ContentForms) -> dict[str, Any]:
    """The message as this template expects it: content in a form that it accepts, arguments of tool calls as objects,
    and an assistant's reasoning under both names that templates use."""
    plain, role, content = dict(message), message["role"], message.get("content")
    if not plain.get("tool_calls"):
        plain.pop("tool_calls", None)
    else:
        plain["tool_calls"] = [_plain_tool_call(call) for call in plain["tool_calls"]]
    texts = [_text_of_part(part, "") for part in content] if isinstance(content, list) else content
    plain["content"] = forms.content(role, texts)
    thought = plain.get("reasoning") or plain.get("reasoning_content")
    if thought is not None:
        plain["reasoning"] = plain["reasoning_content"] = thought
    return plain


def _map_developer_role(messages: list[dict[str, Any]], forms: _ContentForms) -> list[dict[str, Any]]:
    """Replace the role `developer` by `system` for templates without it: such messages are merged into the first one,
    since many templates accept no other (vLLM does the same)."""
    if forms.developer or not any(message["role"] == "developer" for message in messages):
        return messages
    of_system = [message for message in messages if message["role"] in ("developer", "system")]
    if len(of_system) == 1 and messages[0] is of_system[0]:
        return [{**of_system[0], "role": "system"}, *messages[1:]]
    others = [message for message in messages if message["role"] not in ("developer", "system")]
    texts = [text for message in of_system if (text := _text_of(message["content"]))]
    merged = forms.content("system", _BETWEEN_SYSTEM_MESSAGES.join(texts))
    return [{"role": "system", "content": merged}, *others]


def _text_of(content: Any) -> str:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


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


@dataclass(frozen=True)
class _ContentForms:
    """The forms of messages that one chat template accepts. `parts`: roles whose content may be an array of parts.
    `only_parts`: roles whose content must be an array of parts. `developer`: True if the template has the role
    "developer"."""

    parts: frozenset[str]
    only_parts: frozenset[str]
    developer: bool

    def content(self, role: str, texts: list[str] | str | None) -> _Content:
        """The content of a message in a form that the template accepts. `texts`: the content, which was null, a string,
        or the texts of parts. As in vLLM, null becomes an empty text, and the result of a tool is always one string."""
        if role in self.only_parts or (isinstance(texts, list) and role in self.parts):
            return [_text_part(text) for text in ([texts] if isinstance(texts, str) else texts or [])]
        return _PART_SEPARATOR.join(texts) if isinstance(texts, list) else texts or ""


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _content_forms(tokenizer: Any, tools: Any) -> _ContentForms:
    """The forms of the template that this tokenizer uses with these tools. Raises the tokenizer's error if it has no
    template for these tools."""
    return _forms_of(tokenizer, tokenizer.get_chat_template(None, tools=tools))


@lru_cache(maxsize=16)
def _forms_of(tokenizer: Any, template: str) -> _ContentForms:
    def render(messages: list[_Message]) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
        except Exception:  # noqa: BLE001 - templates are programs: any error means that these messages are not accepted
            return ""

    users = _accepted_contents(render, lambda content: [{"role": "user", "content": content}])
    user = {"role": "user", "content": [_text_part("a")] if users == (False, True) else "a"}
    accepted = {
        "user": users,
        "system": _accepted_contents(render, lambda content: [{"role": "system", "content": content}, user]),
        "assistant": _accepted_contents(
            render, lambda content: [user, {"role": "assistant", "content": content}, user]
        ),
    }
    return _ContentForms(
        parts=frozenset(role for role, (_, parts) in accepted.items() if parts),
        only_parts=frozenset(role for role, (text, parts) in accepted.items() if parts and not text),
        developer='"developer"' in template or "'developer'" in template,
    )


def _accepted_contents(
    render: Callable[[list[_Message]], str], in_conversation: Callable[[_Content], list[_Message]]
) -> tuple[bool, bool]:
    """Returns two booleans. The first: the template accepts a string. The second: it accepts an array of parts, that
    is, it renders the texts of two parts one after the other, and not the array as a literal."""
    text = render(in_conversation([_text_part(_FIRST), _text_part(_SECOND)]))
    begin, end = text.find(_FIRST), text.find(_SECOND)
    shown = text[max(0, begin - 32) : end]
    return _FIRST in render(
        in_conversation(_FIRST)
    ), 0 <= begin < end and "'text'" not in shown and '"text"' not in shown
