"""Speculative decoding by prompt lookup: the tokens that followed the same tokens earlier in a sequence are its draft.

A step computes a sequence's last token and its draft. At each position, the sampler samples the same token as without a
draft, until a token differs from the draft. So the answer is the same, and only the number of steps is smaller. This
needs no second model, and nothing from the instance that computed the prompt.
"""

from __future__ import annotations

from collections import abc
from typing import Annotated, Any, Literal

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.settings.options import read_options

_FLAG = "--speculative-config"


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `--speculative-config`, with vLLM's names. `prompt_lookup_min`, `prompt_lookup_max`: minimum
    number of tokens that must be equal, and maximum number that are compared."""

    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=64)]
    method: Literal["ngram"] = "ngram"
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1, le=32)] = 2
    prompt_lookup_max: Annotated[int, msgspec.Meta(ge=1, le=32)] = 5

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """Raises `ConfigError`."""
        try:
            content = msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{_FLAG} is no JSON object: {error}") from error
        method = content.get("method", "ngram")
        if method != "ngram":
            raise ConfigError(f'{_FLAG}.method: kvferry\'s engine drafts by prompt lookup ("ngram"), not by {method!r}')
        config = read_options(cls, content, _FLAG)
        if config.prompt_lookup_min > config.prompt_lookup_max:
            raise ConfigError(f"{_FLAG}: prompt_lookup_min is larger than prompt_lookup_max")
        return config


class PromptLookup:
    """An index of the tokens of one sequence, to which tokens are only added. Takes about 100 bytes per token."""

    max_candidates = 8
    """Maximum number of earlier places that are compared, the latest first."""

    __slots__ = ("_latest", "_max", "_min", "_num_indexed", "_previous")

    def __init__(self, config: SpeculativeConfig) -> None:
        self._min, self._max = config.prompt_lookup_min, config.prompt_lookup_max
        self._latest: dict[tuple[int, ...], int] = {}
        """By the tokens that are compared first: the position after their latest occurrence."""
        self._previous: list[int] = []
        """For each such position: the position after the previous occurrence of the same tokens; -1: there is none."""
        self._num_indexed = 0

    def draft(self, tokens: abc.Sequence[int], num_tokens: int) -> list[int]:
        """The tokens that followed the latest earlier occurrence of the last tokens, at most `num_tokens`. Empty: there
        is no earlier occurrence. This continues a text that repeats itself."""
        self._index(tokens)
        begin = self._longest_match(tokens)
        if begin < 0:
            return []
        period = len(tokens) - begin
        return [tokens[begin + offset % period] for offset in range(num_tokens)]

    def _index(self, tokens: abc.Sequence[int]) -> None:
        for end in range(self._num_indexed, len(tokens)):  # the text after `tokens[:end]` is not empty
            if end < self._min:
                self._previous.append(-1)
                continue
            key = tuple(tokens[end - self._min : end])
            self._previous.append(self._latest.get(key, -1))
            self._latest[key] = end
        self._num_indexed = len(tokens)

    def _longest_match(self, tokens: abc.Sequence[int]) -> int:
        begin = self._latest.get(tuple(tokens[-self._min :]), -1) if len(tokens) > self._min else -1
        best, best_length = begin, 0
        for _ in range(self.max_candidates):
            if begin < 0 or best_length >= self._max:
                break
            length = self._min
            while length < min(self._max, begin) and tokens[begin - length - 1] == tokens[-length - 1]:
                length += 1
            if length > best_length:
                best, best_length = begin, length
            begin = self._previous[begin]
        return best


class StepCost:
    """The cost of one more token in a step of decoding sequences, from measured steps: a line through tokens and
    seconds, in which later steps weigh more."""

    memory = 0.98
    """Weight of a step in comparison with the next one."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record a step. A step that took no time, as in simulations, is ignored."""
        if seconds <= 0.0:
            return
        for name, value in (
            ("_weight", 1.0),
            ("_tokens", num_tokens),
            ("_seconds", seconds),
            ("_squares", num_tokens * num_tokens),
            ("_products", num_tokens * seconds),
        ):
            setattr(self, name, self.memory * getattr(self, name) + value)

    def share(self, num_sequences: int) -> float:
        """The time of one more token, divided by the time per token of a step with this number of sequences; from 0 to
        1. A draft is worthwhile if its tokens are accepted with a higher probability. 0: not known yet."""
        if not self._weight:
            return 0.0
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean_tokens * mean_tokens
        if variance < 1e-9:
            return 0.0
        slope = (self._products / self._weight - mean_tokens * mean_seconds) / variance
        step_s = mean_seconds + slope * (num_sequences - mean_tokens)
        return min(1.0, max(0.0, slope * num_sequences / step_s)) if step_s > 0.0 else 1.0


class DraftState:
    """Drafts of one sequence: its index, and the share of its drafted tokens that were accepted."""

    new_share = 0.2
    """Weight of one token in the share of accepted ones."""
    recovery = 0.01
    """For each token for which nothing was drafted because of a low share, the share grows by this: later text may be
    easier to draft."""

    __slots__ = ("accepted_share", "lookup")

    def __init__(self, config: SpeculativeConfig) -> None:
        self.lookup = PromptLookup(config)
        self.accepted_share = 0.7

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Record a verified draft."""
        for _ in range(num_accepted):
            self.accepted_share += self.new_share * (1.0 - self.accepted_share)
        if num_accepted < num_drafted:
            self.accepted_share -= self.new_share * self.accepted_share

    def num_tokens(self, max_tokens: int, cost_share: float) -> int:
        """Number of tokens to draft. A token can be accepted only if all drafted tokens before it are."""
        number, probability = 0, self.accepted_share
        while number < max_tokens and probability > cost_share:
            number, probability = number + 1, probability * self.accepted_share
        if number == 0:
            self.accepted_share += self.recovery * (1.0 - self.accepted_share)
        return number
