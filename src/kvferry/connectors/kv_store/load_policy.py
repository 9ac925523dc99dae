"""The decision whether to load or recompute a prompt's KV, from measured speeds: no clock, no tensor, no I/O.

For each medium, the times of earlier loads are fitted as a latency and a time for each further byte or token
(`LinearCost`; newer measurements weigh more). A request then has four ways to its first token; the fastest is chosen:

    load       all stored blocks; then compute the rest of the prompt
    prefix     only the blocks in faster tiers: the tiers below would take longer than the model
    meet       compute from the front while the later blocks are loaded; the two meet
    recompute  load nothing

The third is the idea of Cake (Jin et al., "Compute Or Load KV Cache? Why Not Both?", 2024). KV of a block depends on
all tokens before it, so the model can only begin at the front; stored blocks can be loaded from any position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvferry.store.block_run import BlockRun, part_of

DECAY = 0.85
"""The weight of a measurement is multiplied by this with each newer one."""


class LoadMode(Enum):
    """The four ways in which a prompt gets its KV; see the module's docstring."""

    LOAD = "load"
    PREFIX = "prefix"
    MEET = "meet"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class LoadDecision:
    """Blocks `[first, last)`, counted from the first one that could be loaded, are loaded; the blocks before `first`
    are computed at the same time. `estimated_s`: seconds to the first token; None: too little was measured."""

    mode: LoadMode
    first: int
    last: int
    estimated_s: float | None = None


class LinearCost:
    """Seconds as `latency + per_unit · amount`, fitted to measurements by least squares."""

    def __init__(self) -> None:
        self.measured_at = float("-inf")
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add_sample(self, amount: float, seconds: float, now: float) -> None:
        """Record that `amount` bytes or tokens took `seconds`."""
        if amount <= 0 or seconds < 0:
            return
        self.measured_at = now
        terms = (1.0, amount, seconds, amount * amount, amount * seconds)
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        decayed = [DECAY * old + new for old, new in zip(sums, terms, strict=True)]
        self._weight, self._x, self._y, self._xx, self._xy = decayed

    @property
    def has_samples(self) -> bool:
        """True if anything was measured."""
        return self._weight > 0

    @property
    def per_unit_s(self) -> float:
        """Seconds for one more byte or token."""
        return self._fit()[1]

    @property
    def latency_s(self) -> float:
        """Seconds before the first byte or token."""
        return self._fit()[0]

    def seconds(self, amount: float) -> float:
        """Estimated duration for this amount (s); 0 for an amount of 0."""
        latency, per_unit = self._fit()
        return latency + per_unit * amount if amount > 0 else 0.0

    def _fit(self) -> tuple[float, float]:
        """Latency, and seconds per unit; neither is negative. If the measured amounts hardly differ, or larger amounts
        took less time, the time is proportional to the amount, so that a large amount is never estimated at the cost of
        a small one."""
        if not self._weight:
            return 0.0, 0.0
        spread = self._weight * self._xx - self._x * self._x
        if spread > 1e-3 * self._x * self._x:
            per_unit = (self._weight * self._xy - self._x * self._y) / spread
            latency = (self._y - per_unit * self._x) / self._weight
            if per_unit > 0 and latency >= 0:
                return latency, per_unit
        return 0.0, self._xy / self._xx


