"""The share of requests that will be within their targets, for any number of prefill and decode instances.

A prompt waits for one of the prefill instances: a queue with general arrivals and services (G/G/c). The probability
that it waits is Erlang's (C), and how long is exponential, with the mean of Allen and Cunneen. Answers share the decode
instances: a step takes longer, the more of them run, so their number follows from how long they stay (Little's law).
For Poisson arrivals, the distribution of that number is that of processor sharing with a rate which depends on the
number, which holds for lengths of any distribution (Cohen 1979).

Where a decode instance also computes prompts (`from_tokens`), each prompt stalls the answers beside it for as long as
its tokens take, and is itself slowed down by their steps.

A request is within its ITL target if the mean time between its tokens is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvferry.fleet.scaling.traffic import PhaseTimes, Vector, Workload

ALL_WHOLE = math.inf
"""`from_tokens` of a fleet in which decode instances compute all prompts."""


@dataclass(frozen=True)
class LatencyTargets:
    """A request's, in seconds: to its first token, and between two tokens in the mean."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True)
class Topology:
    """So many instances of each role. Prompts of fewer than `from_tokens` uncached tokens are computed on decode
    instances; `ALL_WHOLE`: every prompt (aggregated serving)."""

    prefill: int
    decode: int
    from_tokens: float = 0.0

    @property
    def num_instances(self) -> int:
        """Of both roles."""
        return self.prefill + self.decode


@dataclass(frozen=True)
class Prediction:
    """Shares of requests, 0 to 1. `attained`: within both targets; `busiest`: what the role with the most to do is
    asked for, as a share of what it can do (1 or more: its queue grows without end)."""

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
    """What one pool contributes: for each request the probability that the pool keeps it within a target."""

    ttft: Vector
    itl: Vector
    load: float


class Predictor:
    """Predicts for one workload. What a pool of some size does is computed once: a fleet's prediction joins two."""

    def __init__(self, workload: Workload, times: PhaseTimes, targets: LatencyTargets) -> None:
        self.workload, self.times, self.targets = workload, times, targets
        self._prefill: dict[tuple[int, float], PoolPrediction] = {}
        self._decode: dict[tuple[int, float], PoolPrediction] = {}

    def predict(self, topology: Topology) -> Prediction:
        """For one topology. Without a prefill instance, decode instances compute all prompts."""
        from_tokens = topology.from_tokens if topology.prefill else ALL_WHOLE
        p, d = self.prefill_pool(topology.prefill, from_tokens), self.decode_pool(topology.decode, from_tokens)
        ttft, itl = p.ttft * d.ttft, p.itl * d.itl
        return Prediction(float((ttft * itl).mean()), float(ttft.mean()), float(itl.mean()), p.load, d.load)

    def prefill_pool(self, num: int, from_tokens: float) -> PoolPrediction:
        """Of so many prefill instances, which compute prompts of `from_tokens` and more."""
        key = (num, from_tokens)
        if key not in self._prefill:
            self._prefill[key] = self._prefills(num, from_tokens)
        return self._prefill[key]

    def decode_pool(self, num: int, from_tokens: float) -> PoolPrediction:
        """Of so many decode instances, which compute the shorter prompts as well."""
        key = (num, from_tokens)
        if key not in self._decode:
            self._decode[key] = self._decodes(num, from_tokens)
        return self._decode[key]

    # Prefill.

    @cached_property
    def _prefill_s(self) -> Vector:
        times = self.times
        return times.prefill_base_s + times.prefill_token_s * self.workload.prompt_tokens

    def _prefills(self, num: int, from_tokens: float) -> PoolPrediction:
        here = self.workload.prompt_tokens >= from_tokens
        ttft, itl = np.ones(len(here)), np.ones(len(here))
        if not here.any():
            return PoolPrediction(ttft, itl, 0.0)
        service = self._prefill_s[here]
        wait = Wait.of(num, self.workload.rate * float(here.mean()), service, self.workload.burstiness)
        ttft[here] = wait.within(self.targets.ttft_s - service - self.times.first_token_s)
        return PoolPrediction(ttft, itl, wait.load)

    # Decode.

    def _decodes(self, num: int, from_tokens: float) -> PoolPrediction:
        times, workload, targets = self.times, self.workload, self.targets
        whole = workload.prompt_tokens < from_tokens
        stall = times.prefill_token_s * workload.prompt_tokens[whole]
        prompts_per_s = workload.rate * float(whole.mean()) / max(1, num)
        busy = prompts_per_s * float(stall.mean()) if len(stall) else 0.0
        running = Running.of(num, workload, times, busy)
        ttft = np.ones(len(whole))
        load = running.load
        if whole.any():
            steps = np.ceil(workload.prompt_tokens[whole] / times.chunk_tokens)
            service = self._prefill_s[whole] + np.maximum(1.0, steps) * running.mean_step_s
            # Answers that run there decide about a prompt's instance too, so its queue is neither one for all instances
            # nor one for each.
            shared = Wait.of(num, prompts_per_s * num, service, workload.burstiness)
            apart = Wait.of(min(num, 1), prompts_per_s, service, workload.burstiness)
            left_s = targets.ttft_s - service
            ttft[whole] = (shared.within(left_s) + apart.within(left_s)) / 2.0
            load = max(load, apart.load)
        delay_s = np.where(whole, 0.0, times.hand_off_s)
        return PoolPrediction(ttft, running.within(targets.itl_s, delay_s, prompts_per_s, stall), load)


