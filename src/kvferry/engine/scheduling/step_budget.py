"""The number of tokens that a step may compute, so that the prompts in it do not delay running answers.

Owns the measured durations of steps. A step takes the time of its decoding sequences, which is estimated from steps
without prompts, and a time for each token of prompts, which is estimated from steps with prompts.
"""

from __future__ import annotations

_FIRST_TOKENS = 64
"""Prompt tokens in a step with decoding sequences, as long as no step with a prompt has been measured."""
_MARGIN = 0.8
"""Share of the target that a step may take by the estimate, because the durations of steps vary."""
_NEW_SHARE = 0.3
"""Weight of a measurement in the estimate where steps become faster. Where they become slower, it is 1."""


class StepBudget:
    """The token budget of an engine's steps. `max_tokens`: maximum tokens of any step; `target_s`: maximum seconds
    between two tokens of an answer; None: no limit."""

    min_measured = 8
    """Minimum prompt tokens of a step from which their time is estimated."""
    min_tokens = 16
    """Minimum prompt tokens of a step, even if the target is missed, so that prompts make progress."""

    def __init__(self, max_tokens: int, target_s: float | None) -> None:
        self._max_tokens, self._target_s = max_tokens, target_s
        self._decode_s = 0.0
        self._token_s: float | None = None

    def tokens(self, num_decoding: int) -> int:
        """The token budget of a step in which this number of sequences get their next token."""
        if self._target_s is None or not num_decoding:
            return self._max_tokens
        if self._token_s is None:
            num_prompt_tokens = _FIRST_TOKENS
        else:
            left_s = _MARGIN * self._target_s - self._decode_s
            num_prompt_tokens = max(self.min_tokens, int(min(left_s / self._token_s, self._max_tokens)))
        return min(self._max_tokens, num_decoding + num_prompt_tokens)

    def observe(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """Update the estimates from a step. A step that took no time, as in simulations that make several steps at
        once, is ignored."""
        if self._target_s is None or seconds <= 0.0:
            return
        if not num_prompt_tokens:
            self._decode_s = _smoothed(self._decode_s, seconds)
        elif num_prompt_tokens >= self.min_measured:
            token_s = max(seconds - (self._decode_s if num_decoding else 0.0), 1e-6) / num_prompt_tokens
            self._token_s = token_s if self._token_s is None else _smoothed(self._token_s, token_s)


def _smoothed(estimate: float, measured: float) -> float:
    return measured if measured > estimate else estimate + _NEW_SHARE * (measured - estimate)
