"""Whether a prompt's KV is loaded or computed again, from speeds that were measured: no clock, no tensor, no I/O.

For each medium, the times of earlier loads are fitted as some seconds to begin and a time for each further byte or
token (`LinearCost`; newer measurements weigh more). A request then has four ways to its first token; the fastest is
taken:

    load       all blocks that there are; then compute the rest of the prompt
    prefix     only those of the faster tiers: the tiers below would take longer than the model
    meet       compute from the front while the blocks are loaded from a place further back; the two meet there
    recompute  load nothing

The third is the idea of Cake (Jin et al., "Compute Or Load KV Cache? Why Not Both?", 2024). KV of a block depends on
all tokens before it, and so the model can only begin in front; what is stored can be had from anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvferry.store.base import BlockRun, part_of

NEWER_WEIGHS = 0.85
"""The weight of a measurement is multiplied by this with each newer one."""
STALE_S = 60.0
"""A tier that was not read from for this long is tried again, since it may be faster now."""
WORTH_IT = 0.85
"""Another way than to load everything is taken if it takes at most this share of the time, because computing delays
other requests."""
MIN_TO_MEET = 4
"""With fewer blocks than this on either side, computing and loading at the same time is not worth its steps."""


class LoadMode(Enum):
    """How a prompt gets its KV: the four ways of the module's docstring."""

    LOAD = "load"
    PREFIX = "prefix"
    MEET = "meet"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class LoadDecision:
    """Blocks `[first, last)`, counted from the first that could be loaded, are loaded; those before are computed
    meanwhile. `estimated_s`: to the first token; None where too little was measured."""

    way: LoadMode
    first: int
    last: int
    estimated_s: float | None = None


class LinearCost:
    """Seconds as `begin + each · amount`, fitted to what was measured by least squares."""

    def __init__(self) -> None:
        self.measured_at = float("-inf")
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def measured(self, amount: float, seconds: float, now: float) -> None:
        """Note that `amount` bytes or tokens took `seconds`."""
        if amount <= 0 or seconds < 0:
            return
        self.measured_at = now
        terms = (1.0, amount, seconds, amount * amount, amount * seconds)
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        mixed = [NEWER_WEIGHS * old + new for old, new in zip(sums, terms, strict=True)]
        self._weight, self._x, self._y, self._xx, self._xy = mixed

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._weight > 0

    @property
    def each_s(self) -> float:
        """Seconds for one more byte or token."""
        return self._line()[1]

    @property
    def begin_s(self) -> float:
        """Seconds before the first byte or token."""
        return self._line()[0]

    def seconds(self, amount: float) -> float:
        """How long this amount would take (s); 0 for an amount of 0."""
        begin, each = self._line()
        return begin + each * amount if amount > 0 else 0.0

    def _line(self) -> tuple[float, float]:
        """Neither is negative: where amounts hardly differ, or more took less time, all is proportional, so that much
        is never taken to cost as little as the little that was measured."""
        if not self._weight:
            return 0.0, 0.0
        spread = self._weight * self._xx - self._x * self._x
        if spread > 1e-3 * self._x * self._x:
            each = (self._weight * self._xy - self._x * self._y) / spread
            begin = (self._y - each * self._x) / self._weight
            if each > 0 and begin >= 0:
                return begin, each
        return 0.0, self._xy / self._xx