class LoadPolicy:
    """Keeps measurements, and decides by them. `block_bytes` and `block_tokens`: the size of one block."""

    min_to_meet = 4
    """Computing and loading at the same time is only chosen if at least this number of blocks is computed, and as many
    are loaded."""
    max_time_share = 0.85
    """Another mode than loading everything is chosen only if it takes at most this share of the time, because computing
    delays other requests."""
    stale_s = 60.0
    """A tier that was not read for these seconds is tried again, because it may be faster now."""

    def __init__(self, block_bytes: int, block_tokens: int) -> None:
        self._block_bytes, self._block_tokens = block_bytes, block_tokens
        self._prefill = LinearCost()
        self._tiers: dict[int, LinearCost] = {}
        self._decided: Counter[LoadMode] = Counter()
        self._num_not_loaded = 0

    # Measurements.

    def record_prefill(self, num_tokens: int, seconds: float, now: float) -> None:
        """Record that a step of the engine computed `num_tokens` tokens of prompts in `seconds`."""
        self._prefill.add_sample(num_tokens, seconds, now)

    def record_load(self, runs: Sequence[BlockRun], seconds: float, now: float) -> None:
        """Record that these blocks were loaded in `seconds`. If they came from several tiers, the time is divided among
        these in proportion to the expected times."""
        sizes = self._sizes(runs)
        if not all(self._cost_of(tier).has_samples for tier in sizes):
            expected = {tier: float(size) for tier, size in sizes.items()}
        else:
            expected = {tier: self._cost_of(tier).seconds(size) for tier, size in sizes.items()}
        total = sum(expected.values())
        for tier, size in sizes.items():
            share = expected[tier] / total if total else 1 / len(sizes)
            self._cost_of(tier).add_sample(size, seconds * share, now)

    def record_failed_load(self, runs: Sequence[BlockRun], seconds: float, now: float, *, timed_out: bool) -> None:
        """Record that these blocks had not arrived after `seconds`. This counts as a measurement if they were expected
        sooner, or if they timed out and their tiers have no measurements."""
        has_samples = all(self._cost_of(run.tier).has_samples for run in runs)
        if (has_samples or timed_out) and seconds > self._load_s(runs):
            self.record_load(runs, seconds, now)

    # Decisions.

    def decide(self, runs: Sequence[BlockRun], num_rest_tokens: int, now: float, *, can_meet: bool) -> LoadDecision:
        """Decide for the blocks that could be loaded, in order. `num_rest_tokens`: number of prompt tokens after
        them."""
        num_blocks = sum(run.num_blocks for run in runs)
        load_all = LoadDecision(LoadMode.LOAD, 0, num_blocks)
        if not self._has_fresh_samples(runs, now):
            return load_all
        rest_s = self._prefill.seconds(num_rest_tokens)
        load_all = LoadDecision(LoadMode.LOAD, 0, num_blocks, self._load_s(runs) + rest_s)
        alternatives = [
            *self._prefixes(runs, num_rest_tokens),
            *([self._meet_decision(runs, rest_s)] if can_meet else []),
        ]
        best = min(alternatives, key=_estimate, default=load_all)
        return best if _estimate(best) <= self.max_time_share * _estimate(load_all) else load_all

    def count_decision(self, decision: LoadDecision, num_blocks: int) -> None:
        """Count a decision that is carried out, about `num_blocks` blocks."""
        self._decided[decision.mode] += 1
        self._num_not_loaded += num_blocks - (decision.last - decision.first)

    def prefers_layerwise(self, runs: Sequence[BlockRun], num_rest_tokens: int, num_others: int) -> bool:
        """True if a layerwise load saves more time to the first token than it costs the `num_others` other requests of
        the step, which wait with it for each layer."""
        load_s, rest_s = self._load_s(runs), self._prefill.seconds(num_rest_tokens)
        return min(load_s, rest_s) > num_others * max(0.0, load_s - rest_s)

    def statistics(self) -> dict[str, float]:
        """Counts of decisions, and the measured speeds."""
        statistics = {f"load_decisions_{mode.value}": float(self._decided[mode]) for mode in LoadMode}
        statistics["not_loaded_blocks"] = float(self._num_not_loaded)
        if self._prefill.per_unit_s:
            statistics["prefill_tokens_per_s"] = 1 / self._prefill.per_unit_s
        for tier, cost in self._tiers.items():
            statistics[f"tier{tier}_load_latency_s"] = cost.latency_s
            if cost.per_unit_s:
                statistics[f"tier{tier}_load_bytes_per_s"] = 1 / cost.per_unit_s
        return statistics

    # Estimates.

    def _has_fresh_samples(self, runs: Sequence[BlockRun], now: float) -> bool:
        costs = [self._cost_of(run.tier) for run in runs]
        return self._prefill.has_samples and all(now - cost.measured_at <= self.stale_s for cost in costs)

    def _prefixes(self, runs: Sequence[BlockRun], num_rest_tokens: int) -> list[LoadDecision]:
        """The decisions to load the runs before each border between tiers, and to compute from there on."""
        num_left = sum(run.num_blocks for run in runs)
        decisions, last = [], 0
        for index, run in enumerate(runs):
            num_tokens = num_left * self._block_tokens + num_rest_tokens
            seconds = self._load_s(runs[:index]) + self._prefill.seconds(num_tokens)
            decisions.append(LoadDecision(LoadMode.PREFIX if index else LoadMode.RECOMPUTE, 0, last, seconds))
            num_left -= run.num_blocks
            last += run.num_blocks
        return decisions

    def _meet_decision(self, runs: Sequence[BlockRun], rest_s: float) -> LoadDecision:
        """The decision to meet at the block where computing from the front and loading arrive at the same time. The
        later this block is, the longer computing takes, and the shorter the load."""
        num_blocks = sum(run.num_blocks for run in runs)
        low, high = 0, num_blocks
        while low < high:
            middle = (low + high) // 2
            if self._compute_s(middle) < self._load_s(_runs_from(runs, middle)):
                low = middle + 1
            else:
                high = middle
        if not self.min_to_meet <= low <= num_blocks - self.min_to_meet:
            return LoadDecision(LoadMode.LOAD, 0, num_blocks, float("inf"))
        seconds = max(self._compute_s(low), self._load_s(_runs_from(runs, low)))
        return LoadDecision(LoadMode.MEET, low, num_blocks, seconds + rest_s)

    def _compute_s(self, num_blocks: int) -> float:
        return self._prefill.seconds(num_blocks * self._block_tokens)

    def _load_s(self, runs: Sequence[BlockRun]) -> float:
        return sum(self._cost_of(tier).seconds(size) for tier, size in self._sizes(runs).items())

    def _sizes(self, runs: Sequence[BlockRun]) -> dict[int, int]:
        """The bytes of the runs, by tier."""
        sizes: Counter[int] = Counter()
        for run in runs:
            sizes[run.tier] += run.num_blocks * self._block_bytes
        return dict(sizes)

    def _cost_of(self, tier: int) -> LinearCost:
        return self._tiers.setdefault(tier, LinearCost())


def _runs_from(runs: Sequence[BlockRun], first: int) -> list[BlockRun]:
    return part_of(runs, first, sum(run.num_blocks for run in runs))


def _estimate(decision: LoadDecision) -> float:
    return float("inf") if decision.estimated_s is None else decision.estimated_s
