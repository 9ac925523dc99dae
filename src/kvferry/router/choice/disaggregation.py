"""Whether one request is worth a hand-off.

If only little of a prompt is left to compute, it is faster to compute it on the decode instance than to hand it over;
the same holds if the prefill instances are too busy. A prefill on a decode instance also costs the others' time: every
answer there waits meanwhile.
"""

from __future__ import annotations

from kvferry.router.choice.cost import Estimates
from kvferry.router.choice.policies.base import Asked
from kvferry.router.choice.prefix_index import PrefixIndex
from kvferry.router.instances.directions import Directions
from kvferry.router.instances.load import Target

FEWEST_HAND_OFFS = 32
"""Measured before the threshold is believed; until then everything is handed off."""


class Threshold:
    """Tunes itself, unless `fixed` gives the number of uncached tokens from which a prompt is handed off (0: always),
    or the controller of the fleet does."""

    def __init__(
        self,
        estimates: Estimates,
        index: PrefixIndex,
        fixed: int | None = None,
        directions: Directions | None = None,
    ) -> None:
        self._estimates, self._index, self._given = estimates, index, fixed
        self._directions = directions or Directions()

    @property
    def _fixed(self) -> int | None:
        return self._given if self._given is not None else self._directions.disaggregate_from

    @property
    def tokens(self) -> float:
        """The number of uncached tokens below which an idle decode instance computes the prompt itself."""
        if self._fixed is not None:
            return self._fixed
        estimates = self._estimates
        if estimates.hand_off.num_measured < FEWEST_HAND_OFFS:
            return 0.0
        # Of which n is n · token_s (its own wait) + n · token_s (another's) more than n · token_s and a hand-off?
        margin = estimates.any_prefill.slope - estimates.hand_off.slope
        return estimates.hand_off.base / margin if margin > 0 else float("inf")

    @property
    def active(self) -> bool:
        """Whether any request is served by one instance yet."""
        fixed = self._fixed
        return self._estimates.hand_off.num_measured >= FEWEST_HAND_OFFS if fixed is None else fixed != 0

    def stays_whole(self, asked: Asked, prefill: Target, decode: Target) -> str | None:
        """Why `decode` should do both phases, `short_prompt` or `prefill_busy`; None: hand off from `prefill`."""
        cached = self._index.match(asked.prefix)
        left = max(0, asked.num_tokens - cached.tokens(decode))
        if self._fixed is not None:
            return "short_prompt" if left < self._fixed else None
        if self._estimates.hand_off.num_measured < FEWEST_HAND_OFFS:
            return None
        estimates, load = self._estimates, decode.load
        stalled = 1 + load.num_decodes
        alone = (
            estimates.prefill_s(decode.name, load.prefill_tokens + left)
            + estimates.token_s(decode.name) * left * stalled
        )
        at_prefill = max(0, asked.num_tokens - cached.tokens(prefill))
        apart = estimates.prefill_s(prefill.name, at_prefill) + estimates.hand_off.at(left)
        if alone < apart:
            return "short_prompt"
        queue = estimates.token_s(prefill.name) * prefill.load.prefill_tokens
        return "prefill_busy" if alone < apart + queue else None
