"""Makes what a scaler decides by of what routers report. Owns what is known of the requests so far."""

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
    ROOM_UNKNOWN,
    DecodeCapacity,
    PhaseTimes,
    Vector,
    Workload,
    fit_answers,
    fit_line,
)

MAX_ASKED = 1024
"""Requests of each router that are looked at."""
LOOK_BACK_S = 3600
"""Older requests say nothing about those of now."""
MAX_KEPT = 4096
"""Requests of a fleet that are kept, the newest."""
_MAX_BINS = 4096
_MAX_ROUTERS = 256
_AHEAD_S = 5.0
"""How much a router's clock may be ahead, once clocks have been set."""
_MIN_TOKENS = 4
"""An answer of fewer says nothing about a step's time."""
_MIN_STEP_S = 1e-4
"""A step that seems to take less was not measured: there were only answers of the same length."""
_QUICK = 0.1
"""The share of hand-offs that waited for nothing on the decode instance."""
_UNSEEN_GROWTH = 0.01
"""Share of itself by which a step is taken to grow with each sequence, where only one number of them was seen."""

_Key = tuple[str, float, int]
"""The key of a request: its router, arrival and length."""


class TrafficMeter:
    """What is known of one fleet's requests. Times are in wall-clock seconds."""

    def __init__(self, bin_s: float, now: float) -> None:
        self._bin_s, self._began_at = bin_s, now
        self._num_arrived: dict[str, int] = {}
        """How many requests have arrived, by router, as each said last."""
        self._bins = deque[float](maxlen=_MAX_BINS)
        self._bin_began_at, self._last_arrival_at = now, now
        self._num_in_bin = 0.0
        self._num_waiting = 0
        self._known: dict[_Key, RequestObservation] = {}
        """Requests that did not fail, as they were reported last."""
        self._since, self._void = -math.inf, frozenset[_Key]()
        """Requests that arrived before, and those of these keys, were told of by a clock that has been set since."""
        self._is_warm: Callable[[RequestObservation], bool] = lambda one: True

    def clock_was_set(self, now: float) -> None:
        """The wall clock, which shows `now`, has made a step. What is known of requests cannot be compared with what is
        to come, and how many came without a pause is: nothing was idle meanwhile, and nothing came at once."""
        self._void |= self._known.keys()
        self._known.clear()
        self._began_at = self._bin_began_at = self._last_arrival_at = self._since = now

    def note(
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
        for router in list(self._num_arrived)[:-_MAX_ROUTERS]:  # one that does not answer now may do so again
            del self._num_arrived[router]
        self._num_waiting = sum(one.num_waiting for one in reports.values())
        requests = sorted((one for each in reports.values() for one in each.requests), key=lambda one: one.arrived)
        if is_first and reports:
            self._begin(requests, now)
        self._close_bins(now)
        self._keep(reports, now)
        self._is_warm = lambda one: _is_warm(one, ready_at, warm_s)

    def _keep(self, reports: Mapping[str, TrafficReport], now: float) -> None:
        until = math.inf if self._since == -math.inf else now + _AHEAD_S
        for router, report in reports.items():
            lately = (one for one in report.requests if self._since <= one.arrived <= until)
            found = (((router, one.arrived, one.prompt_tokens), one) for one in lately)
            self._known.update((key, one) for key, one in found if key not in self._void)
        newest = sorted(self._known.items(), key=lambda item: item[1].arrived)[-MAX_KEPT:]
        self._known = {key: one for key, one in newest if one.state != "failed"}

    def _begin(self, requests: Sequence[RequestObservation], now: float) -> None:
        """What came before this process looked: an earlier one was asked for it."""
        if not requests:
            return
        first = max(requests[0].arrived, now - _MAX_BINS * self._bin_s)
        num_bins = int((now - first) / self._bin_s)
        if num_bins > 0:
            counts, _ = np.histogram([one.arrived for one in requests], bins=num_bins, range=(first, now))
            self._bins.extend(map(float, counts))
        self._last_arrival_at = requests[-1].arrived
        self._bin_began_at, self._num_in_bin = now, 0.0

    def _close_bins(self, now: float) -> None:
        elapsed = now - self._bin_began_at
        if elapsed >= self._bin_s:
            number = min(int(elapsed / self._bin_s), _MAX_BINS)
            self._bins.extend([self._num_in_bin * self._bin_s / elapsed] * number)
            self._bin_began_at, self._num_in_bin = now, 0.0

    def attained(self, targets: LatencyTargets, since: float, now: float) -> TargetShare:
        """What was kept of the requests that arrived since then, of which it is known."""
        lately = [one for one in self._known.values() if one.arrived >= since and one.streams]
        judged = [found for one in lately if (found := _is_within(one, targets, now)) is not None]
        return TargetShare(sum(judged) / len(judged) if judged else 0.0, len(judged))

    def measured(self, room: DecodeCapacity, now: float, hold_s: float = 900.0) -> MeasuredTraffic:
        """What is known now. `room`: what one decode instance takes. `hold_s`: for how long a request counts."""
        demand = Demand(tuple(self._bins), self._bin_s)
        known = list(self._known.values())
        warm = [one for one in known if self._is_warm(one)][-MAX_ASKED:]
        times = phase_times(warm, room)
        workload = None
        if times is not None:
            first = known[0].arrived
            began = max(now - hold_s, first if len(known) == MAX_KEPT else min(first, self._began_at))
            lately = [one for one in known if one.arrived >= began] or known[-1:]
            workload = workload_of(lately, times, min(began, lately[0].arrived), now)
        num_known = sum(one.state == "done" for one in warm)
        return MeasuredTraffic(demand, num_known, workload, times, now - self._last_arrival_at, self._num_waiting)


def _is_within(one: RequestObservation, targets: LatencyTargets, now: float) -> bool | None:
    """Whether a request met both targets; None: that will show."""
    if one.first_s is None:
        return False if now - one.arrived > targets.ttft_s else None
    if one.first_s > targets.ttft_s:
        return False
    if one.state == "running":
        return None
    return _keeps_itl(one, targets.itl_s)


def _keeps_itl(one: RequestObservation, itl_s: float) -> bool:
    return one.output_tokens <= 1.0 or (one.answer_s or 0.0) <= itl_s * one.output_tokens


def _is_warm(one: RequestObservation, ready_at: Mapping[str, float], warm_s: float) -> bool:
    return all(one.arrived >= ready_at.get(name, -math.inf) + warm_s for name in (one.prefill, one.decode) if name)


def workload_of(known: Sequence[RequestObservation], times: PhaseTimes, began: float, now: float) -> Workload:
    """The workload of these requests, as they came between `began` and now."""
    found = zip((one.arrived for one in known), lengths(known, times, now), strict=True)
    return Workload.of(((at, prompt, output) for at, (prompt, output) in found), now - began, began)


def lengths(known: Sequence[RequestObservation], times: PhaseTimes, now: float) -> list[tuple[float, float]]:
    """(uncached prompt tokens, output tokens). An answer that is not over is as long as others, or as it must be by
    now: to leave out what is not over would leave out the long ones."""
    ended = [one.output_tokens for one in known if one.state == "done" and one.output_tokens]
    typical = float(np.mean(ended)) if ended else 1.0
    found = []
    for one in known:
        output = one.output_tokens
        if one.state == "running":
            runs_s = 0.0 if one.first_s is None else now - one.arrived - one.first_s
            step_s = times.decode_base_s + times.decode_sequence_s * max(1.0, one.beside)
            output = max(typical, runs_s / max(step_s, _MIN_STEP_S))
        found.append((float(one.uncached), output or typical))
    return found


def phase_times(known: Sequence[RequestObservation], room: DecodeCapacity = ROOM_UNKNOWN) -> PhaseTimes | None:
    """Lines through what was measured; None: something was not measured yet."""
    prefill = fit_line(_computed(known))
    if prefill is None:
        prefill = _unqueued([(one.uncached, one.first_s) for one in known if one.first_s is not None])
    answers = [one for one in known if one.answer_s and one.output_tokens >= _MIN_TOKENS]
    if prefill is None:
        return None
    answers = [one for one in answers if one.streams] or answers  # of the others, tokens are estimated
    beside = _beside(answers, known)
    decode = fit_answers(_decoded(answers, beside, _Stalls(known), prefill[1]))
    if decode is None:
        return None
    delay, base, growth = decode
    if np.ptp(beside) < 2.0:
        base, growth = (step := base + growth * float(np.mean(beside))), step * _UNSEEN_GROWTH
    hand_offs = [one.hand_off_s for one in known if one.hand_off_s is not None]
    mean_tokens = float(np.mean([one.prompt_tokens + one.output_tokens for one in known])) or 1.0
    return PhaseTimes(
        prefill_base_s=prefill[0],
        prefill_token_s=prefill[1],
        decode_base_s=base,
        decode_sequence_s=growth,
        first_token_s=float(np.quantile(hand_offs, _QUICK)) if hand_offs else 0.0,
        hand_off_s=delay,
        max_sequences=room.fits(mean_tokens),
    )


def _computed(known: Sequence[RequestObservation]) -> list[tuple[float, float]]:
    """(tokens, seconds) of each prompt. A step computes parts of several prompts, each of which then seems to take as
    long as all of them, so prompts that an instance computed without a pause count as their mean."""
    spans = []
    for one in known:
        if one.prefill_s is not None:
            ends = one.arrived + (one.prefill_s if one.first_s is None else one.first_s - (one.hand_off_s or 0.0))
            spans.append((one.prefill, ends - one.prefill_s, ends, one.uncached))
    found, together = list[tuple[float, float]](), list[int]()
    busy, began, ended = "", 0.0, -math.inf
    for name, begins, ends, tokens in [*sorted(spans), ("", math.inf, math.inf, 0)]:
        if name != busy or begins > ended:
            number = len(together)
            found += [(sum(together) / number, (ended - began) / number)] * number if number else []
            busy, began, ended, together = name, begins, ends, []
        ended = max(ended, ends)
        together.append(tokens)
    return found


def _beside(answers: Sequence[RequestObservation], known: Sequence[RequestObservation]) -> Vector:
    """How many answers ran on the instance of each, in the mean of its time. What routers report is that of two
    moments, and of one router; it is used where the times of some answers are not known, or too short."""
    if not all(one.streams for one in known):
        return np.array([one.beside for one in answers])
    spans: dict[str, list[tuple[float, float]]] = {}
    for one in known:
        if one.first_s is not None:
            begins = one.arrived + one.first_s
            ends = math.inf if one.answer_s is None else begins + one.answer_s
            spans.setdefault(one.decode, []).append((begins, ends))
    found = np.zeros(len(answers))
    first = np.array([one.arrived + (one.first_s or 0.0) for one in answers])
    last = first + np.array([one.answer_s or 0.0 for one in answers])
    names = np.array([one.decode for one in answers])
    for name, those in spans.items():
        begun, ended = np.sort(np.array(those), axis=0).T
        at = np.unique(np.concatenate([begun, ended[np.isfinite(ended)]]))
        running = np.searchsorted(begun, at, side="right") - np.searchsorted(ended, at, side="right")
        sums = np.concatenate([[0.0], (np.diff(at) * running[:-1]).cumsum()])
        here = names == name
        found[here] = np.interp(last[here], at, sums) - np.interp(first[here], at, sums)
    lasts = last - first  # none, of times since 1970, if it is below a microsecond
    means = np.array([one.beside for one in answers], dtype=float)
    np.divide(found, lasts, out=means, where=lasts > 0.0)
    return means


def _decoded(
    answers: Sequence[RequestObservation], beside: Vector, stalls: _Stalls, token_s: float
) -> list[tuple[float, float, float]]:
    """(tokens, answers beside, seconds) of each, without the time in which its instance computed prompts."""
    found = []
    for one, others in zip(answers, beside.tolist(), strict=True):
        assert one.answer_s is not None
        stalled_s = token_s * stalls.tokens(one)
        found.append((one.output_tokens, others, max(0.1 * one.answer_s, one.answer_s - stalled_s)))
    return found


class _Stalls:
    """Prompts that instances have computed beside their answers."""

    def __init__(self, known: Sequence[RequestObservation]) -> None:
        ended: dict[str, list[tuple[float, float]]] = {}
        for one in known:
            if one.first_s is not None:
                at = one.arrived + one.first_s
                ended.setdefault(one.prefill or one.decode, []).append((at, float(one.uncached)))
        self._ended = {name: np.array(sorted(those)) for name, those in ended.items()}
        self._tokens = {name: np.concatenate([[0.0], those[:, 1].cumsum()]) for name, those in self._ended.items()}

    def tokens(self, one: RequestObservation) -> float:
        """The tokens of prompts that were computed on its instance while this answer ran."""
        if one.decode not in self._ended or one.first_s is None or one.answer_s is None:
            return 0.0
        begins = one.arrived + one.first_s
        first, last = np.searchsorted(self._ended[one.decode][:, 0], [begins, begins + one.answer_s], side="right")
        sums = self._tokens[one.decode]
        return float(sums[last] - sums[first])


def _unqueued(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """The line through the quicker half of what was measured: the others waited for something."""
    line = fit_line(points)
    if line is None:
        return None
    base, slope = line
    return fit_line([(x, y) for x, y in points if y <= base + slope * x]) or line


def share_within(known: Sequence[RequestObservation], ttft_s: float, itl_s: float) -> float | None:
    """The share of streamed requests that were within both targets; None: there was none. Failed ones were not."""
    judged = [one for one in known if one.streams and one.state != "running"]
    if not judged:
        return None
    within = sum(
        one.state == "done" and one.first_s is not None and one.first_s <= ttft_s and _keeps_itl(one, itl_s)
        for one in judged
    )
    return within / len(judged)
