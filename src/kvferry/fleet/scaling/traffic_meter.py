"""Measures the traffic of a fleet for its scaler, from the reports of routers. Owns the observed requests."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvferry.core.messages.traffic import RequestObservation, TrafficReport
from kvferry.fleet.scaling.demand import Demand
from kvferry.fleet.scaling.predictor import LatencyTargets
from kvferry.fleet.scaling.scaler import MeasuredTraffic, TargetShare
from kvferry.fleet.scaling.traffic import (
    UNKNOWN_CAPACITY,
    DecodeCapacity,
    PhaseTimes,
    Vector,
    Workload,
    fit_answers,
    fit_line,
)

MAX_REQUESTS = 1024
"""Maximum number of requests that are read from each router."""
LOOK_BACK_S = 3600
"""Seconds; older requests do not count for the present."""
_MIN_TOKENS = 4
"""Minimum number of tokens of an answer from which the time of a step is measured."""
_MIN_STEP_S = 1e-4
"""A step that seems to take less was not measured: there were only answers of the same length."""
_QUICK = 0.1
"""The share of hand-offs that are assumed not to have waited on the decode instance."""
_UNSEEN_GROWTH = 0.01
"""Share of itself by which a step is taken to grow with each sequence, where only one number of them was seen."""

_Key = tuple[str, float, int]
"""The key of a request: its router, arrival and length."""


class TrafficMeter:
    """The observed requests of one fleet. Times are in wall-clock seconds."""

    ahead_s = 5.0
    """Seconds by which a router's clock may be ahead, once clocks have been set."""
    max_routers = 256
    max_bins = 4096
    max_observations = 4096
    """Number of a fleet's newest requests that are stored."""

    def __init__(self, bin_s: float, now: float) -> None:
        self._bin_s, self._began_at = bin_s, now
        self._num_arrived: dict[str, int] = {}
        """Number of requests that have arrived, by router, in its last report."""
        self._bins = deque[float](maxlen=self.max_bins)
        self._bin_began_at, self._last_arrival_at = now, now
        self._num_in_bin = 0.0
        self._num_waiting = 0
        self._known: dict[_Key, RequestObservation] = {}
        """Requests that did not fail, as they were reported last."""
        self._since, self._ignored = -math.inf, frozenset[_Key]()
        """Earlier arrivals, and requests with these keys, have times of a clock that has been set since."""
        self._is_warm: Callable[[RequestObservation], bool] = lambda request: True

    def clock_was_set(self, now: float) -> None:
        """The wall clock, which shows `now`, has made a step. The times of earlier requests cannot be compared with
        later ones, and are dropped. The counts of arrivals can: the step is neither a pause nor a burst."""
        self._ignored |= self._known.keys()
        self._known.clear()
        self._began_at = self._bin_began_at = self._last_arrival_at = self._since = now

    def record(
        self, reports: Mapping[str, TrafficReport], ready_at: Mapping[str, float], now: float, warm_s: float
    ) -> None:
        """Reports by router. `ready_at`: since when each instance serves; what it did in its first `warm_s` is not
        counted, because a process is slower at first."""
        is_first = not self._num_arrived
        for router, report in reports.items():
            before = self._num_arrived.get(router)
            if before is None or report.num_arrived < before:  # a new process counts from 0
                before = 0 if not is_first else report.num_arrived
            self._num_in_bin += report.num_arrived - before
            if report.num_arrived > before:
                self._last_arrival_at = now
            self._num_arrived.pop(router, None)
            self._num_arrived[router] = report.num_arrived
        for router in list(self._num_arrived)[
            : -self.max_routers
        ]:  # a router that does not answer now may answer again
            del self._num_arrived[router]
        self._num_waiting = sum(request.num_waiting for request in reports.values())
        requests = sorted(
            (request for each in reports.values() for request in each.requests),
            key=lambda request: request.arrived,
        )
        if is_first and reports:
            self._begin(requests, now)
        self._close_bins(now)
        self._store(reports, now)
        self._is_warm = lambda request: _is_warm(request, ready_at, warm_s)

    def _store(self, reports: Mapping[str, TrafficReport], now: float) -> None:
        until = math.inf if self._since == -math.inf else now + self.ahead_s
        for router, report in reports.items():
            lately = (request for request in report.requests if self._since <= request.arrived <= until)
            keyed = (((router, request.arrived, request.prompt_tokens), request) for request in lately)
            self._known.update((key, request) for key, request in keyed if key not in self._ignored)
        newest = sorted(self._known.items(), key=lambda item: item[1].arrived)[-self.max_observations :]
        self._known = {key: request for key, request in newest if request.state != "failed"}

    def _begin(self, requests: Sequence[RequestObservation], now: float) -> None:
        """Count the requests of an earlier process, from before the first report."""
        if not requests:
            return
        first = max(requests[0].arrived, now - self.max_bins * self._bin_s)
        num_bins = int((now - first) / self._bin_s)
        if num_bins > 0:
            counts, _ = np.histogram([request.arrived for request in requests], bins=num_bins, range=(first, now))
            self._bins.extend(map(float, counts))
        self._last_arrival_at = requests[-1].arrived
        self._bin_began_at, self._num_in_bin = now, 0.0

    def _close_bins(self, now: float) -> None:
        elapsed = now - self._bin_began_at
        if elapsed >= self._bin_s:
            number = min(int(elapsed / self._bin_s), self.max_bins)
            self._bins.extend([self._num_in_bin * self._bin_s / elapsed] * number)
            self._bin_began_at, self._num_in_bin = now, 0.0

    def attained(self, targets: LatencyTargets, since: float, now: float) -> TargetShare:
        """The share within the targets of the requests that arrived since then, of which it is known."""
        lately = [request for request in self._known.values() if request.arrived >= since and request.streams]
        judged = [is_within for request in lately if (is_within := _is_within(request, targets, now)) is not None]
        return TargetShare(sum(judged) / len(judged) if judged else 0.0, len(judged))

    def measured(self, capacity: DecodeCapacity, now: float, hold_s: float = 900.0) -> MeasuredTraffic:
        """The measured traffic. `capacity`: of one decode instance. `hold_s`: seconds for which a request counts."""
        demand = Demand(tuple(self._bins), self._bin_s)
        observations = list(self._known.values())
        warm = [request for request in observations if self._is_warm(request)][-MAX_REQUESTS:]
        times = phase_times(warm, capacity)
        workload = None
        if times is not None:
            first = observations[0].arrived
            began = max(
                now - hold_s, first if len(observations) == self.max_observations else min(first, self._began_at)
            )
            lately = [request for request in observations if request.arrived >= began] or observations[-1:]
            workload = workload_of(lately, times, min(began, lately[0].arrived), now)
        num_known = sum(request.state == "done" for request in warm)
        return MeasuredTraffic(demand, num_known, workload, times, now - self._last_arrival_at, self._num_waiting)


