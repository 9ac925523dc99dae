"""A simulation of the model that the predictor approximates, event by event: prompts queue at prefill instances, and
answers get a token in each step of their decode instance, which may compute chunks of prompts in the same steps."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from random import Random

from kvferry.fleet.scaling.predictor import LatencyTargets, Topology
from kvferry.fleet.scaling.traffic import PhaseTimes, Workload


@dataclass
class Request:
    arrived: float
    prompt: float
    output: int
    first_at: float = 0.0
    last_at: float = 0.0
    given: int = 0
    uncomputed: float = 0.0


@dataclass
class DecodeInstance:
    times: PhaseTimes
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    prompts: list[Request] = field(default_factory=list)
    """In the order in which they are computed here."""
    ends_at: float = float("inf")
    computing: float = 0.0

    @property
    def num(self) -> int:
        return len(self.running) + len(self.waiting) + len(self.prompts)

    def begin(self, now: float) -> None:
        """A step, if there is anything to do."""
        times = self.times
        while self.waiting and len(self.running) < times.most_sequences:
            self.running.append(self.waiting.pop(0))
        self.computing, seconds = 0.0, 0.0
        if self.running:
            seconds += times.decode_base_s + times.decode_sequence_s * len(self.running)
        if self.prompts:
            first = self.prompts[0]
            self.computing = min(times.chunk_tokens, first.uncomputed)
            is_new = first.uncomputed == first.prompt
            seconds += times.prefill_token_s * self.computing + (times.prefill_base_s if is_new else 0.0)
        self.ends_at = now + seconds if self.running or self.prompts else float("inf")

    def end(self, now: float) -> list[Request]:
        """The step is over; returns those that have their last token."""
        for one in self.running:
            one.given += 1
            one.last_at = now
        over = [one for one in self.running if one.given >= one.output]
        self.running = [one for one in self.running if one.given < one.output]
        if self.prompts:
            first = self.prompts[0]
            first.uncomputed -= self.computing
            if first.uncomputed <= 0:
                self.prompts.pop(0)
                first.first_at = now
                self.waiting.append(first)
        self.begin(now)
        return over


def simulate(
    times: PhaseTimes,
    targets: LatencyTargets,
    topology: Topology,
    requests: list[tuple[float, float, int]],
) -> tuple[float, float, float]:
    """Shares of requests within both targets, within that of TTFT, and within that of ITL. `requests`: arrival, prompt
    tokens, output tokens."""
    decodes = [DecodeInstance(times) for _ in range(topology.decode)]
    free_at = [0.0] * topology.prefill
    events: list[tuple[float, int, Request]] = []
    for number, (at, prompt, output) in enumerate(requests):
        request = Request(at, prompt, output, uncomputed=prompt)
        if topology.prefill and prompt >= topology.from_tokens:
            begins = max(at, min(free_at))
            request.first_at = begins + times.prefill_base_s + times.prefill_token_s * prompt
            free_at[free_at.index(min(free_at))] = request.first_at
            request.uncomputed = 0.0
            heapq.heappush(events, (request.first_at, number, request))
        else:
            heapq.heappush(events, (at, number, request))
    over: list[Request] = []
    while len(over) < len(requests):
        next_d = min(decodes, key=lambda one: one.ends_at)
        if events and events[0][0] <= next_d.ends_at:
            now, _, request = heapq.heappop(events)
            d = min(decodes, key=lambda one: one.num)
            (d.prompts if request.uncomputed else d.waiting).append(request)
            if d.ends_at == float("inf"):
                d.begin(now)
        else:
            over += next_d.end(next_d.ends_at)
    settled = sorted(over, key=lambda one: one.arrived)[len(over) // 10 :]
    ttft = [one.first_at + times.first_token_s - one.arrived <= targets.ttft_s for one in settled]
    itl = [(one.last_at - one.first_at) / one.output <= targets.itl_s for one in settled]
    both = [one and other for one, other in zip(ttft, itl, strict=True)]
    return sum(both) / len(both), sum(ttft) / len(ttft), sum(itl) / len(itl)


def poisson(seed: int, rate: float, number: int, prompt: float, output: float) -> list[tuple[float, float, int]]:
    """Requests in a Poisson process; lengths are exponential beyond a small least one."""
    random = Random(seed)
    now, found = 0.0, []
    for _ in range(number):
        now += random.expovariate(rate)
        found.append((now, 16 + random.expovariate(1 / prompt), 8 + int(random.expovariate(1 / output))))
    return found


def even(rate: float, lengths: list[tuple[float, float]], number: int = 300) -> Workload:
    """These lengths over and over, in a Poisson process."""
    random, now, requests = Random(3), 0.0, []
    for place in range(number):
        now += random.expovariate(rate)
        requests.append((now, *lengths[place % len(lengths)]))
    return Workload.of(requests, now)
