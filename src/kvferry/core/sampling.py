"""A request's sampling parameters. Bounds and defaults are the OpenAI API's and vLLM's."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from typing import ClassVar

import msgspec

from kvferry.core.errors import InvalidRequest
from kvferry.core.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
MIN_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI sends this instead."""

MAX_LOGPROB_TOKENS = 128
"""Number of tokens whose log-probabilities can be requested by their ids, as in vLLM."""

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings of a checkpoint's `generation_config.json` that apply to requests without their own."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one sequence, with the API's names. `temperature` 0 is greedy. `seed` is always set when
    the sequence runs."""

    min_penalty: ClassVar[float] = 1e-6
    """Lowest `repetition_penalty`; the highest is its inverse. Beyond them, float32 logits overflow and all become
    equal."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not occur in the answer."""
    structured_outputs: StructuredOutputs | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens that are listed at each position, instead of the most likely ones."""
    prompt_logprobs: int | None = None
    seed: int | None = None

    def validate(self) -> None:
        """Raise `InvalidRequest` with the first field that is out of range."""
        for field, value, low, high in self.ranges():
            if value is not None and not (low <= value <= high and value != math.inf):
                bound = f"between {low:g} and {high:g}" if math.isfinite(high) else f"at least {low:g}"
                raise InvalidRequest(f"{field} must be {bound}, got {value}", param=field)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be greater than 0, got 0", param="top_p")
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        for token, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise InvalidRequest(f"logit_bias of token {token} must be between -100 and 100", param="logit_bias")
        if any(not text for text in self.stop):
            raise InvalidRequest("stop strings must not be empty", param="stop")

    def ranges(self) -> list[tuple[str, float | None, float, float]]:
        """Name, value, and the lowest and highest accepted value of each field."""
        infinity = math.inf
        return [
            ("max_tokens", self.max_tokens, 1, infinity),
            ("min_tokens", self.min_tokens, 0, infinity),
            ("temperature", self.temperature, 0, 100),
            ("top_p", self.top_p, 0, 1),
            ("top_k", self.top_k, -1, infinity),
            ("min_p", self.min_p, 0, 1),
            ("repetition_penalty", self.repetition_penalty, self.min_penalty, 1 / self.min_penalty),
            ("presence_penalty", self.presence_penalty, -2, 2),
            ("frequency_penalty", self.frequency_penalty, -2, 2),
            ("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            ("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS),
            ("seed", self.seed, -(2**63), 2**64 - 1),
        ]


def banned_tokens(sampling: SamplingParams, eos_token_ids: Collection[int]) -> set[int]:
    """Tokens that are not drawn before `min_tokens`."""
    return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}


def sampling_digest(model: str, sampling: SamplingParams, eos_token_ids: Collection[int]) -> str:
    """32 hexadecimal digits for all that decides which token follows a prompt, besides the prompt and the seed: the
    model as it computes (`KVLayout.model_identity`), and the sampling parameters as the instance has resolved them."""
    greedy = sampling.temperature == 0
    settings = (
        (0.0, 1.0, 0, 0.0) if greedy else (sampling.temperature, sampling.top_p, max(sampling.top_k, 0), sampling.min_p)
    )
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    banned = sorted(banned_tokens(sampling, eos_token_ids)) if sampling.min_tokens > 0 else []
    facts = [model, [float(value) for value in settings + penalties], sorted(sampling.logit_bias.items()), banned]
    if sampling.allowed_token_ids is not None or sampling.bad_words:
        facts.append([sampling.allowed_token_ids, sampling.bad_words])
    if sampling.structured_outputs is not None:
        facts.append([sampling.structured_outputs.digest, sampling.ignore_eos])
    return hashlib.sha256(msgspec.msgpack.encode(facts)).hexdigest()[:32]


def uniform_draw(seed: int, position: int) -> float:
    """The random number in [0, 1) for the token at `position` (0: the prompt's first token).

    It depends on nothing but its arguments, so batching, preemption and hand-off never change it.
    """
    digest = hashlib.blake2b(
        position.to_bytes(8, "little"), key=(seed % 2**64).to_bytes(8, "little"), digest_size=8
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def child_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of `n`; choice 0 has the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(index.to_bytes(8, "little"), key=(seed % 2**64).to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