@dataclass(frozen=True)
class Wait:
    """How long requests wait in a queue with several servers. `probability` that one waits at all; `mean_s` of those
    that do; `load`: of each server."""

    probability: float
    mean_s: float
    load: float

    @classmethod
    def of(cls, num_servers: int, rate: float, service_s: Vector, arrivals_cv2: float) -> Wait:
        """`service_s`: of typical requests. By Allen and Cunneen, whose mean is exact for M/M/c and M/G/1."""
        mean = float(service_s.mean())
        if num_servers < 1:
            return cls(1.0, math.inf, math.inf if rate > 0 else 0.0)
        load = rate * mean / num_servers
        if load >= 1.0:
            return cls(1.0, math.inf, load)
        service_cv2 = float(service_s.var()) / mean**2 if mean > 0 else 0.0
        mean_s = (arrivals_cv2 + service_cv2) / 2.0 * mean / (num_servers * (1.0 - load))
        return cls(erlang_c(num_servers, rate * mean), mean_s, load)

    def within(self, left_s: Vector) -> Vector:
        """For each request, the probability that it waits no longer than this; 0 where nothing is left."""
        if self.mean_s == math.inf:
            return np.zeros(len(left_s))
        waits = np.exp(-np.maximum(left_s, 0.0) / self.mean_s) if self.mean_s > 0 else np.zeros(len(left_s))
        within: Vector = np.where(left_s < 0, 0.0, 1.0 - self.probability * waits)
        return within


def erlang_c(num_servers: int, offered: float) -> float:
    """The probability that a customer of an M/M/c queue waits. `offered`: rate times service time, below
    `num_servers`."""
    blocked = 1.0  # Erlang's B, by its recursion
    for servers in range(1, num_servers + 1):
        blocked = offered * blocked / (servers + offered * blocked)
    load = offered / num_servers
    return blocked / (1.0 - load + load * blocked)


_EDGES = np.array([*np.linspace(0.0, 0.9, 37), *np.linspace(0.91, 0.99, 9), *np.linspace(0.991, 0.999, 9), 1.0])
"""Quantiles between which the number of running answers is taken to be one: finely where a target is decided."""
_MIDDLES, _WEIGHTS = (_EDGES[1:] + _EDGES[:-1]) / 2.0, np.diff(_EDGES)


