"""The requests, as msgspec structs: OpenAI's fields, vLLM's extras and kvferry's own.

A field of the wrong type is an error. None: the client did not set the field. Fields that only other servers have:
`other_fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from kvferry.api.structured_outputs import ResponseFormat, StructuredOutputsParams
from kvferry.api.tools import ToolChoiceObject, ToolUse, tool_use_of
from kvferry.core.sampling import MAX_LOGPROB_TOKENS

Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Integers of 64 bits: Python's are unlimited, but the arithmetic that uses them is not."""

Name = Annotated[str, msgspec.Meta(max_length=1024)]
"""Name of a model, a user, a tenant, or a request."""

StopString = Annotated[str, msgspec.Meta(max_length=256)]
"""A stop string, for which each chunk of an answer is searched."""

BadWord = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
"""A word that must not occur in an answer."""

Seconds = Annotated[float, msgspec.Meta(gt=0, le=7 * 24 * 3600)]

MESSAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "null"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        },
        "tool_calls": {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
    },
}
"""A message, for the OpenAPI document. Not decoded as a struct, because templates may use any other field in it."""

MAX_FIELD_BYTES = {
    **dict.fromkeys(("logit_bias", "stop", "stop_token_ids", "stream_options", "tool_choice"), 128 * 1024),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "documents", "tools"), 2 * 1024**2),
    **dict.fromkeys(("response_format", "structured_outputs"), 512 * 1024),
    "kv_transfer_params": 8 * 1024**2,
}
"""Maximum length of the JSON texts of fields; others are limited by the body's limit only."""


_Key = Annotated[str, msgspec.Meta(min_length=1)]

KeyList = list[_Key | list[_Key | None] | None]
"""KV keys, for one prompt or for each. `core.messages.kv_keys` checks that they match the prompts, and their length."""

TokenList = list[Integer | list[Integer] | None]
"""Token ids of a prompt's prefix, for one prompt or for each."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class KeyFields(msgspec.Struct, kw_only=True):
    """The fields of KV keys."""

    prefix_prompt_ids: TokenList | None = None
    kvcache_store_keys: KeyList | None = None
    kvcache_load_keys: KeyList | None = None
    kvcache_ttl_s: float | None = None
    kvcache_wait_s: float | None = None


class GenerationRequest(KeyFields, kw_only=True):
    """The common fields of completions and chat completions.

    `spaces_between_special_tokens` is read and has no effect: fast tokenizers put no spaces there.
    """

    model: Name | None = None
    n: Integer | None = None
    max_tokens: Integer | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], msgspec.Meta(max_length=32)] | None = None
    seed: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], msgspec.Meta(max_length=1024)] | None = None
    user: Name | None = None

    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Integer | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: Annotated[list[Integer], msgspec.Meta(min_length=1, max_length=16384)] | None = None
    logprob_token_ids: Annotated[list[Integer], msgspec.Meta(max_length=MAX_LOGPROB_TOKENS)] | None = None
    """Tokens that are listed at each position, instead of the most likely ones."""

    bad_words: Annotated[list[BadWord], msgspec.Meta(max_length=256)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    stop_token_ids: Annotated[list[Integer], msgspec.Meta(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: Integer | None = None
    truncate_prompt_tokens: Integer | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream_interval: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: Annotated[Name, msgspec.Meta(min_length=1)] | None = None
    priority: Integer | None = None
    request_id: Name | None = None
    kv_transfer_params: dict[str, Any] | None = None

    timeout: Seconds | None = None
    """Seconds after which the request ends with 400 and the code `deadline_exceeded`."""

    return_timeline: bool | None = None
    """Send the timestamps of the request's phases with the end of the answer."""


class CompletionRequest(GenerationRequest, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | Integer | list[Integer]]
    echo: bool | None = None
    logprobs: Integer | None = None
    best_of: Integer | None = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(extra_json_schema={"minItems": 1, "items": MESSAGE_SCHEMA})]
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    max_completion_tokens: Integer | None = None
    echo: bool | None = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, msgspec.Meta(ge=-1, le=2**31)] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Name | None = None
    return_prompt_text: bool | None = None

    def tool_use(self) -> ToolUse:
        """The calls that the request permits. Raises `InvalidRequest`."""
        return tool_use_of(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)


class TokenizeCompletionRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize` of a text."""

    prompt: str
    model: Name | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatCompletionRequest, kw_only=True):
    """`POST /tokenize` of messages: a chat request of which only the fields that make the prompt count."""

    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[Integer]
    model: Name | None = None


class KeptRequest(msgspec.Struct, kw_only=True):
    """`POST /kvferry/kept`: the KV of this prompt that is kept for reuse. `pin` true: pin it; false: unpin it."""

    tokens: list[Integer]
    cache_salt: Annotated[Name, msgspec.Meta(min_length=1)] | None = None
    pin: bool | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """`POST /abort_requests`. Without ids, all running requests are aborted."""

    request_ids: Annotated[list[Name], msgspec.Meta(max_length=4096)] | None = None


class ReleaseRequest(msgspec.Struct, kw_only=True):
    """`POST /kvferry/release`: release a hand-off that no instance will fetch."""

    transfer_id: Annotated[Name, msgspec.Meta(min_length=1)]
