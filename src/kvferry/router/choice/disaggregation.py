"""Decides whether a request is worth a hand-off.

A decode instance computes a prompt itself if little of it is uncached, or if the prefill instances are too busy. Such a
prefill delays every answer that runs on the decode instance. Where the fleet has latency targets, D also computes a
prompt that P would finish too late, unless D's running answers would then miss their target. Conversely, a prefill
instance answers if it is expected to meet the targets and no decode instance is.
"""

from __future__ import annotations

import math
from typing import Any

from kvferry.router.choice.cost import Estimates
from kvferry.router.choice.policies.base import PromptTraits
from kvferry.router.choice.prefix_index import PrefixIndex
from kvferry.router.instances.load import Candidates, Target
from kvferry.router.instances.shared_plan import SharedFleetPlan


def answers_missed(itl_s: float, step_s: float, answer_tokens: float, num_answers: float, stall_s: float) -> float:
    """Expected number of answers on an instance that miss the ITL target because of a stall.

    A token takes `step_s` seconds. Lengths of answers, `answer_tokens` in the mean, are assumed to be the sum of two
    exponential variables: a share of about `2 · r²` is shorter than `r` times the mean, for small `r`. Infinite if a
    step alone takes longer than the target.
    """
    slack_s = (itl_s - step_s) * answer_tokens
    return 2 * num_answers * (stall_s / slack_s) ** 2 if slack_s > 0 else math.inf


def meets_itl(itl_s: float, step_s: float, answer_tokens: float, num_answers: float, stall_s: float) -> bool:
    """True if fewer than one answer on an instance is expected to miss its target because of a stall."""
    return answers_missed(itl_s, step_s, answer_tokens, num_answers, stall_s) < 1.0


class Threshold:
    """The number of uncached tokens from which a prompt is handed off. It is adjusted to measurements, unless `fixed`
    (0: always hand off) or the fleet's controller sets it."""

    min_hand_offs = 32
    """Number of measured hand-offs from which the threshold applies. Before that, every request is handed off."""

    def __init__(
        self,
        estimates: Estimates,
        index: PrefixIndex,
        fixed: int | None = None,
        fleet_plan: SharedFleetPlan | None = None,
    ) -> None:
        self._estimates, self._index, self._configured = estimates, index, fixed
        self._fleet_plan = fleet_plan or SharedFleetPlan()

    @property
    def _fixed(self) -> int | None:
        return self._configured if self._configured is not None else self._fleet_plan.disaggregate_from

    @property
    def tokens(self) -> float:
        """The number of uncached tokens below which an idle decode instance computes the prompt itself."""
        if self._fixed is not None:
            return self._fixed
        estimates = self._estimates
        if estimates.hand_off.num_measured < self.min_hand_offs:
            return 0.0
        # Solve for n: 2n · token_s (computed on D: its own wait and another's) > n · token_s + hand-off.
        margin = estimates.any_prefill.slope - estimates.hand_off.slope
        return estimates.hand_off.base / margin if margin > 0 else float("inf")

    @property
    def active(self) -> bool:
        """True if a request may be served by one instance."""
        fixed = self._fixed
        return self._estimates.hand_off.num_measured >= self.min_hand_offs if fixed is None else fixed != 0

    def keeps_aggregated(self, traits: PromptTraits, prefill: Target, decode: Target) -> str | None:
        """The reason why `decode` should do both phases, `short_prompt` or `prefill_busy`; None: hand off from
        `prefill`."""
        cached = self._index.match(traits.prefix)
        left = max(0, traits.num_tokens - cached.tokens(decode))
        if self._fixed is not None:
            return "short_prompt" if left < self._fixed else None
        if self._estimates.hand_off.num_measured < self.min_hand_offs:
            return None
        estimates, load = self._estimates, decode.load
        expected_ttft_s = estimates.prefill_s(decode.name, load.prefill_tokens + left)
        alone = expected_ttft_s + estimates.token_s(decode.name) * left * (1 + load.num_decodes)
        at_prefill = max(0, traits.num_tokens - cached.tokens(prefill))
        disaggregated_s = estimates.prefill_s(prefill.name, at_prefill) + estimates.hand_off.at(left)
        queued = disaggregated_s + estimates.token_s(prefill.name) * prefill.load.prefill_tokens
        would_miss = False
        if (targets := self._fleet_plan.targets_s) is not None:
            ttft_s, itl_s = targets
            if not self._meets_itl(decode, left, itl_s):
                return None
            would_miss = expected_ttft_s <= ttft_s < queued
        if alone < disaggregated_s:
            return "short_prompt"
        return "prefill_busy" if would_miss or alone < queued else None

    def decode_is_busy(
        self, traits: PromptTraits, prefill: Target, decodes: Candidates[Any], max_num_seqs: int
    ) -> bool:
        """True if none of these decode instances is expected to meet the targets with another answer, whose prompt
        `prefill` computes. Its first token would wait for one of the `max_num_seqs` places, or its tokens would be
        slow."""
        targets = self._fleet_plan.targets_s
        if targets is None or self._fixed is not None:
            return False
        estimates, fewest = self._estimates, float(decodes.num_decodes.min())
        if fewest >= max_num_seqs or estimates.decode.at(fewest + 1) > targets[1]:
            return True
        left = max(0, traits.num_tokens - self._index.match(traits.prefix).tokens(prefill))
        expected_ttft_s = estimates.prefill_s(prefill.name, prefill.load.prefill_tokens + left) + estimates.hand_off.at(
            left
        )
        return expected_ttft_s > targets[0]

    def keeps_targets(self, traits: PromptTraits, prefill: Target) -> bool:
        """True if a prefill instance that answers itself is expected to meet both targets, for its other answers too.
        False where the fleet has no targets."""
        left = max(0, traits.num_tokens - self._index.match(traits.prefix).tokens(prefill))
        expected_ttft_s = self._estimates.prefill_s(prefill.name, prefill.load.prefill_tokens + left)
        targets = self._fleet_plan.targets_s
        return targets is not None and expected_ttft_s <= targets[0] and self._meets_itl(prefill, left, targets[1])

    def _meets_itl(self, target: Target, left: float, itl_s: float) -> bool:
        """True if an instance that computes its queue and `left` more tokens meets this target for all its answers."""
        estimates, load = self._estimates, target.load
        stall_s = estimates.token_s(target.name) * (load.prefill_tokens + left)
        step_s = estimates.decode.at(load.num_decodes + 1)
        return meets_itl(itl_s, step_s, estimates.answer_tokens, load.num_decodes, stall_s)
