"""Rules of scaling that `autoscale.py` compares: each is asked every `INTERVAL_S` what it wants, and sees what a scaler
of its kind can see.

    kvferry        fleet.scaling, from what the router reports
    static P+D     always the same
    hpa            each role by its own busy share, to 70 %, as a HorizontalPodAutoscaler does
    ratio clamp    the same, and the ratio of P to D kept within 1:2 and 2:1 (Kthena)
    decode tps     D by the tokens that they give a second, P by a fixed ratio (HeteroScale); both of the whole trace
    token velocity each role by the tokens that come for it a second, over what one instance does at most (TokenScale)
    clairvoyant    the cheapest for the requests that arrive until an instance that starts now is ready, and at once

The rules are written from their descriptions, but for Dynamo's planner (`dynamo_planner.py`), which is run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from kvferry.core.messages.traffic import TrafficReport
from kvferry.fleet.scaling.demand import Demand
from kvferry.fleet.scaling.predictor import LatencyTargets
from kvferry.fleet.scaling.scaler import RECENT_S, FleetSnapshot, MeasuredTraffic, ScalingMemory, decide
from kvferry.fleet.scaling.scaling_rules import Counts, ScalingRules
from kvferry.fleet.scaling.traffic import DecodeCapacity, PhaseTimes, Workload
from kvferry.fleet.scaling.traffic_meter import TrafficMeter
from kvferry.sim.engine import SimInstanceSpec
from kvferry.sim.traffic import BLOCK_TOKENS, Arrival

INTERVAL_S = 5.0
START_S, DRAIN_S, COOL_DOWN_S = 30.0, 120.0, 120.0
TARGETS = LatencyTargets(ttft_s=1.0, itl_s=0.030)
GOAL, MOST = 0.99, 8
TIMES = PhaseTimes(0.006, 40e-6, 0.004, 150e-6, first_token_s=0.003, max_sequences=128)
"""What the clairvoyant takes for granted until it was measured."""
RULES = ScalingRules(
    targets=TARGETS,
    min_counts=Counts(1, 1),
    max_counts=Counts(MOST, MOST),
    budget=2 * MOST,
    goal=GOAL,
    overflows=True,
    switches=frozenset({("prefill", "decode"), ("decode", "prefill")}),
    cool_down_s=COOL_DOWN_S,
)
INSTANCE = SimInstanceSpec(num_blocks=4096, max_model_len=32768, has_contents=False, tokens_at_once=8)


@dataclass
class Seen:
    """The input of a rule, since its last decision."""

    now: float
    counts: Counts
    ready: Counts
    draining: int
    report: TrafficReport
    busy_prefill: float
    busy_decode: float
    decode_tokens_per_s: float


class Rule:
    """Decides counts, and from how many tokens prompts are disaggregated (None: the router does). `targets`: what the
    router is told of them."""

    targets: LatencyTargets | None = None
    from_tokens: int | None = None

    def decide(self, seen: Seen) -> Counts:
        """The counts that are wanted now."""
        raise NotImplementedError


class Static(Rule):
    """Always the same."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts

    def decide(self, seen: Seen) -> Counts:
        return self.counts


class Kvferry(Rule):
    """`fleet.scaling`."""

    def __init__(self, start: Counts, rules: ScalingRules = RULES) -> None:
        self.rules, self.targets = rules, rules.targets
        self._memory = ScalingMemory(start.prefill, start.decode)
        self._measuring: TrafficMeter | None = None
        self.said: list[str] = []

    def _measured(self, seen: Seen) -> MeasuredTraffic:
        if self._measuring is None:
            self._measuring = TrafficMeter(INTERVAL_S, seen.now)
        self._measuring.record({"router": seen.report}, {}, seen.now, 0.0)
        room = DecodeCapacity(INSTANCE.num_blocks * INSTANCE.block_size, INSTANCE.max_num_seqs)
        measured = self._measuring.measured(room, seen.now)
        since = max(self._memory.changed_at, seen.now - RECENT_S)
        return replace(measured, attained=self._measuring.attained(self.rules.targets, since, seen.now))

    def decide(self, seen: Seen) -> Counts:
        situation = FleetSnapshot(seen.ready, seen.draining, START_S)
        made = decide(self.rules, self._memory, self._measured(seen), situation, seen.now)
        if made.memory != self._memory:
            self.said.append(f"{seen.now:.0f} {made.what}: {made.reason}")
        self._memory = made.memory
        return made.memory.counts


