"""Builds the engine's `SamplingParams` from a request's fields: the client's value, else the model's, else OpenAI's
default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.api.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from kvferry.core import entropy
from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.hand_off import HandOff, Produce, parse_hand_off
from kvferry.core.messages.kv_keys import KEY_FIELDS, KVTransferParams, parse_transfer_params
from kvferry.core.sampling import MAX_LOGPROBS, SamplingParams

_MODEL_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PASSED_THROUGH = (
    *("presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "ignore_eos"),
    "include_stop_str_in_output",
)


def sampling_params(
    body: GenerationRequest, *, max_tokens: int, defaults: Mapping[str, Any], default_seed: int | None
) -> SamplingParams:
    """The validated parameters of the request's first choice. `defaults`: the model's own.

    Raises `InvalidRequest` that names the field.
    """
    values: dict[str, Any] = {name: getattr(body, name) for name in _PASSED_THROUGH}
    for name in _MODEL_DEFAULTED:
        given_value = getattr(body, name)
        values[name] = defaults.get(name) if given_value is None else given_value
    sampling = SamplingParams(
        **{name: value for name, value in values.items() if value is not None},
        max_tokens=max_tokens,
        stop=stop_strings(body),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(sorted(set(body.allowed_token_ids))),
        logprobs=num_logprobs(body),
        logprob_token_ids=tuple(dict.fromkeys(body.logprob_token_ids or ())),
        prompt_logprobs=_num_prompt_logprobs(body),
        seed=_seed(body, default_seed),
    )
    sampling.validate()
    return sampling


def stop_strings(body: GenerationRequest) -> tuple[str, ...]:
    """The request's stop strings, one or several."""
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def num_logprobs(body: GenerationRequest) -> int | None:
    """Number of most likely tokens to return at each position; None: no log-probabilities."""
    if isinstance(body, CompletionRequest):
        return body.logprobs
    assert isinstance(body, ChatCompletionRequest)
    if not body.logprobs:
        return None
    return body.top_logprobs or 0


def hand_off_of(body: GenerationRequest, request_id: str, num_prompts: int) -> HandOff:
    """The request's part in a hand-off. Raises `InvalidRequest` if one ticket would be used for several prompts."""
    hand_off = parse_hand_off(body.kv_transfer_params, request_id)
    if hand_off is not None and num_prompts > 1:
        raise InvalidRequest(
            f"a hand-off can have only one prompt, got {num_prompts}; send them one by one", param="kv_transfer_params"
        )
    return hand_off


def transfer_params_of(body: GenerationRequest, num_prompts: int) -> list[KVTransferParams | None]:
    """The keys of each prompt. Raises `InvalidRequest` that names the field."""
    fields = {field: getattr(body, field) for field in KEY_FIELDS}
    return parse_transfer_params(body.kv_transfer_params, fields, num_prompts=num_prompts, tenant=body.cache_salt or "")


def refused_hand_off(body: GenerationRequest) -> HandOff:
    """The hand-off of a refused request; None if it has none, or an invalid one."""
    try:
        return parse_hand_off(body.kv_transfer_params, "")
    except InvalidRequest:
        return None


def num_choices(body: GenerationRequest, hand_off: HandOff) -> int:
    """Choices for each prompt. A prefill for another instance makes one first token, whatever `n` is."""
    return 1 if isinstance(hand_off, Produce) else (1 if body.n is None else body.n)


def require_consistent(body: GenerationRequest) -> None:
    """Raise `InvalidRequest` if fields contradict each other, whatever the prompt is."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs is not available when stream is true", param="prompt_logprobs")
    if body.logprob_token_ids and num_logprobs(body) is None:
        raise InvalidRequest("logprob_token_ids is only allowed with logprobs", param="logprob_token_ids")
    if body.timeout is not None and body.timeout <= 0:
        raise InvalidRequest(f"timeout must be more than 0 seconds, got {body.timeout:g}", param="timeout")
    if body.cache_salt == "":
        raise InvalidRequest("cache_salt must not be empty", param="cache_salt")
    if isinstance(body, ChatCompletionRequest):
        _require_consistent_chat(body)
    elif isinstance(body, CompletionRequest):
        _require_consistent_completion(body)


def _require_consistent_chat(body: ChatCompletionRequest) -> None:
    if body.echo:
        raise InvalidRequest("echo is not supported in chat completions", param="echo")
    if body.top_logprobs is None:
        return
    if not body.logprobs:
        raise InvalidRequest("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {body.top_logprobs}", param="top_logprobs"
        )


def _require_consistent_completion(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of is not supported, unless it equals n", param="best_of")


def _num_prompt_logprobs(body: GenerationRequest) -> int | None:
    numbers = [body.prompt_logprobs]
    if isinstance(body, CompletionRequest) and body.echo:
        numbers.append(body.logprobs)
    return max((number for number in numbers if number is not None), default=None)


def _seed(body: GenerationRequest, default_seed: int | None) -> int:
    if body.seed is not None:
        return body.seed
    return entropy.token_bits(63) if default_seed is None else default_seed