@dataclass(frozen=True)
class Running:
    """The answers that run on the decode instances. `step_s`: how long a step takes, at each of `_MIDDLES` of the
    distribution that an arriving request meets; inf: more are there than can run. `busy`: share of the time that goes
    to prompts."""

    step_s: Vector
    mean_step_s: float
    output_tokens: Vector
    burstiness: float
    busy: float
    load: float

    @classmethod
    def of(cls, num: int, workload: Workload, times: PhaseTimes, busy: float) -> Running:
        """On `num` instances, among which the router spreads the answers evenly."""
        output = workload.output_tokens
        tokens_per_s = workload.rate * float(output.mean())
        most = times.most_sequences * num
        full_s = times.decode_base_s + times.decode_sequence_s * times.most_sequences
        rate = most / full_s * (1.0 - busy) if num and busy < 1.0 else 0.0
        load = tokens_per_s / rate if rate > 0 else (math.inf if tokens_per_s > 0 else 0.0)
        load = max(load, busy)
        if load >= 1.0:
            return cls(np.full(len(_MIDDLES), math.inf), full_s, output, workload.burstiness, min(busy, 1.0), load)
        num_states = most + math.ceil(8.0 / -math.log(max(load, 1e-3))) + 1
        states = np.arange(1, num_states + 1)
        running = np.minimum(states, most)
        step_s = times.decode_base_s + times.decode_sequence_s * np.ceil(running / num)
        weight = np.cumsum(np.log(max(tokens_per_s, 1e-12) * step_s / (1.0 - busy) / running))
        weight = np.concatenate([[0.0], weight])
        share = np.exp(weight - weight.max())
        below = np.cumsum(share / share.sum())
        found = np.minimum(np.searchsorted(below, _MIDDLES) + 1, num_states)  # itself included
        at = np.where(found > most, math.inf, step_s[found - 1])
        mean = float((np.where(found > most, step_s[-1], at) * _WEIGHTS).sum())
        return cls(at, mean, output, workload.burstiness, busy, load)

    def within(self, target_s: float, delay_s: Vector, prompts_per_s: float, stall_s: Vector) -> Vector:
        """For each request, the probability that its tokens follow each other fast enough. `delay_s`: before its first
        step. `stall_s`: how long typical
        prompts stop it that are computed on the same instance; `prompts_per_s` of them come there."""
        if self.load >= 1.0:
            return np.zeros(len(self.output_tokens))
        finite = np.isfinite(self.step_s)
        usual = float((self.step_s[finite] * _WEIGHTS[finite]).sum() / _WEIGHTS[finite].sum())
        # What a request meets at its arrival changes while it stays: the mean over its life varies less.
        life = self.output_tokens / float(self.output_tokens.mean())
        varies = 2.0 * (life - 1.0 + np.exp(-life)) / life**2 * (1.0 + self.burstiness) / 2.0
        steps = usual + np.sqrt(varies)[:, None] * (self.step_s[None, :] - usual)
        # What is left of a request's life, for others' prompts.
        left = (target_s - steps) * self.output_tokens[:, None] - delay_s[:, None]
        if not len(stall_s) or self.busy <= 0.0:
            return (left >= 0.0).astype(np.float64) @ _WEIGHTS
        lives = np.minimum(steps, 1e6) * self.output_tokens[:, None] / (1.0 - self.busy)
        return _stalled_within(left, lives * prompts_per_s, stall_s) @ _WEIGHTS


def _stalled_within(left: Vector, num_prompts: Vector, stall_s: Vector) -> Vector:
    """The probability that prompts which come in a Poisson process, so many in the mean, take no more than `left`
    seconds together: a compound Poisson distribution, whose part above 0 is taken to be a gamma distribution."""
    mean, square = float(stall_s.mean()), float((stall_s**2).mean())
    none = np.exp(-num_prompts)
    some = np.maximum(1.0 - none, 1e-12)
    mean_above = num_prompts * mean / some
    square_above = (num_prompts * square + (num_prompts * mean) ** 2) / some
    shape = mean_above**2 / np.maximum(square_above - mean_above**2, 1e-12 * mean_above**2 + 1e-30)
    within = none + some * _gamma_within(np.maximum(left, 0.0), shape, mean_above)
    found: Vector = np.where(left < 0.0, 0.0, within)
    return found


def _gamma_within(x: Vector, shape: Vector, mean: Vector) -> Vector:
    """The distribution function of a gamma distribution, by Wilson and Hilferty's normal approximation."""
    root = np.cbrt(np.divide(x, mean, out=np.full_like(x, 1e9), where=mean > 0))
    z = (root - (1.0 - 1.0 / (9.0 * shape))) * 3.0 * np.sqrt(shape)
    return _normal(z)


def _normal(z: Vector) -> Vector:
    """The standard normal distribution function, by the tanh approximation (off by less than 0.0003)."""
    found: Vector = 0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3)))
    return found


def quantiles_of(lengths: Vector, shares: Sequence[float]) -> list[float]:
    """Lengths below which these shares are, each once."""
    return sorted({float(np.ceil(one)) for one in np.quantile(lengths, shares)})
