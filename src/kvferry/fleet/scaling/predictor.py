"""The share of requests that would have been within their targets, for any number of prefill and decode instances.

The requests that came are replayed, with their arrivals and lengths: a prompt waits for the prefill instance that is
free first; answers share the decode instances evenly, and a step takes longer, the more of them run. So bursts count as
they were, however they are distributed. Prefill and decode are replayed apart: an answer begins when its prompt would
be computed if it did not wait.

Where decode instances also compute prompts (`from_tokens`), each is replayed by itself: in a step, it computes a chunk
of the first prompt that waits there, and each answer beside it waits for that.

Where prompts overflow, one that would be late from prefill is computed on a decode instance if it is in time there, by
the rule of the router; it counts as less than 1 by what it is expected to cost the answers beside it.

A request is within its ITL target if the mean time between its tokens is; with a single token, it is.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvferry.fleet.scaling.traffic import PhaseTimes, Vector, Workload
from kvferry.router.choice.disaggregation import answers_missed

ALL_WHOLE = math.inf
"""`from_tokens` of a fleet in which decode instances compute all prompts."""


@dataclass(frozen=True)
class LatencyTargets:
    """The targets of a request, in seconds: to its first token, and between two tokens in the mean."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True)
class Topology:
    """Numbers of instances of each role. Prompts of fewer than `from_tokens` uncached tokens are computed on decode
    instances; `ALL_WHOLE`: every prompt (aggregated serving)."""

    prefill: int
    decode: int
    from_tokens: float = 0.0

    @property
    def num_instances(self) -> int:
        """The number of instances of both roles."""
        return self.prefill + self.decode


@dataclass(frozen=True)
class Prediction:
    """Shares of requests, 0 to 1. `attained`: within both targets; `busiest`: the load of the busier role, as a share
    of its capacity (1 or more: its queue grows without end)."""

    attained: float
    ttft: float
    itl: float
    prefill_load: float
    decode_load: float

    @property
    def busiest(self) -> float:
        """The higher of the two loads."""
        return max(self.prefill_load, self.decode_load)


@dataclass(frozen=True)
class PoolPrediction:
    """The contribution of one pool: for each request, 1 if the pool keeps it within a target, else 0. `answers`: number
    of answers that run on each instance of the pool when the request arrives."""

    ttft: Vector
    itl: Vector
    load: float
    answers: Vector


