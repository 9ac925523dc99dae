"""A request of another API, translated, and the reading of such requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from kvferry.api.decoding import decode_body, explain, read_fields
from kvferry.api.fields import printable
from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.dialects import AnswerTranslator

CHAT_PATH, TOKENIZE_PATH = "/v1/chat/completions", "/tokenize"

Kind = TypeVar("Kind", bound=msgspec.Struct)


class TranslatedRequest(msgspec.Struct, frozen=True):
    """A request to `path` instead of the client's. `session`: the name of its conversation, if the client gave one."""

    path: str
    body: bytes
    translation: AnswerTranslator
    session: str | None = None


class PassedFields(msgspec.Struct, kw_only=True):
    """Fields of chat requests that these APIs do not have, and that are passed on as they are: vLLM's and kvferry's
    own, and OpenAI's sampling fields."""

    seed: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    stop_token_ids: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    include_stop_str_in_output: Any = None
    stream_interval: Any = None
    skip_special_tokens: Any = None
    structured_outputs: Any = None
    thinking_token_budget: Any = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Any = None
    cache_salt: Any = None
    priority: Any = None
    request_id: Any = None
    timeout: Any = None
    kv_transfer_params: Any = None
    prefix_prompt_ids: Any = None
    kvcache_store_keys: Any = None
    kvcache_load_keys: Any = None
    kvcache_ttl_s: Any = None
    kvcache_wait_s: Any = None

    def passed(self) -> dict[str, Any]:
        """The fields that the client set."""
        values = ((name, getattr(self, name)) for name in PassedFields.__struct_fields__)
        return {name: value for name, value in values if value is not None}


def read_request(raw: bytes, kind: type[Kind], harmless: Collection[str], reasons: Mapping[str, str]) -> Kind:
    """Decode a request. Raises `InvalidRequest`, also for each field that is neither one of `kind` nor `harmless`, with
    the reason for it if there is one. Null requests nothing."""
    decoded = decode_body(raw, kind, {*harmless, *reasons})
    for name in (*decoded.ignored, *decoded.unsupported):
        if name not in harmless and bytes(read_fields(raw)[name]) != b"null":
            raise InvalidRequest(
                f"{printable(name)}: {reasons.get(name, 'not supported by this server')}", param=printable(name)
            )
    return decoded.body


def convert(value: Any, kind: type[Kind], where: str) -> Kind:
    """A part of a request as a struct. Raises `InvalidRequest` that names the field. `where`: the name of `value`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem = explain(str(error))
        name = f"{where}.{problem.param}" if problem.param else where
        detail = problem.message.removeprefix(problem.param or "the body")
        raise InvalidRequest(f"{name}{detail}", param=name) from error


def convert_tagged(value: Any, kinds: Mapping[str, type[Kind]], where: str, noun: str) -> Kind:
    """A part of a request as the struct that its `type` names. Raises `InvalidRequest`."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    name = value.get("type")
    if not isinstance(name, str) or name not in kinds:
        raise InvalidRequest(
            f"{where}: {noun} of type {str(name)[:60]!r} are not supported, only {', '.join(kinds)}",
            param=f"{where}.type",
        )
    return convert(value, kinds[name], where)


def text_part(text: str) -> dict[str, Any]:
    """A chat message's part of text."""
    return {"type": "text", "text": text}


def content_of(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A chat message's content: a single text as a string."""
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in an assistant's message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def without_none(**values: Any) -> dict[str, Any]:
    """The values that are set."""
    return {name: value for name, value in values.items() if value is not None}