def _is_within(request: RequestObservation, targets: LatencyTargets, now: float) -> bool | None:
    """True if a request met both targets; None: not known yet."""
    if request.first_s is None:
        return False if now - request.arrived > targets.ttft_s else None
    if request.first_s > targets.ttft_s:
        return False
    if request.state == "running":
        return None
    return _keeps_itl(request, targets.itl_s)


def _keeps_itl(request: RequestObservation, itl_s: float) -> bool:
    return request.output_tokens <= 1.0 or (request.answer_s or 0.0) <= itl_s * request.output_tokens


def _is_warm(request: RequestObservation, ready_at: Mapping[str, float], warm_s: float) -> bool:
    return all(
        request.arrived >= ready_at.get(name, -math.inf) + warm_s for name in (request.prefill, request.decode) if name
    )


def workload_of(observations: Sequence[RequestObservation], times: PhaseTimes, began: float, now: float) -> Workload:
    """The workload of these requests, as they came between `began` and now."""
    token_counts = zip((request.arrived for request in observations), lengths(observations, times, now), strict=True)
    return Workload.of(((at, prompt, output) for at, (prompt, output) in token_counts), now - began, began)


def lengths(observations: Sequence[RequestObservation], times: PhaseTimes, now: float) -> list[tuple[float, float]]:
    """(uncached prompt tokens, output tokens). A running answer counts as long as others, or as it must be by now: to
    leave out running answers would leave out the long ones."""
    ended = [request.output_tokens for request in observations if request.state == "done" and request.output_tokens]
    typical = float(np.mean(ended)) if ended else 1.0
    token_counts = []
    for request in observations:
        output = request.output_tokens
        if request.state == "running":
            runs_s = 0.0 if request.first_s is None else now - request.arrived - request.first_s
            step_s = times.decode_base_s + times.decode_sequence_s * max(1.0, request.beside)
            output = max(typical, runs_s / max(step_s, _MIN_STEP_S))
        token_counts.append((float(request.uncached), output or typical))
    return token_counts