class Clairvoyant(Kvferry):
    """Replays what arrived in the last half minute and what will until an instance that starts now is ready, and
    releases at once."""

    def __init__(self, start: Counts, rules: ScalingRules, arrivals: Sequence[Arrival]) -> None:
        super().__init__(start, replace(rules, cool_down_s=0.0))
        self._requests = np.array(
            [
                (arrival.at_s, left, arrival.answer_tokens)
                for arrival, left in zip(arrivals, uncached(arrivals), strict=True)
            ]
        )  # fmt: skip
        self.base: float = 0.0
        """When the first one arrives."""

    def _measured(self, seen: Seen) -> MeasuredTraffic:
        measured = super()._measured(seen)
        begins, lasts_s = seen.now - self.base - START_S, 2 * START_S + 3 * INTERVAL_S
        rows = self._requests[(self._requests[:, 0] >= begins) & (self._requests[:, 0] < begins + lasts_s)]
        workload = Workload(np.maximum(rows[:, 0] - begins, 0.0), rows[:, 1], rows[:, 2], lasts_s)
        times = measured.times or TIMES
        return replace(measured, workload=workload, times=times, num_known=99, demand=Demand([0.0] * 60, INTERVAL_S))

    def decide(self, seen: Seen) -> Counts:
        self._memory = msgspec.structs.replace(self._memory, changed_at=-1e18)
        return super().decide(seen)


def uncached(arrivals: Sequence[Arrival]) -> list[float]:
    """Tokens of each prompt that no earlier one had."""
    cached: set[int] = set()
    counts = []
    for arrival in arrivals:
        counts.append(
            max(1.0, arrival.prompt_tokens - BLOCK_TOKENS * sum(block in cached for block in arrival.block_ids))
        )
        cached.update(arrival.block_ids)
    return counts


@dataclass
class Hpa(Rule):
    """As a HorizontalPodAutoscaler for each role: to a share of busy time, with its tolerance, and with the highest
    recommendation of the cool-down before anything is released."""

    target: float = 0.7
    tolerance: float = 0.1
    decisions: list[tuple[float, Counts]] = field(default_factory=list)

    def decide(self, seen: Seen) -> Counts:
        current = seen.counts
        new = Counts(
            self._of(current.prefill, seen.ready.prefill, seen.busy_prefill),
            self._of(current.decode, seen.ready.decode, seen.busy_decode),
        )
        return self._stabilised(seen, new)

    def _of(self, current: int, ready: int, busy: float) -> int:
        ratio = busy / self.target
        desired = current if abs(ratio - 1) <= self.tolerance else math.ceil(max(1, ready) * ratio)
        return min(MOST, max(1, desired))

    def _stabilised(self, seen: Seen, new: Counts) -> Counts:
        self.decisions = [decision for decision in self.decisions if decision[0] > seen.now - COOL_DOWN_S] + [
            (seen.now, new)
        ]
        return Counts(
            max(counts.prefill for _, counts in self.decisions), max(counts.decode for _, counts in self.decisions)
        )


class RatioClamp(Hpa):
    """The same, with the ratio kept."""

    def decide(self, seen: Seen) -> Counts:
        counts = super().decide(seen)
        prefill = max(counts.prefill, math.ceil(counts.decode / 2))
        return Counts(min(MOST, prefill), min(MOST, max(counts.decode, math.ceil(prefill / 2))))


class DecodeTps(Hpa):
    """D by tokens a second, P by a ratio."""

    def __init__(self, tokens_per_s: float, prefill_per_decode: float) -> None:
        super().__init__()
        self._tokens_per_s, self._ratio = tokens_per_s, prefill_per_decode

    def decide(self, seen: Seen) -> Counts:
        decode = min(MOST, max(1, math.ceil(seen.decode_tokens_per_s / self._tokens_per_s)))
        return self._stabilised(seen, Counts(min(MOST, max(1, round(decode * self._ratio))), decode))


class TokenVelocity(Hpa):
    """Each role by the tokens that came for it in the last seconds, over those that one instance takes a second at
    most within the targets."""

    def __init__(self, targets: LatencyTargets, window_s: float = 15.0) -> None:
        super().__init__()
        self._window_s = window_s
        step = INSTANCE.times
        together = min(INSTANCE.max_num_seqs, int((targets.itl_s - step.base_s) / step.decode_sequence_s))
        self._prefill_per_s = 1.0 / step.prefill_token_s
        self._decode_per_s = together / (step.base_s + step.decode_sequence_s * together)

    def decide(self, seen: Seen) -> Counts:
        lately = [request for request in seen.report.requests if request.arrived > seen.now - self._window_s]
        ended = [request.output_tokens for request in seen.report.requests if request.state == "done"]
        answer = sum(ended) / len(ended) if ended else 0.0
        prefill = sum(request.uncached for request in lately) / self._window_s / self._prefill_per_s
        decode = len(lately) * answer / self._window_s / self._decode_per_s
        desired = (min(MOST, max(1, math.ceil(number))) for number in (prefill, decode))
        return self._stabilised(seen, Counts(*desired))
