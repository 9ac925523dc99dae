"""A simulation of the model that the predictor approximates, event by event: prompts queue at prefill instances, whose
steps compute parts of several of them, and answers get a token in each step of their decode instance, which may compute
chunks of prompts in the same steps."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import count
from random import Random

from kvferry.core.messages.traffic import RequestObservation
from kvferry.fleet.scaling.predictor import LatencyTargets, Topology
from kvferry.fleet.scaling.traffic import PhaseTimes, Workload
from kvferry.router.choice.disaggregation import meets_itl


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
    ends_at: float = math.inf
    computing: float = 0.0

    @property
    def num(self) -> int:
        return len(self.running) + len(self.waiting) + len(self.prompts)

    def begin(self, now: float) -> None:
        """A step, if there is anything to do."""
        times = self.times
        while self.waiting and len(self.running) < times.max_sequences:
            self.running.append(self.waiting.pop(0))
        self.computing, seconds = 0.0, 0.0
        if self.running:
            seconds += times.decode_base_s + times.decode_sequence_s * len(self.running)
        if self.prompts:
            first = self.prompts[0]
            self.computing = min(times.chunk_tokens, first.uncomputed)
            is_new = first.uncomputed == first.prompt
            seconds += times.prefill_token_s * self.computing + (times.prefill_base_s if is_new else 0.0)
        self.ends_at = now + seconds if self.running or self.prompts else math.inf

    def end(self, now: float) -> None:
        """The step is over."""
        for one in self.running:
            one.given += 1
            one.last_at = now
        self.running = [one for one in self.running if one.given < one.output]
        if self.prompts:
            first = self.prompts[0]
            first.uncomputed -= self.computing
            if first.uncomputed <= 0:
                self.prompts.pop(0)
                first.first_at = now
                self.waiting.append(first)
        self.begin(now)


def serve(
    times: PhaseTimes,
    topology: Topology,
    requests: list[tuple[float, float, int]],
    overflow: LatencyTargets | None = None,
) -> list[Request]:
    """All requests, in the order of their arrival, when they are over. Each is given as arrival, prompt tokens, output
    tokens. `overflow`: a prompt that would miss these targets on prefill goes to decode, as routers have it."""
    decodes = [DecodeInstance(f"d-{number}", times) for number in range(topology.decode)]
    prefills = [PrefillInstance(f"p-{number}", times) for number in range(topology.prefill)]
    made = [Request(at, prompt, output, uncomputed=prompt) for at, prompt, output in requests]
    typical = sum(output for _, _, output in requests) / len(requests)
    coming: list[tuple[float, int, Request]] = []
    number = count()

    def wait_s(p: PrefillInstance, now: float) -> float:
        return max(0.0, p.free_at - now) + times.prefill_token_s * p.left

    def overflows(one: Request, p: PrefillInstance) -> bool:
        if overflow is None:
            return False
        d = min(decodes, key=lambda one: one.num)
        own_s = times.prefill_base_s + times.prefill_token_s * one.prompt
        stall_s = own_s + times.prefill_token_s * sum(each.uncomputed for each in d.prompts)
        late = wait_s(p, one.arrived) + own_s + times.first_token_s > overflow.ttft_s
        step_s = times.decode_base_s + times.decode_sequence_s * (d.num + 1)
        return late and stall_s <= overflow.ttft_s and meets_itl(overflow.itl_s, step_s, typical, d.num, stall_s)

    for one in made:
        for each in (each for p in prefills for each in p.advance(one.arrived)):
            heapq.heappush(coming, (each.first_at, next(number), each))
        _answer_until(decodes, coming, one.arrived)
        p = min(prefills, key=lambda p: wait_s(p, one.arrived), default=None)
        if p is None or one.prompt < topology.from_tokens or overflows(one, p):
            heapq.heappush(coming, (one.arrived, next(number), one))
        else:
            p.add(one)
    for each in (each for p in prefills for each in p.advance(math.inf)):
        heapq.heappush(coming, (each.first_at, next(number), each))
    _answer_until(decodes, coming, math.inf)
    return made


def _answer_until(decodes: list[DecodeInstance], coming: list[tuple[float, int, Request]], until: float) -> None:
    """Answer what comes to decode before this time, and make the steps that end before it."""
    while True:
        next_d = min(decodes, key=lambda one: one.ends_at)
        if coming and coming[0][0] <= min(next_d.ends_at, until):
            now, _, request = heapq.heappop(coming)
            d = min(decodes, key=lambda one: one.num)
            request.decode = d.name
            (d.prompts if request.uncomputed else d.waiting).append(request)
            if d.ends_at == math.inf:
                d.begin(now)
        elif next_d.ends_at < until:
            next_d.end(next_d.ends_at)
        else:
            return


def simulate(
    times: PhaseTimes,
    targets: LatencyTargets,
    topology: Topology,
    requests: list[tuple[float, float, int]],
    overflows: bool = False,
) -> tuple[float, float, float]:
    """Shares of requests within both targets, within that of TTFT, and within that of ITL."""
    settled = serve(times, topology, requests, targets if overflows else None)[len(requests) // 10 :]
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