class Predictor:
    """Predicts for one workload. A pool of each size is computed once: a fleet's prediction joins two.
    `overflows`: prompts that would be late from prefill go to decode, where no `from_tokens` is set."""

    def __init__(self, workload: Workload, times: PhaseTimes, targets: LatencyTargets, overflows: bool = False) -> None:
        self.workload, self.times, self.targets, self._overflows = workload, times, targets, overflows
        self._prefill: dict[tuple[int, float], PoolPrediction] = {}
        self._decode: dict[tuple[int, float], PoolPrediction] = {}
        self._overflow: dict[tuple[int, int], Vector] = {}

    def predict(self, topology: Topology) -> Prediction:
        """Predict the shares for a topology. Without a prefill instance, decode instances compute all prompts."""
        if not len(self.workload.arrivals):
            return Prediction(1.0, 1.0, 1.0, 0.0, 0.0)
        from_tokens = topology.from_tokens if topology.prefill else ALL_WHOLE
        p, d = self.prefill_pool(topology.prefill, from_tokens), self.decode_pool(topology.decode, from_tokens)
        in_time = p.ttft
        if self._overflows and not from_tokens and topology.decode and not in_time.all():
            in_time = self.overflow_ttft(topology.prefill, topology.decode)
        ttft, itl = in_time * d.ttft, p.itl * d.itl
        return Prediction(float((ttft * itl).mean()), float(ttft.mean()), float(itl.mean()), p.load, d.load)

    def prefill_pool(self, num: int, from_tokens: float) -> PoolPrediction:
        """Predict `num` prefill instances, which compute prompts of `from_tokens` and more."""
        key = (num, from_tokens)
        if key not in self._prefill:
            self._prefill[key] = self._prefills(num, from_tokens)
        return self._prefill[key]

    def decode_pool(self, num: int, from_tokens: float) -> PoolPrediction:
        """Predict `num` decode instances, which compute the shorter prompts as well."""
        key = (num, from_tokens)
        if key not in self._decode:
            self._decode[key] = self._decodes(num, from_tokens)
        return self._decode[key]

    def overflow_ttft(self, num_prefill: int, num_decode: int) -> Vector:
        """The contribution of each request's prompt if it may overflow. From prefill: the probability that it is in
        time, because the chunk with its end may hold parts of later prompts, which the router does not expect. From
        decode, if it is in time: 1 less the answers that are expected to miss their target because of it."""
        key = (num_prefill, num_decode)
        if key not in self._overflow:
            self._overflow[key] = self._with_overflow(num_prefill, num_decode)
        return self._overflow[key]

    @cached_property
    def _prefill_s(self) -> Vector:
        times = self.times
        return times.prefill_base_s + times.prefill_token_s * self.workload.prompt_tokens

    def _prefills(self, num: int, from_tokens: float) -> PoolPrediction:
        is_handed_off = self.workload.prompt_tokens >= from_tokens
        ttft, itl = np.ones(len(is_handed_off)), np.ones(len(is_handed_off))
        service = self._prefill_s[is_handed_off]
        busy_share = float(service.sum()) / self.workload.lasts_s
        load = busy_share / num if num else (math.inf if busy_share else 0.0)
        if not num:
            ttft[is_handed_off] = 0.0
        elif len(service):
            ttfts_s = waits(self.workload.arrivals[is_handed_off], service, num) + service + self.times.first_token_s
            ttft[is_handed_off] = ttfts_s <= self.targets.ttft_s
        return PoolPrediction(ttft, itl, load, np.zeros(len(is_handed_off)))

    def _with_overflow(self, num_prefill: int, num_decode: int) -> Vector:
        times, workload, ttft_s = self.times, self.workload, self.targets.ttft_s
        answers = self.decode_pool(num_decode, 0.0).answers
        step_s = times.decode_base_s + times.decode_sequence_s * (answers + 1.0)
        on_decode_s = self._prefill_s + step_s * np.ceil(workload.prompt_tokens / times.chunk_tokens)
        answer_tokens = float(workload.output_tokens.mean())
        prefill, decode = [-math.inf] * num_prefill, [-math.inf] * num_decode  # when each has no prompt left; heaps
        chunk_s = times.prefill_token_s * times.chunk_tokens
        shares = np.zeros(len(answers))
        for index, at in enumerate(workload.arrivals.tolist()):
            ends = max(at, prefill[0]) + float(self._prefill_s[index])
            decoded_at = max(at, decode[0]) + float(on_decode_s[index])
            in_time = ends + times.first_token_s - at <= ttft_s
            if not in_time and decoded_at - at <= ttft_s:
                missed = answers_missed(
                    self.targets.itl_s, float(step_s[index]), answer_tokens, float(answers[index]), decoded_at - at
                )
                if missed < 1.0:
                    shares[index] = 1.0 - missed
                    heapq.heapreplace(decode, decoded_at)
                    continue
            spare_s = ttft_s - (ends + times.first_token_s - at)
            # Measured times may be 0: prompts too short to take any on the clock.
            shares[index] = min(1.0, max(0.0, spare_s / chunk_s)) if chunk_s else float(spare_s >= 0.0)
            heapq.heapreplace(prefill, ends)
        return shares

    def _decodes(self, num: int, from_tokens: float) -> PoolPrediction:
        times, workload = self.times, self.workload
        whole = workload.prompt_tokens < from_tokens
        load = self._decode_load(num, whole)
        if not num:
            return PoolPrediction(np.where(whole, 0.0, 1.0), np.zeros(len(whole)), load, np.zeros(len(whole)))
        prompts = np.where(whole, workload.prompt_tokens, 0.0)
        begins = workload.arrivals + np.where(whole, 0.0, self._prefill_s)
        ttfts_s, answer_s = answer(begins, prompts, workload.output_tokens, num, times)
        begun = np.searchsorted(np.sort(begins), workload.arrivals, side="right")
        ended = np.searchsorted(np.sort(begins + ttfts_s + answer_s), workload.arrivals, side="right")
        ttfts_s += np.where(whole, 0.0, self._prefill_s + times.first_token_s)  # of those that wait for a place
        ttft = np.where(ttfts_s <= self.targets.ttft_s, 1.0, 0.0)
        answer_s += np.where(whole, 0.0, times.hand_off_s)
        itl = (answer_s <= self.targets.itl_s * workload.output_tokens) | (workload.output_tokens <= 1.0)
        return PoolPrediction(ttft, np.where(itl, 1.0, 0.0), load, (begun - ended) / num)

    def _decode_load(self, num: int, whole: NDArray[np.bool_]) -> float:
        """Share of the time that steps take in which as many answers run as can, and prompts."""
        times, workload = self.times, self.workload
        full_s = times.decode_base_s + times.decode_sequence_s * times.max_sequences
        asked_s = float(workload.output_tokens.sum()) * full_s / times.max_sequences
        asked_s += float(self._prefill_s[whole].sum())
        return asked_s / (workload.lasts_s * num) if num else math.inf


