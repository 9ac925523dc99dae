"""The requests, as msgspec structs: OpenAI's fields, vLLM's extras and kvferry's own.

Fields nobody knows are ignored, as clients send many; a field of the wrong type is an error (see `decoding`).
None means that the client was silent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from kvferry.engine.server.unsupported import UnsupportedFields

Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Python's integers have no end, the arithmetic behind them does."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(UnsupportedFields, kw_only=True):
    """What completions and chat completions have in common.

    `spaces_between_special_tokens` is read and has no effect: fast tokenizers put no spaces there.
    """

    model: str | None = None
    n: Integer | None = None
    max_tokens: Integer | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    user: str | None = None

    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Integer | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Integer] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: Integer | None = None
    truncate_prompt_tokens: Integer | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: Integer | None = None
    request_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    timeout: float | None = None
    """Seconds after which the request ends with 408."""

    return_timeline: bool | None = None
    """Send the stamps of the request's phases with the end of the answer."""


class CompletionRequest(GenerationRequest, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | Integer | list[Integer]]
    echo: bool | None = None
    logprobs: Integer | None = None
    best_of: Integer | None = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    max_completion_tokens: Integer | None = None
    echo: bool | None = None

    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class TokenizeKind(msgspec.Struct):
    """What tells the two kinds of `POST /tokenize` apart."""

    messages: Any = None


class TokenizeCompletionRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize` of a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatCompletionRequest, kw_only=True):
    """`POST /tokenize` of messages: a chat request of which only what makes the prompt counts."""

    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[Integer]
    model: str | None = None


class ReleaseRequest(msgspec.Struct, kw_only=True):
    """`POST /kvferry/release`: nobody will fetch this hand-off."""

    transfer_id: str