def phase_times(
    observations: Sequence[RequestObservation], capacity: DecodeCapacity = UNKNOWN_CAPACITY
) -> PhaseTimes | None:
    """Lines through what was measured; None: something was not measured yet."""
    prefill = fit_line(_computed(observations))
    if prefill is None:
        prefill = _unqueued(
            [(request.uncached, request.first_s) for request in observations if request.first_s is not None]
        )
    answers = [request for request in observations if request.answer_s and request.output_tokens >= _MIN_TOKENS]
    if prefill is None:
        return None
    answers = [request for request in answers if request.streams] or answers  # of the others, tokens are estimated
    beside = _mean_concurrency(answers, observations)
    decode = fit_answers(_decoded(answers, beside, _Stalls(observations), prefill[1]))
    if decode is None:
        return None
    delay, base, growth = decode
    if np.ptp(beside) < 2.0:
        base, growth = (step := base + growth * float(np.mean(beside))), step * _UNSEEN_GROWTH
    hand_offs = [request.hand_off_s for request in observations if request.hand_off_s is not None]
    mean_tokens = float(np.mean([request.prompt_tokens + request.output_tokens for request in observations])) or 1.0
    return PhaseTimes(
        prefill_base_s=prefill[0],
        prefill_token_s=prefill[1],
        decode_base_s=base,
        decode_sequence_s=growth,
        first_token_s=float(np.quantile(hand_offs, _QUICK)) if hand_offs else 0.0,
        hand_off_s=delay,
        max_sequences=capacity.fits(mean_tokens),
    )


def _computed(observations: Sequence[RequestObservation]) -> list[tuple[float, float]]:
    """(tokens, seconds) of each prompt. A step computes parts of several prompts, each of which then seems to take as
    long as all of them, so prompts that an instance computed without a pause count as their mean."""
    spans = []
    for request in observations:
        if request.prefill_s is not None:
            ends = request.arrived + (
                request.prefill_s if request.first_s is None else request.first_s - (request.hand_off_s or 0.0)
            )
            spans.append((request.prefill, ends - request.prefill_s, ends, request.uncached))
    points, together = list[tuple[float, float]](), list[int]()
    busy, began, ended = "", 0.0, -math.inf
    for name, begins, ends, tokens in [*sorted(spans), ("", math.inf, math.inf, 0)]:
        if name != busy or begins > ended:
            number = len(together)
            points += [(sum(together) / number, (ended - began) / number)] * number if number else []
            busy, began, ended, together = name, begins, ends, []
        ended = max(ended, ends)
        together.append(tokens)
    return points


