"""The answers, as msgspec structs: OpenAI's fields, then vLLM's and kvferry's own, which are left out when not set."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Number of the prompt's tokens that did not have to be computed."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Number of the answer's tokens that were reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Numbers of prompt tokens and generated tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    """vLLM's form of a token's log-probability at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""One entry for each prompt token; the first has none."""


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of a completion, one entry a token in each list. `text_offset` counts characters."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of a chat answer, and the most likely ones at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a chat answer."""

    content: list[TokenLogprob]


class CompletionChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A completion, or a chunk's part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a function, and the JSON text of its arguments. In a chunk it may be the next chunk of them, without
    the name."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class MessageToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call. In a chunk it has its position in `index`, and may be the next chunk of its arguments, without id and
    type."""

    index: int | None = None
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer, or in a chunk its new part. `reasoning` and `reasoning_content` are the same text, by vLLM's name and
    by the name of older clients."""

    role: str | None = None
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One chat answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A chunk's part of a chat answer."""

    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ApiAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The common fields of all answers and chunks. `timeline`: timestamps of the request's phases, in seconds
    since the epoch; `timeline_ms`: the same in ms since the request's arrival."""

    id: str
    object: str
    created: int
    model: str
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: dict[str, Any] | None = None
    timeline: dict[str, float] | None = None
    timeline_ms: dict[str, float] | None = None


class Completion(ApiAnswer, kw_only=True):
    """A completion, or a chunk of one."""

    choices: list[CompletionChoice]


class ChatCompletion(ApiAnswer, kw_only=True):
    """A chat completion."""

    choices: list[ChatChoice]


class ChatCompletionChunk(ApiAnswer, kw_only=True):
    """A chunk of a chat completion."""

    choices: list[ChatChunkChoice]


class Model(msgspec.Struct, kw_only=True):
    """A served model name."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "kvferry"
    parent: str | None = None


class ModelList(msgspec.Struct, kw_only=True):
    """`GET /v1/models`."""

    data: list[Model]
    object: str = "list"


class Tokens(msgspec.Struct, kw_only=True):
    """`POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    prompt: str
