"""Requests as Dynamo's workers take them (its `PreprocessedRequest`), and what they answer (`LLMEngineOutput`).

As of Dynamo 1.7.0.dev20261026. Whatever a worker sends is validated before it is used.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.hand_off import TokenLogprobs
from kvferry.core.request import FinishReason, Request, are_tokens

_MOST_SEED = 2**63


class _Cached(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Cached | None = None


class _Top(msgspec.Struct):
    token_id: int
    logprob: float
    rank: int = 0


class WorkerOutput(msgspec.Struct):
    """An output of a worker: the next tokens of an answer."""

    token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    log_probs: list[float] | None = None
    top_logprobs: list[list[_Top]] | None = None
    disaggregated_params: Any = None
    completion_usage: _Usage | None = None

    @property
    def finished(self) -> FinishReason | None:
        """The finish reason in kvferry's words; None: there is more to come."""
        match self.finish_reason:
            case None:
                return None
            case "eos" | "stop":
                return "stop"
            case "length":
                return "length"
            case "cancelled":
                return "abort"
            case _:
                return "error"

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompt that were cached; None: it does not say."""
        details = self.completion_usage.prompt_tokens_details if self.completion_usage else None
        return None if details is None else max(0, details.cached_tokens or 0)

    def logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of its tokens; empty without any."""
        if not self.log_probs:
            return []
        tops = self.top_logprobs or [[] for _ in self.log_probs]
        results = list[TokenLogprobs]()
        for token_id, logprob, top in zip(self.token_ids, self.log_probs, tops, strict=True):
            rank = next((candidate.rank for candidate in top if candidate.token_id == token_id), 0)
            # vLLM lists the token that was drawn beside the most likely ones.
            likely = {
                candidate.token_id: candidate.logprob
                for candidate in top
                if candidate.token_id != token_id or candidate.rank <= len(top) - 1
            }
            results.append(TokenLogprobs(token_id, logprob, max(0, rank), likely or {token_id: logprob}))
        return results


def read_output(data: Any, vocab_size: int) -> WorkerOutput:
    """An output. Raises `msgspec.ValidationError`."""
    output = msgspec.convert(data, WorkerOutput)
    if not are_tokens(output.token_ids, vocab_size):
        raise msgspec.ValidationError(f"token ids that the model does not have: {output.token_ids[:8]}")
    for numbers in (output.log_probs, output.top_logprobs):
        if numbers and len(numbers) != len(output.token_ids):
            raise msgspec.ValidationError("log-probabilities of another number of tokens")
    return output


def worker_request(request: Request, model: str, eos_token_ids: Collection[int]) -> dict[str, Any]:
    """The request for a worker: token ids in, token ids out. Stop strings are looked for here, and not by the worker.
    Raises `InvalidRequest` for what Dynamo's workers have no field for."""
    sampling, answer = request.sampling, request.answer_token_ids
    if sampling.prompt_logprobs is not None:
        raise InvalidRequest("Dynamo's workers return no log-probabilities of prompts", param="prompt_logprobs")
    if sampling.logit_bias:
        raise InvalidRequest("Dynamo's workers take no logit_bias", param="logit_bias")
    if request.transfer_params is not None:
        raise InvalidRequest("Dynamo's workers keep no KV under keys", param="kv_transfer_params")
    options: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if sampling.temperature and sampling.seed is not None and not answer:
        options["seed"] = sampling.seed % _MOST_SEED
    stop = {
        "max_tokens": sampling.max_tokens - len(answer),
        "min_tokens": max(0, sampling.min_tokens - len(answer)),
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids_hidden": list(sampling.stop_token_ids),
    }
    return {
        "model": model,
        "token_ids": [*request.prompt_token_ids, *answer],
        "stop_conditions": stop,
        "sampling_options": options,
        "output_options": {} if sampling.logprobs is None else {"logprobs": sampling.logprobs},
        "eos_token_ids": [] if sampling.ignore_eos else sorted(eos_token_ids),
        "annotations": [],
        "routing": {"priority": -request.priority},
        "extra_args": {"nvext": {"cache_salt": request.cache_salt}} if request.cache_salt else None,
    }