def waits(arrivals: Vector, service_s: Vector, num: int) -> Vector:
    """The waiting time of each request for the first free one of `num` servers, in the order of their arrival."""
    free_at = [-math.inf] * num
    waits_s = np.zeros(len(arrivals))
    for index, (at, seconds) in enumerate(zip(arrivals.tolist(), service_s.tolist(), strict=True)):
        begins = max(at, free_at[0])
        waits_s[index] = begins - at
        heapq.heapreplace(free_at, begins + seconds)
    return waits_s


def answer(begins: Vector, prompts: Vector, outputs: Vector, num: int, times: PhaseTimes) -> tuple[Vector, Vector]:
    """The seconds of each request until its first token and from there to its last, on `num` decode instances.
    `begins`: when each comes there; `prompts`: tokens to compute there, 0 if that was done elsewhere."""
    has_prompts = bool(prompts.any())
    pool = [_Decoding(times, 1) for _ in range(num)] if has_prompts else [_Decoding(times, num)]
    first_at, last_at = begins.copy(), np.zeros(len(begins))
    for index in np.argsort(begins, kind="stable").tolist():
        at = float(begins[index])
        for instance in pool:
            instance.advance(at, first_at, last_at)
        chosen = min(pool, key=lambda instance: instance.num) if has_prompts else pool[0]
        chosen.add(index, at, float(prompts[index]), float(outputs[index]))
    for instance in pool:
        instance.advance(math.inf, first_at, last_at)
    return first_at - begins, last_at - first_at


class _Decoding:
    """One decode instance, or `share` of them with the same steps, among which answers are spread evenly."""

    def __init__(self, times: PhaseTimes, share: int) -> None:
        self._times, self._share, self._max_running = times, share, times.max_sequences * share
        self._now = self._steps = 0.0
        """Steps until now: each gives each answer that runs a token."""
        self._running: list[tuple[float, int]] = []
        """(step of the last token, request), a heap."""
        self._waiting = deque[tuple[int, float]]()
        self._prompts = deque[list[float]]()
        """[request, tokens that are left, tokens of its answer, 1 if it has not begun]."""

    @property
    def num(self) -> int:
        """Number of requests on it."""
        return len(self._running) + len(self._waiting) + len(self._prompts)

    def add(self, index: int, at: float, prompt: float, output: float) -> None:
        """A request comes, now or while a step is made that began before."""
        if prompt:
            self._prompts.append([index, prompt, output, 1.0])
        else:
            self._run(index, output + (self._now < at))

    def _run(self, index: int, output: float) -> None:
        if len(self._running) < self._max_running:
            heapq.heappush(self._running, (self._steps + output, index))
        else:
            self._waiting.append((index, output))

    def _step_s(self) -> float:
        number = -(-len(self._running) // self._share)
        return self._times.decode_base_s + self._times.decode_sequence_s * number if number else 0.0

    def advance(self, until: float, first_at: Vector, last_at: Vector) -> None:
        """Advance to this time. A step with a part of a prompt is made as a whole, or not yet."""
        while self._prompts or self._running:
            step_s = self._step_s()
            if self._prompts:
                prompt = self._prompts[0]
                tokens = min(self._times.chunk_tokens, prompt[1])
                seconds = step_s + self._times.prefill_token_s * tokens + self._times.prefill_base_s * prompt[3]
                if self._now + seconds > until:
                    return
                self._now, self._steps = self._now + seconds, self._steps + 1.0
                prompt[1], prompt[3] = prompt[1] - tokens, 0.0
                if prompt[1] <= 0:
                    self._prompts.popleft()
                    first_at[int(prompt[0])] = self._now
                    self._run(int(prompt[0]), prompt[2])
            else:
                ends_at = self._now + max(0.0, self._running[0][0] - self._steps) * step_s
                if ends_at > until:
                    self._steps += (until - self._now) / step_s
                    break
                self._now, self._steps = ends_at, max(self._steps, self._running[0][0])
            while self._running and self._running[0][0] <= self._steps:
                last_at[heapq.heappop(self._running)[1]] = self._now
                if self._waiting:  # for a place, which its first token waits for, too
                    index, output = self._waiting.popleft()
                    first_at[index] = self._now
                    self._run(index, output)
        self._now = max(self._now, until) if until < math.inf else self._now
