"""Whether one request is worth a hand-off.

If only little of a prompt is left to compute, it is faster to compute it on the decode instance than to hand it over;
the same holds if the prefill instances are too busy. A prefill on a decode instance also costs the others' time: every
answer there waits meanwhile. Where the fleet has targets, a prompt that would be late from P goes there too if it is in
time then, and none does by which answers there are expected to miss theirs. The other way round, a prefill instance
answers where no decode instance is expected to keep the targets, if it is expected to.
"""

from __future__ import annotations

import math
from typing import Any

from kvferry.router.choice.cost import Estimates
from kvferry.router.choice.policies.base import PromptTraits
from kvferry.router.choice.prefix_index import PrefixIndex
from kvferry.router.instances.load import Candidates, Target
from kvferry.router.instances.shared_plan import SharedFleetPlan

MIN_HAND_OFFS = 32
"""Measured before the threshold is believed; until then everything is handed off."""


def answers_missed(itl_s: float, step_s: float, answer_tokens: float, num_answers: float, stall_s: float) -> float:
    """How many of the answers on an instance are expected to miss a target between tokens because of a stall, if a
    token takes `step_s` there and lengths of answers, `answer_tokens` in the mean, are distributed as the sum of two
    exponential ones: about `2 · r²` of them are shorter than `r` times the mean, if `r` is small. Infinite if a step
    alone takes longer than the target."""
    slack_s = (itl_s - step_s) * answer_tokens
    return 2 * num_answers * (stall_s / slack_s) ** 2 if slack_s > 0 else math.inf


def keeps_itl(itl_s: float, step_s: float, answer_tokens: float, num_answers: float, stall_s: float) -> bool:
    """Whether fewer than one of the answers on an instance are expected to miss a target because of a stall."""
    return answers_missed(itl_s, step_s, answer_tokens, num_answers, stall_s) < 1.0


class Threshold:
    """Tunes itself, unless `fixed` gives the number of uncached tokens from which a prompt is handed off (0: always),
    or the controller of the fleet does."""

    def __init__(
        self,
        estimates: Estimates,
        index: PrefixIndex,
        fixed: int | None = None,
        directions: SharedFleetPlan | None = None,
    ) -> None:
        self._estimates, self._index, self._given = estimates, index, fixed
        self._directions = directions or SharedFleetPlan()

    @property
    def _fixed(self) -> int | None:
        return self._given if self._given is not None else self._directions.disaggregate_from

    @property
    def tokens(self) -> float:
        """The number of uncached tokens below which an idle decode instance computes the prompt itself."""
        if self._fixed is not None:
            return self._fixed
        estimates = self._estimates
        if estimates.hand_off.num_measured < MIN_HAND_OFFS:
            return 0.0
        # Of which n is n · token_s (its own wait) + n · token_s (another's) more than n · token_s and a hand-off?
        margin = estimates.any_prefill.slope - estimates.hand_off.slope
        return estimates.hand_off.base / margin if margin > 0 else float("inf")

    @property
    def active(self) -> bool:
        """Whether any request is served by one instance yet."""
        fixed = self._fixed
        return self._estimates.hand_off.num_measured >= MIN_HAND_OFFS if fixed is None else fixed != 0

    def keeps_aggregated(self, asked: PromptTraits, prefill: Target, decode: Target) -> str | None:
        """Why `decode` should do both phases, `short_prompt` or `prefill_busy`; None: hand off from `prefill`."""
        cached = self._index.match(asked.prefix)
        left = max(0, asked.num_tokens - cached.tokens(decode))
        if self._fixed is not None:
            return "short_prompt" if left < self._fixed else None
        if self._estimates.hand_off.num_measured < MIN_HAND_OFFS:
            return None
        estimates, load = self._estimates, decode.load
        first_s = estimates.prefill_s(decode.name, load.prefill_tokens + left)
        alone = first_s + estimates.token_s(decode.name) * left * (1 + load.num_decodes)
        at_prefill = max(0, asked.num_tokens - cached.tokens(prefill))
        apart = estimates.prefill_s(prefill.name, at_prefill) + estimates.hand_off.at(left)
        queued = apart + estimates.token_s(prefill.name) * prefill.load.prefill_tokens
        would_miss = False
        if (targets := self._directions.targets_s) is not None:
            ttft_s, itl_s = targets
            if not self._keeps_itl(decode, left, itl_s):
                return None
            would_miss = first_s <= ttft_s < queued
        if alone < apart:
            return "short_prompt"
        return "prefill_busy" if would_miss or alone < queued else None

    def decode_is_busy(self, asked: PromptTraits, prefill: Target, decodes: Candidates[Any], places: int) -> bool:
        """Whether none of these decode instances is expected to keep the targets with one more answer, whose prompt
        `prefill` computes: its first token would wait for one of the `places` that each has, or for memory, or its
        tokens would be slow."""
        targets = self._directions.targets_s
        if targets is None or self._fixed is not None:
            return False
        estimates, fewest = self._estimates, float(decodes.num_decodes.min())
        if fewest >= places or estimates.decode.at(fewest + 1) > targets[1]:
            return True
        left = max(0, asked.num_tokens - self._index.match(asked.prefix).tokens(prefill))
        first_s = estimates.prefill_s(prefill.name, prefill.load.prefill_tokens + left) + estimates.hand_off.at(left)
        return first_s > targets[0]

    def keeps_targets(self, asked: PromptTraits, prefill: Target) -> bool:
        """Whether a prefill instance is expected to keep both targets if it answers itself, and those of its answers.
        Only to be asked where there are targets."""
        left = max(0, asked.num_tokens - self._index.match(asked.prefix).tokens(prefill))
        first_s = self._estimates.prefill_s(prefill.name, prefill.load.prefill_tokens + left)
        targets = self._directions.targets_s
        return targets is not None and first_s <= targets[0] and self._keeps_itl(prefill, left, targets[1])

    def _keeps_itl(self, target: Target, left: float, itl_s: float) -> bool:
        """Whether an instance that computes a prompt of which it has all but `left` tokens, and those that wait there,
        keeps this target for the answers beside it and for its own."""
        estimates, load = self._estimates, target.load
        stall_s = estimates.token_s(target.name) * (load.prefill_tokens + left)
        step_s = estimates.decode.at(load.num_decodes + 1)
        return keeps_itl(itl_s, step_s, estimates.answer_tokens, load.num_decodes, stall_s)