def _mean_concurrency(answers: Sequence[RequestObservation], observations: Sequence[RequestObservation]) -> Vector:
    """Mean number of answers that ran on the instance of each answer. A router reports it for two moments, and for its
    own answers only; that is used where the times of some answers are not known, or too short."""
    if not all(request.streams for request in observations):
        return np.array([request.beside for request in answers])
    spans: dict[str, list[tuple[float, float]]] = {}
    for request in observations:
        if request.first_s is not None:
            begins = request.arrived + request.first_s
            ends = math.inf if request.answer_s is None else begins + request.answer_s
            spans.setdefault(request.decode, []).append((begins, ends))
    running_s = np.zeros(len(answers))
    first = np.array([request.arrived + (request.first_s or 0.0) for request in answers])
    last = first + np.array([request.answer_s or 0.0 for request in answers])
    names = np.array([request.decode for request in answers])
    for name, those in spans.items():
        begun, ended = np.sort(np.array(those), axis=0).T
        at = np.unique(np.concatenate([begun, ended[np.isfinite(ended)]]))
        running = np.searchsorted(begun, at, side="right") - np.searchsorted(ended, at, side="right")
        sums = np.concatenate([[0.0], (np.diff(at) * running[:-1]).cumsum()])
        is_on_instance = names == name
        running_s[is_on_instance] = np.interp(last[is_on_instance], at, sums) - np.interp(
            first[is_on_instance], at, sums
        )
    lasts = last - first  # none, of times since 1970, if it is below a microsecond
    means = np.array([request.beside for request in answers], dtype=float)
    np.divide(running_s, lasts, out=means, where=lasts > 0.0)
    return means


def _decoded(
    answers: Sequence[RequestObservation], beside: Vector, stalls: _Stalls, token_s: float
) -> list[tuple[float, float, float]]:
    """(tokens, answers beside, seconds) of each, without the time in which its instance computed prompts."""
    points = []
    for request, others in zip(answers, beside.tolist(), strict=True):
        assert request.answer_s is not None
        stalled_s = token_s * stalls.tokens(request)
        points.append((request.output_tokens, others, max(0.1 * request.answer_s, request.answer_s - stalled_s)))
    return points


class _Stalls:
    """Prompts that instances have computed beside their answers."""

    def __init__(self, observations: Sequence[RequestObservation]) -> None:
        ended: dict[str, list[tuple[float, float]]] = {}
        for request in observations:
            if request.first_s is not None:
                at = request.arrived + request.first_s
                ended.setdefault(request.prefill or request.decode, []).append((at, float(request.uncached)))
        self._ended = {name: np.array(sorted(those)) for name, those in ended.items()}
        self._tokens = {name: np.concatenate([[0.0], those[:, 1].cumsum()]) for name, those in self._ended.items()}

    def tokens(self, request: RequestObservation) -> float:
        """The tokens of prompts that were computed on its instance while this answer ran."""
        if request.decode not in self._ended or request.first_s is None or request.answer_s is None:
            return 0.0
        begins = request.arrived + request.first_s
        first, last = np.searchsorted(
            self._ended[request.decode][:, 0], [begins, begins + request.answer_s], side="right"
        )
        sums = self._tokens[request.decode]
        return float(sums[last] - sums[first])


def _unqueued(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """The line through the quicker half of what was measured: the others waited for something."""
    line = fit_line(points)
    if line is None:
        return None
    base, slope = line
    return fit_line([(x, y) for x, y in points if y <= base + slope * x]) or line


def share_within(observations: Sequence[RequestObservation], ttft_s: float, itl_s: float) -> float | None:
    """The share of streamed requests that were within both targets; None: there was none. Failed ones were not."""
    judged = [request for request in observations if request.streams and request.state != "running"]
    if not judged:
        return None
    within = sum(
        request.state == "done"
        and request.first_s is not None
        and request.first_s <= ttft_s
        and _keeps_itl(request, itl_s)
        for request in judged
    )
    return within / len(judged)
