"""A model of the fleet of `scaled_fleet.py`, event by event, with the same rules, starts, drains, changes of role and
times of steps: an hour of a trace takes seconds instead of an hour. Whoever changes the scaler tries it here on whole
traces, and then in the simulator on parts of them.

What it leaves out: HTTP, blocks and preemption, the time of messages and of KV on its way (`HAND_OFF_S` for all), and
what the router learns: it knows the times of steps from the start. A prompt joins a chunk when the chunk before it has
ended, and of several prompts that wait, one chunk takes as many as fit.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvferry.core.messages.traffic import RequestObservation, TrafficReport
from kvferry.fleet.scaling.predictor import LatencyTargets
from kvferry.fleet.scaling.scaling_rules import Counts
from kvferry.router.choice.cost import LinearFit
from kvferry.router.choice.disaggregation import meets_itl
from kvferry.sim.engine import SimInstanceSpec
from kvferry.sim.traffic import BLOCK_TOKENS, Arrival
from scaled_rules import DRAIN_S, INSTANCE, INTERVAL_S, START_S, Clairvoyant, Rule, Seen

HAND_OFF_S, FIRST_S = 0.004, 0.004
"""KV from P to D; what a first token takes beside prefill."""
MIN_HAND_OFFS = 32
"""After which the router computes prompts on decode instances where that is faster."""
LOOKS_BACK = 1024
"""Requests that the router reports."""


@dataclass
class Request:
    """One of the trace, and what the router notes of it. `left`: tokens of its prompt that are to be computed."""

    arrival: Arrival
    seen: RequestObservation
    left: float = 0.0
    to: Engine | None = None
    """Where it decodes, if that is not where its prompt is computed."""
    began_s: float = 0.0
    first_s: float = 0.0
    end_s: float | None = None


@dataclass
class Engine:
    """One instance: in a step, each running answer gets a token, and a chunk of the prompts that wait is computed."""

    name: str
    role: str
    spec: SimInstanceSpec
    ready_s: float
    draining_since: float | None = None
    prompts: deque[Request] = field(default_factory=deque)
    running: list[tuple[float, int, Request]] = field(default_factory=list)
    """(step of the last token, number, request), a heap."""
    waiting: deque[Request] = field(default_factory=deque)
    """For a place in the batch, or for KV memory."""
    coming: int = 0
    """Answers whose prompts are computed elsewhere."""
    now: float = 0.0
    steps: float = 0.0
    kv_tokens: float = 0.0
    step_ends: float | None = None
    """Of the step with a chunk that is under way."""
    chunk: list[tuple[Request, float]] = field(default_factory=list)
    version: int = 0
    busy_s: float = 0.0
    told_busy_s: float = 0.0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _number: Any = field(default_factory=count)

    @property
    def is_empty(self) -> bool:
        """True if no request waits for it."""
        return not (self.prompts or self.running or self.waiting or self.chunk or self.coming)

    @property
    def num_answers(self) -> int:
        """That run, wait or will come."""
        return len(self.running) + len(self.waiting) + self.coming

    @property
    def queued_tokens(self) -> float:
        """Of prompts that are not computed yet."""
        return sum(request.left for request in self.prompts) + sum(number for _, number in self.chunk)

    def cached(self, arrival: Arrival) -> int:
        """Tokens of the prompt that are in the prefix cache."""
        num_cached = 0
        for block in arrival.block_ids:
            if block not in self.cache:
                break
            num_cached += 1
        return min(arrival.prompt_tokens - 1, num_cached * BLOCK_TOKENS)

    def keep(self, arrival: Arrival) -> None:
        """Its blocks are the newest ones of the prefix cache."""
        for block in arrival.block_ids:
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) * BLOCK_TOKENS > self.spec.num_blocks * self.spec.block_size:
            self.cache.popitem(last=False)

    def _step_s(self) -> float:
        times = self.spec.times
        number = len(self.running)
        return times.base_s + times.decode_sequence_s * number + times.context_token_s * self.kv_tokens

    def add_prompt(self, now: float, request: Request) -> None:
        """To be computed here."""
        self._go_on(now)
        self.prompts.append(request)
        if self.step_ends is None:
            self._begin_chunk(now)

    def add_answer(self, now: float, request: Request) -> None:
        """Its KV is here; it decodes from the next step on."""
        self._go_on(now)
        self.waiting.append(request)
        self._admit()

    def _admit(self) -> None:
        most_tokens = self.spec.num_blocks * self.spec.block_size
        while self.waiting and len(self.running) < self.spec.max_num_seqs:
            request = self.waiting[0]
            tokens = request.arrival.prompt_tokens + request.arrival.answer_tokens
            if self.running and self.kv_tokens + tokens > most_tokens:
                return
            self.waiting.popleft()
            self.kv_tokens += tokens
            request.seen.beside = len(self.running) + 1.0
            begins = self.steps + (self.step_ends is not None)
            heapq.heappush(self.running, (begins + request.arrival.answer_tokens - 1, next(self._number), request))

    def _begin_chunk(self, now: float) -> None:
        budget = float(self.spec.max_num_batched_tokens)
        self.chunk = []
        while self.prompts and budget > 0:
            request = self.prompts[0]
            request.began_s = request.began_s or now
            tokens = min(budget, request.left)
            budget -= tokens
            request.left -= tokens
            self.chunk.append((request, tokens))
            if request.left > 0:
                break
            self.prompts.popleft()
        if not self.chunk:
            self.step_ends = None
            return
        times, tokens = self.spec.times, sum(number for _, number in self.chunk)
        seconds = (self._step_s() if self.running else times.base_s) + times.prefill_token_s * tokens
        seconds += times.context_token_s * sum(request.arrival.prompt_tokens for request, _ in self.chunk)
        self.step_ends, self.busy_s = now + seconds, self.busy_s + seconds

    def next_s(self) -> float | None:
        """When it is to be looked at again."""
        if self.step_ends is not None:
            return self.step_ends
        if self.running:
            return self.now + max(0.0, self.running[0][0] - self.steps) * self._step_s()
        return None

    def _go_on(self, until: float) -> None:
        """Steps that only decode, or parts of them."""
        if self.step_ends is not None:
            return
        if self.running:
            seconds = until - self.now
            self.steps += seconds / self._step_s()
            self.busy_s += seconds
        self.now = until

    def advance(self, until: float) -> tuple[list[Request], list[Request]]:
        """Go on to this time, at most to `next_s`. Returns the requests whose prompts are computed, and those that have
        their last token."""
        computed: list[Request] = []
        if self.step_ends is not None:
            if self.step_ends > until:
                return [], []
            until, self.steps = self.step_ends, self.steps + 1.0
            computed = [request for request, _ in self.chunk if request.left <= 0]
            self.now = until
        else:
            self._go_on(until)
        over = []
        while self.running and self.running[0][0] <= self.steps + 1e-6:
            request = heapq.heappop(self.running)[2]
            self.kv_tokens -= request.arrival.prompt_tokens + request.arrival.answer_tokens
            over.append(request)
        self._admit()
        if self.step_ends is not None:
            self._begin_chunk(until)
        return computed, over


class ScaledModel:
    """Takes what `ScaledFleet` takes, and returns the same figures."""

    def __init__(
        self,
        rule: Rule,
        start: Counts,
        arrivals: Sequence[Arrival],
        targets: LatencyTargets,
        instance: SimInstanceSpec = INSTANCE,
    ) -> None:
        self._rule, self._arrivals, self._targets, self._spec = rule, arrivals, targets, instance
        self.answered: list[tuple[float, float, float]] = []
        """(arrival, TTFT, ITL) of each request that was answered, in seconds."""
        self._engines: dict[str, Engine] = {}
        self._number = self.num_starts = self.num_switches = 0
        self._wanted = self.most = start
        self._events: list[tuple[float, int, str, Any, int]] = []
        self._order = count()
        self._requests: list[Request] = []
        self._answer_tokens = 256.0
        self._decode = LinearFit(base=0.02, slope=2e-5, reach=32)
        self._num_over = 0
        self.instance_s = self._counted_until = 0.0

    def run(self) -> dict[str, Any]:
        """Returns figures."""
        begun = time.process_time()
        if isinstance(self._rule, Clairvoyant):
            self._rule.base = 0.0
        for role, number in (("prefill", self._wanted.prefill), ("decode", self._wanted.decode)):
            for _ in range(number):
                self._add(role, 0.0, 0.0)
        for arrival in self._arrivals:
            self._at(arrival.at_s, "arrive", arrival)
        self._at(0.0, "decide", None)
        self._at(0.0, "look", None)
        while self._num_over < len(self._arrivals) and self._events:
            now, _, what, about, version = heapq.heappop(self._events)
            if now > self._arrivals[-1].at_s + 300.0:
                break
            match what:
                case "arrive":
                    self._arrive(now, about)
                case "engine":
                    if about.version == version:
                        self._advance(now, about)
                case "answer":
                    about.to.coming -= 1
                    about.to.add_answer(now, about)
                    self._arm(about.to)
                case "decide":
                    self._decide(now)
                    self._at(now + INTERVAL_S, "decide", None)
                case _:
                    self._look(now)
                    self._at(now + 1.0, "look", None)
        self._count(now)
        return self._figures(time.process_time() - begun)

    def _figures(self, cpu_s: float) -> dict[str, Any]:
        done = [request for request in self._requests if request.end_s is not None]
        for request in done:
            assert request.end_s is not None
            itl = (request.end_s - request.first_s) / max(1, request.arrival.answer_tokens - 1)
            self.answered.append((request.arrival.at_s, request.first_s - request.arrival.at_s, itl))
        within = sum(a <= self._targets.ttft_s and b <= self._targets.itl_s for _, a, b in self.answered)
        number = len(self._arrivals)
        return {
            "requests": number,
            "complete": len(done),
            "within": within / number,
            "ttft_within": sum(ttft_s <= self._targets.ttft_s for _, ttft_s, _ in self.answered) / number,
            "itl_within": sum(itl_s <= self._targets.itl_s for _, _, itl_s in self.answered) / number,
            "instance_s": self.instance_s,
            "most": [self.most.prefill, self.most.decode],
            "starts": self.num_starts,
            "switches": self.num_switches,
            "errors": [],
            "cpu_s": cpu_s,
        }

    # Events.

    def _at(self, when: float, what: str, about: Any, version: int = 0) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, about, version))

    def _arm(self, engine: Engine) -> None:
        engine.version += 1
        when = engine.next_s()
        if when is not None:
            self._at(when, "engine", engine, engine.version)

    def _advance(self, now: float, engine: Engine) -> None:
        computed, over = engine.advance(now)
        for request in computed:
            request.first_s = now + FIRST_S
            seen = request.seen
            seen.first_s, seen.hand_off_s = request.first_s - request.arrival.at_s, FIRST_S
            if request.to is engine or request.to is None:
                engine.add_answer(now, request)
            else:
                seen.prefill_s = now - request.began_s
                self._at(now + HAND_OFF_S, "answer", request)
        for request in over:
            self._over(now, request, engine)
        self._arm(engine)

    def _over(self, now: float, request: Request, about: Engine) -> None:
        request.end_s = max(now, request.first_s)
        request.seen.state, request.seen.answer_s = "done", request.end_s - request.first_s
        request.seen.output_tokens = float(request.arrival.answer_tokens)
        self._num_over += 1
        request.seen.beside = (request.seen.beside + about.num_answers) / 2
        self._decode.add(request.seen.beside, request.seen.answer_s / request.arrival.answer_tokens)
        self._answer_tokens += 0.05 * (request.arrival.answer_tokens - self._answer_tokens)

    # The router.

    def _of(self, role: str, now: float) -> list[Engine]:
        return [
            engine
            for engine in self._engines.values()
            if engine.role == role and engine.ready_s <= now and engine.draining_since is None
        ]

    def _arrive(self, now: float, arrival: Arrival) -> None:
        prefills, decodes = self._of("prefill", now), self._of("decode", now)
        token_s = self._spec.times.prefill_token_s
        prefill = min(
            prefills, key=lambda engine: engine.queued_tokens + arrival.prompt_tokens - engine.cached(arrival)
        )
        decode = self._least_busy(decodes)
        left = arrival.prompt_tokens - prefill.cached(arrival)
        whole_left = arrival.prompt_tokens - decode.cached(arrival)
        if self._rule.from_tokens is not None:
            is_whole = whole_left < self._rule.from_tokens
        else:
            stalled = 1 + decode.num_answers
            alone = token_s * (decode.queued_tokens + whole_left + whole_left * stalled)
            apart = token_s * (left + prefill.queued_tokens) + HAND_OFF_S + FIRST_S
            is_whole = alone < apart
            if self._rule.targets is not None:
                first_s = token_s * (decode.queued_tokens + whole_left)
                step_s = self._decode.at(decode.num_answers + 1)
                is_whole = is_whole or first_s <= self._rule.targets.ttft_s < apart
                is_whole = is_whole and meets_itl(
                    self._rule.targets.itl_s, step_s, self._answer_tokens, decode.num_answers, first_s
                )
            is_whole = is_whole and len(self._requests) >= MIN_HAND_OFFS
            may_answer = not is_whole and len(self._requests) >= MIN_HAND_OFFS
            if may_answer and (chosen := self._answers_at_prefill(arrival, prefills, decodes)) is not None:
                is_whole, decode, whole_left = True, chosen, arrival.prompt_tokens - chosen.cached(arrival)
        engine, tokens = (decode, whole_left) if is_whole else (prefill, left)
        seen = RequestObservation(
            now, arrival.prompt_tokens, int(tokens), streams=True, decode=decode.name,
            prefill="" if is_whole else prefill.name, prefill_tokens=0.0 if is_whole else float(tokens),
        )  # fmt: skip
        request = Request(arrival, seen, float(tokens), None if is_whole else decode)
        if not is_whole:
            decode.coming += 1
        self._requests.append(request)
        engine.keep(arrival)
        engine.add_prompt(now, request)
        self._arm(engine)

    def _least_busy(self, engines: Sequence[Engine]) -> Engine:
        """For a whole request, or for an answer."""
        token_s = self._spec.times.prefill_token_s
        interference_s = 2.0 * self._spec.times.decode_sequence_s * self._answer_tokens
        return min(engines, key=lambda engine: token_s * engine.queued_tokens + interference_s * engine.num_answers)

    def _answers_at_prefill(
        self, arrival: Arrival, prefills: Sequence[Engine], decodes: Sequence[Engine]
    ) -> Engine | None:
        """The prefill instance that is to answer itself, because no decode instance keeps the targets and it does."""
        targets, step = self._rule.targets, self._decode
        if targets is None or step.at(min(engine.num_answers for engine in decodes) + 1) <= targets.itl_s:
            return None
        token_s = self._spec.times.prefill_token_s
        candidate = self._least_busy(prefills)
        first_s = token_s * (candidate.queued_tokens + arrival.prompt_tokens - candidate.cached(arrival))
        step_s = step.at(candidate.num_answers + 1)
        keeps = meets_itl(targets.itl_s, step_s, self._answer_tokens, candidate.num_answers, first_s)
        return candidate if keeps and first_s <= targets.ttft_s else None

    # Members.

    def _add(self, role: str, now: float, start_s: float) -> None:
        name = f"{role}-{self._number}"
        self._number += 1
        self.num_starts += start_s > 0
        self._engines[name] = Engine(name, role, self._spec, now + start_s, now=now)

    def _staying(self, role: str) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.role == role and engine.draining_since is None]

    def _look(self, now: float) -> None:
        """As `ScaledFleet` does each second."""
        self._count(now)
        desired = {"prefill": self._wanted.prefill, "decode": self._wanted.decode}
        missing = {role: number - len(self._staying(role)) for role, number in desired.items()}
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            for engine in self._staying(role):
                is_last = len(self._of(role, now)) == 1
                if engine.ready_s <= now and not is_last and missing[role] < 0 < missing[other]:
                    engine.role = other
                    missing[role] += 1
                    missing[other] -= 1
                    self.num_switches += 1
        for role, number in missing.items():
            for _ in range(number):
                self._add(role, now, START_S)
            for surplus in sorted(self._staying(role), key=lambda engine: engine.ready_s <= now)[: max(0, -number)]:
                surplus.draining_since = now
        for name, engine in list(self._engines.items()):
            since = engine.draining_since
            if since is not None and (engine.ready_s > now or engine.is_empty or now - since > DRAIN_S):
                del self._engines[name]

    def _count(self, now: float) -> None:
        self.instance_s += len(self._engines) * (now - self._counted_until)
        self._counted_until = now

    def _decide(self, now: float) -> None:
        requests = [request.seen for request in self._requests[-LOOKS_BACK:]]
        lately = [request for request in requests if request.state == "done" and request.arrived > now - 60.0]
        self._wanted = self._rule.decide(
            Seen(
                now=now,
                counts=self._wanted,
                ready=Counts(len(self._of("prefill", now)), len(self._of("decode", now))),
                draining=sum(engine.draining_since is not None for engine in self._engines.values()),
                report=TrafficReport(now, len(self._requests), 0, requests),
                busy_prefill=self._busy("prefill", now),
                busy_decode=self._busy("decode", now),
                decode_tokens_per_s=sum(request.output_tokens for request in lately) / 60.0,
            )
        )
        self.most = Counts(max(self.most.prefill, self._wanted.prefill), max(self.most.decode, self._wanted.decode))

    def _busy(self, role: str, now: float) -> float:
        engines, total = self._of(role, now), 0.0
        for engine in engines:
            total += engine.busy_s - engine.told_busy_s
            engine.told_busy_s = engine.busy_s
        return total / (INTERVAL_S * len(engines)) if engines else 0.0
