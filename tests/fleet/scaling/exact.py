"""A simulation of the model that the predictor approximates, event by event: prompts queue at prefill instances, whose
steps compute parts of several of them, and answers get a token in each step of their decode instance, which may compute
chunks of prompts in the same steps."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from random import Random

from kvferry.core.messages.traffic import RequestObservation
from kvferry.fleet.scaling.predictor import LatencyTargets, Topology
from kvferry.fleet.scaling.traffic import PhaseTimes, Workload


@dataclass
class Request:
    arrived: float
    prompt: float
    output: int
    prefill: str = ""
    decode: str = ""
    began_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    given: int = 0
    uncomputed: float = 0.0


@dataclass
class PrefillInstance:
    name: str
    times: PhaseTimes
    queue: list[Request] = field(default_factory=list)
    free_at: float = 0.0

    @property
    def left(self) -> float:
        return sum(one.uncomputed for one in self.queue)

    def advance(self, until: float) -> list[Request]:
        """Make the steps that begin before this time; returns the requests whose prompts they complete."""
        over = []
        while self.queue and self.free_at < until:
            room, seconds, ended = float(self.times.chunk_tokens), 0.0, []
            for one in self.queue:
                if room <= 0:
                    break
                if one.uncomputed == one.prompt:
                    one.began_at = self.free_at
                    seconds += self.times.prefill_base_s
                tokens = min(room, one.uncomputed)
                one.uncomputed -= tokens
                room -= tokens
                seconds += tokens * self.times.prefill_token_s
                if one.uncomputed <= 0:
                    ended.append(one)
            self.free_at += seconds
            self.queue = self.queue[len(ended) :]
            for one in ended:
                one.first_at = self.free_at
            over += ended
        return over

    def add(self, request: Request) -> None:
        if not self.queue:
            self.free_at = max(self.free_at, request.arrived)
        request.prefill = self.name
        self.queue.append(request)


@dataclass
class DecodeInstance:
    name: str
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


def serve(times: PhaseTimes, topology: Topology, requests: list[tuple[float, float, int]]) -> list[Request]:
    """All requests, in the order of their arrival, when they are over. Each is given as arrival, prompt tokens, output
    tokens."""
    decodes = [DecodeInstance(f"d-{number}", times) for number in range(topology.decode)]
    prefills = [PrefillInstance(f"p-{number}", times) for number in range(topology.prefill)]
    made = [Request(at, prompt, output, uncomputed=prompt) for at, prompt, output in requests]
    comes = []
    for one in made:
        if prefills and one.prompt >= topology.from_tokens:
            comes += [each for p in prefills for each in p.advance(one.arrived)]
            min(prefills, key=lambda p: max(0.0, p.free_at - one.arrived) + times.prefill_token_s * p.left).add(one)
        else:
            comes.append(one)
    comes += [each for p in prefills for each in p.advance(float("inf"))]
    events = [(one.first_at if one.prefill else one.arrived, number, one) for number, one in enumerate(comes)]
    heapq.heapify(events)
    num_over = 0
    while num_over < len(made):
        next_d = min(decodes, key=lambda one: one.ends_at)
        if events and events[0][0] <= next_d.ends_at:
            now, _, request = heapq.heappop(events)
            d = min(decodes, key=lambda one: one.num)
            request.decode = d.name
            (d.prompts if request.uncomputed else d.waiting).append(request)
            if d.ends_at == float("inf"):
                d.begin(now)
        else:
            num_over += len(next_d.end(next_d.ends_at))
    return made


def simulate(
    times: PhaseTimes, targets: LatencyTargets, topology: Topology, requests: list[tuple[float, float, int]]
) -> tuple[float, float, float]:
    """Shares of requests within both targets, within that of TTFT, and within that of ITL."""
    settled = serve(times, topology, requests)[len(requests) // 10 :]
    ttft = [one.first_at + times.first_token_s - one.arrived <= targets.ttft_s for one in settled]
    itl = [(one.last_at - one.first_at) / one.output <= targets.itl_s for one in settled]
    both = [one and other for one, other in zip(ttft, itl, strict=True)]
    return sum(both) / len(both), sum(ttft) / len(ttft), sum(itl) / len(itl)


def observed(
    times: PhaseTimes, topology: Topology, requests: list[tuple[float, float, int]], since: float
) -> list[RequestObservation]:
    """What a router would report of these requests, which began to arrive at `since`."""
    return [
        RequestObservation(
            since + one.arrived,
            round(one.prompt),
            round(one.prompt),
            state="done",
            streams=True,
            prefill=one.prefill,
            decode=one.decode,
            prefill_s=one.first_at - one.began_at if one.prefill else None,
            prefill_tokens=one.prompt if one.prefill else 0.0,
            first_s=one.first_at - one.arrived + times.first_token_s,
            hand_off_s=times.first_token_s if one.prefill else None,
            answer_s=one.last_at - one.first_at,
            output_tokens=one.output,
        )
        for one in serve(times, topology, requests)
    ]


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