class LoadPolicy:
    """Keeps measurements, and decides by them. `block_bytes` and `block_tokens`: the size of one block."""

    def __init__(self, block_bytes: int, block_tokens: int) -> None:
        self._block_bytes, self._block_tokens = block_bytes, block_tokens
        self._prefill = LinearCost()
        self._tiers: dict[int, LinearCost] = {}
        self._decided: Counter[LoadMode] = Counter()
        self._num_not_loaded = 0

    # What was measured.

    def computed(self, num_tokens: int, seconds: float, now: float) -> None:
        """A step of the engine computed `num_tokens` tokens of prompts in `seconds`."""
        self._prefill.measured(num_tokens, seconds, now)

    def loaded(self, runs: Sequence[BlockRun], seconds: float, now: float) -> None:
        """Note that these blocks were loaded in `seconds`. If they came from several tiers, the time is divided among
        these in proportion to what was expected."""
        sizes = self._sizes(runs)
        if not all(self._pace(tier).is_known for tier in sizes):
            expected = {tier: float(size) for tier, size in sizes.items()}
        else:
            expected = {tier: self._pace(tier).seconds(size) for tier, size in sizes.items()}
        total = sum(expected.values())
        for tier, size in sizes.items():
            share = expected[tier] / total if total else 1 / len(sizes)
            self._pace(tier).measured(size, seconds * share, now)

    def failed(self, runs: Sequence[BlockRun], seconds: float, now: float, *, timed_out: bool) -> None:
        """Note that these blocks had not come after `seconds`. This counts as a measurement if they were expected
        sooner, or if they timed out and nothing is known of their tiers."""
        is_known = all(self._pace(run.tier).is_known for run in runs)
        if (is_known or timed_out) and seconds > self._load_s(runs):
            self.loaded(runs, seconds, now)

    # What follows.

    def decide(self, runs: Sequence[BlockRun], num_rest_tokens: int, now: float, *, can_meet: bool) -> LoadDecision:
        """Decide for the blocks that could be loaded, in order, and the number of prompt tokens after them."""
        num_blocks = sum(run.num_blocks for run in runs)
        load_all = LoadDecision(LoadMode.LOAD, 0, num_blocks)
        if not self._is_sure(runs, now):
            return load_all
        rest_s = self._prefill.seconds(num_rest_tokens)
        load_all = LoadDecision(LoadMode.LOAD, 0, num_blocks, self._load_s(runs) + rest_s)
        others = [*self._prefixes(runs, num_rest_tokens), *([self._meeting(runs, rest_s)] if can_meet else [])]
        best = min(others, key=_estimate, default=load_all)
        return best if _estimate(best) <= WORTH_IT * _estimate(load_all) else load_all

    def took(self, decision: LoadDecision, num_blocks: int) -> None:
        """Count a decision that is carried out, about `num_blocks` blocks."""
        self._decided[decision.way] += 1
        self._num_not_loaded += num_blocks - (decision.last - decision.first)

    def prefers_layerwise(self, runs: Sequence[BlockRun], num_rest_tokens: int, num_others: int) -> bool:
        """Whether a load layer by layer brings the first token sooner than it delays `num_others` requests, which wait
        with it for each layer."""
        load_s, rest_s = self._load_s(runs), self._prefill.seconds(num_rest_tokens)
        return min(load_s, rest_s) > num_others * max(0.0, load_s - rest_s)

    def statistics(self) -> dict[str, float]:
        """Decisions, and the speeds that they are from."""
        found = {f"load_decisions_{way.value}": float(self._decided[way]) for way in LoadMode}
        found["not_loaded_blocks"] = float(self._num_not_loaded)
        if self._prefill.each_s:
            found["prefill_tokens_per_s"] = 1 / self._prefill.each_s
        for tier, pace in self._tiers.items():
            found[f"tier{tier}_load_latency_s"] = pace.begin_s
            if pace.each_s:
                found[f"tier{tier}_load_bytes_per_s"] = 1 / pace.each_s
        return found

    # Estimates.

    def _is_sure(self, runs: Sequence[BlockRun], now: float) -> bool:
        paces = [self._pace(run.tier) for run in runs]
        return self._prefill.is_known and all(now - pace.measured_at <= STALE_S for pace in paces)

    def _prefixes(self, runs: Sequence[BlockRun], num_rest_tokens: int) -> list[LoadDecision]:
        """The decisions to load the runs before each border between tiers, and to compute from there on."""
        num_left = sum(run.num_blocks for run in runs)
        found, last = [], 0
        for index, run in enumerate(runs):
            num_tokens = num_left * self._block_tokens + num_rest_tokens
            seconds = self._load_s(runs[:index]) + self._prefill.seconds(num_tokens)
            found.append(LoadDecision(LoadMode.PREFIX if index else LoadMode.RECOMPUTE, 0, last, seconds))
            num_left -= run.num_blocks
            last += run.num_blocks
        return found

    def _meeting(self, runs: Sequence[BlockRun], rest_s: float) -> LoadDecision:
        """The place at which both ends arrive at the same time. The later it is, the longer the front takes, and the
        shorter the load."""
        num_blocks = sum(run.num_blocks for run in runs)
        low, high = 0, num_blocks
        while low < high:
            middle = (low + high) // 2
            if self._front_s(middle) < self._load_s(_from(runs, middle)):
                low = middle + 1
            else:
                high = middle
        if not MIN_TO_MEET <= low <= num_blocks - MIN_TO_MEET:
            return LoadDecision(LoadMode.LOAD, 0, num_blocks, float("inf"))
        seconds = max(self._front_s(low), self._load_s(_from(runs, low)))
        return LoadDecision(LoadMode.MEET, low, num_blocks, seconds + rest_s)

    def _front_s(self, num_blocks: int) -> float:
        return self._prefill.seconds(num_blocks * self._block_tokens)

    def _load_s(self, runs: Sequence[BlockRun]) -> float:
        return sum(self._pace(tier).seconds(size) for tier, size in self._sizes(runs).items())

    def _sizes(self, runs: Sequence[BlockRun]) -> dict[int, int]:
        """The bytes of the runs, by tier."""
        sizes: Counter[int] = Counter()
        for run in runs:
            sizes[run.tier] += run.num_blocks * self._block_bytes
        return dict(sizes)

    def _pace(self, tier: int) -> LinearCost:
        return self._tiers.setdefault(tier, LinearCost())


def _from(runs: Sequence[BlockRun], first: int) -> list[BlockRun]:
    return part_of(runs, first, sum(run.num_blocks for run in runs))


def _estimate(decision: LoadDecision) -> float:
    return float("inf") if decision.estimated_s is None else decision.estimated_s
