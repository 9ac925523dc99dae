"""The verdict on prefill and decode on different instances for the traffic of a fleet: in numbers, and in a
sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvferry.core.messages.traffic import TrafficReport
from kvferry.core.settings.units import percent
from kvferry.fleet.scaling.predictor import LatencyTargets, Prediction
from kvferry.fleet.scaling.scaler import Forecast
from kvferry.fleet.scaling.scaling_rules import Counts, ScalingRules
from kvferry.fleet.scaling.traffic import UNKNOWN_CAPACITY, DecodeCapacity, PhaseTimes, Workload
from kvferry.fleet.scaling.traffic_meter import phase_times, share_within, workload_of

_ALIKE = 0.005
"""Shares that differ by less than this count as equal: the simpler arrangement is then better."""
MIN_REQUESTS = 20


@dataclass(frozen=True)
class Arrangement:
    """One way to use instances, and its expected shares."""

    counts: Counts
    expected: Prediction


@dataclass(frozen=True)
class Verdict:
    """`now`, `split`, `aggregated`: the present arrangement, and the best of as many instances with P and D apart
    (None: there are not two) or for both phases. `smallest_split`, `smallest_aggregated`: the fewest instances that
    keep the goal; None: none up to `max_tried` do. `stall_s`: seconds for which a typical prompt, and one in a hundred,
    stops the answers beside it on one instance."""

    targets: LatencyTargets
    goal: float
    workload: Workload
    times: PhaseTimes
    num_requests: int
    measured: float | None
    now: Arrangement
    split: Arrangement | None
    aggregated: Arrangement
    smallest_split: Arrangement | None
    smallest_aggregated: Arrangement | None
    max_tried: int
    stall_s: tuple[float, float]

    @property
    def disaggregates(self) -> bool:
        """True if P and D apart keep more requests within the targets, or keep the goal with fewer instances."""
        if self.split is None:
            return False
        gained = self.split.expected.attained - self.aggregated.expected.attained
        if gained <= -_ALIKE:
            return False
        return gained > _ALIKE or _fewer(self.smallest_split, self.smallest_aggregated)

    def sentence(self) -> str:
        """The recommendation, with the reason in numbers."""
        aggregated = _describe(self.aggregated)
        if self.split is None:
            return f"Do not disaggregate: there is one instance; {aggregated}."
        split = _describe(self.split)
        if self.disaggregates:
            saved = ""
            if self.smallest_split is not None and _fewer(self.smallest_split, self.smallest_aggregated):
                smallest = "more" if self.smallest_aggregated is None else str(self.smallest_aggregated.counts.total)
                saved = (
                    f", and {self.smallest_split.counts.total} instances are enough for the goal instead of {smallest}"
                )
            return f"Disaggregate: {split}, {aggregated}{saved}."
        if _fewer(self.smallest_aggregated, self.smallest_split) and self.smallest_aggregated is not None:
            smallest = "more" if self.smallest_split is None else str(self.smallest_split.counts.total)
            total = self.smallest_aggregated.counts.total
            return (
                f"Do not disaggregate: {aggregated}, {split}; for the goal, {total} for both phases would be enough,"
                f" and with P and D apart {smallest}."
            )
        if self.split.expected.attained < self.aggregated.expected.attained - _ALIKE:
            return f"Do not disaggregate: {aggregated}, {split}."
        return f"Do not disaggregate: it would bring nothing for this traffic; {aggregated}, {split}."


def judge(
    report: TrafficReport,
    counts: Counts,
    targets: LatencyTargets,
    goal: float = 0.99,
    capacity: DecodeCapacity = UNKNOWN_CAPACITY,
) -> Verdict | None:
    """Judge by a report's requests; None: fewer than `MIN_REQUESTS` ended, or the times of phases are not known."""
    observations = [request for request in report.requests if request.state != "failed"]
    times = phase_times(observations, capacity)
    if times is None or sum(request.state == "done" for request in observations) < MIN_REQUESTS:
        return None
    workload = workload_of(observations, times, min(request.arrived for request in observations), report.now)
    total = max(1, counts.total)
    limit = max(16, 3 * total)
    anything = ScalingRules(targets, Counts(0, 1), Counts(limit, limit), budget=limit, goal=goal, aggregate=True)
    outlook = Forecast(anything, [workload], times)
    stalls = times.prefill_token_s * np.minimum(workload.prompt_tokens, times.chunk_tokens)
    return Verdict(
        targets=targets,
        goal=goal,
        workload=workload,
        times=times,
        num_requests=len(observations),
        measured=share_within(report.requests, targets.ttft_s, targets.itl_s),
        now=Arrangement(counts, outlook.best(counts)),
        split=_best_split(outlook, total),
        aggregated=_aggregated(outlook, total),
        smallest_split=_smallest(outlook, range(2, limit + 1), _best_split, goal),
        smallest_aggregated=_smallest(outlook, range(1, limit + 1), _aggregated, goal),
        max_tried=limit,
        stall_s=(float(np.median(stalls)), float(np.quantile(stalls, 0.99))),
    )


def _aggregated(outlook: Forecast, total: int) -> Arrangement:
    counts = Counts(0, total)
    return Arrangement(counts, outlook.best(counts))


def _best_split(outlook: Forecast, total: int) -> Arrangement | None:
    forms = [Arrangement(counts, outlook.best(counts)) for counts in (Counts(p, total - p) for p in range(1, total))]
    return max(forms, key=lambda counts: (round(counts.expected.attained, 4), -counts.expected.busiest), default=None)


def _smallest(
    outlook: Forecast, totals: range, form: Callable[[Forecast, int], Arrangement | None], goal: float
) -> Arrangement | None:
    arrangements = (form(outlook, total) for total in totals)
    return next(
        (
            arrangement
            for arrangement in arrangements
            if arrangement is not None and arrangement.expected.attained >= goal
        ),
        None,
    )


def _fewer(arrangement: Arrangement | None, other: Arrangement | None) -> bool:
    return arrangement is not None and (other is None or arrangement.counts.total < other.counts.total)


def _describe(form: Arrangement) -> str:
    return f"{form.counts} keep {percent(form.expected.attained)} % within the targets"
