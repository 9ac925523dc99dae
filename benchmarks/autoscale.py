"""How many instance-seconds does each rule of scaling take, and what share of the requests does it keep within targets?

    python benchmarks/autoscale.py --trace azure_2023_code.csv --from-s 0 --for-s 600 --speed 2
    python benchmarks/autoscale.py --trace sine --for-s 900 --rules kvferry hpa static

`--trace sine` and `--trace reasoning` are generated: a rate that goes from 1 to 8 requests a second and back in 900 s
(8,000 tokens in, 1,000 out, as in dynamo #10528), and long answers whose rate changes every two minutes.

A trace runs on a simulated fleet: kvferry's router, HTTP, scheduler, block pool and connectors on a virtual clock, with
instances that start, drain and change their role while it runs. What is compared decides every five seconds:

    kvferry        fleet.scaling, from what the router reports
    static P+D     always the same; from few to many until one keeps the goal
    hpa            each role by its own busy share, to 70 %, as a HorizontalPodAutoscaler does
    ratio clamp    the same, and the ratio of P to D kept within 1:2 and 2:1 (Kthena)
    decode tps     D by the tokens that they give a second, P by a fixed ratio (HeteroScale); both of the whole trace
    token velocity each role by the tokens that come for it a second, over what one instance does at most (TokenScale)
    clairvoyant    the cheapest for the requests that arrive until an instance that starts now is ready, and at once

The rules are written from their descriptions; the real programs are not run.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from kvferry.core.messages.traffic import FleetPlan, TrafficReport
from kvferry.fleet.scaling.demand import Demand
from kvferry.fleet.scaling.measuring import Measuring
from kvferry.fleet.scaling.predictor import LatencyTargets
from kvferry.fleet.scaling.rules import Counts, Rules
from kvferry.fleet.scaling.scaler import Measured, Outlook, ScalingMemory, Situation, decide
from kvferry.fleet.scaling.traffic import PhaseTimes, Workload
from kvferry.router.instances.membership import Declared
from kvferry.sim.engine import SimInstance, SimInstanceSpec
from kvferry.sim.traffic import BLOCK_TOKENS, Arrival, TracePrompt, faster, part_of, read_traffic
from kvferry.sim.world import TOKEN, RequestSpec, World, WorldSpec
from report import print_machine, save

RULES_HERE = ("kvferry", "deflect", "clairvoyant", "hpa", "clamp", "velocity", "static", "tps")
INTERVAL_S, LOOK_S = 5.0, 1.0
START_S, DRAIN_S, COOL_DOWN_S = 30.0, 120.0, 120.0
TARGETS = LatencyTargets(ttft_s=1.0, itl_s=0.030)
GOAL, MOST = 0.99, 8
TIMES = PhaseTimes(0.006, 40e-6, 0.004, 150e-6, first_token_s=0.003, most_sequences=128)
"""What the clairvoyant takes for granted until it was measured."""
RULES = Rules(
    targets=TARGETS,
    least=Counts(1, 1),
    most=Counts(MOST, MOST),
    budget=2 * MOST,
    goal=GOAL,
    deflect=False,
    switches=frozenset({("prefill", "decode"), ("decode", "prefill")}),
    cool_down_s=COOL_DOWN_S,
)
INSTANCE = SimInstanceSpec(num_blocks=4096, max_model_len=32768, has_contents=False, tokens_at_once=8)


@dataclass
class Seen:
    """What a rule may look at, since it was asked last."""

    now: float
    counts: Counts
    ready: Counts
    draining: int
    report: TrafficReport
    busy_prefill: float
    busy_decode: float
    decode_tokens_per_s: float


class Rule:
    """Decides counts, and from how many tokens prompts are disaggregated (None: the router does)."""

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

    def __init__(self, start: Counts, rules: Rules = RULES) -> None:
        self._rules = rules
        self._memory = ScalingMemory(start.prefill, start.decode)
        self._measuring: Measuring | None = None
        self.said: list[str] = []

    def _measured(self, seen: Seen) -> Measured:
        if self._measuring is None:
            self._measuring = Measuring(INTERVAL_S, seen.now)
        self._measuring.note({"router": seen.report}, {}, seen.now, 0.0)
        return self._measuring.measured(INSTANCE.num_blocks * INSTANCE.block_size, seen.now, INSTANCE.max_num_seqs)

    def decide(self, seen: Seen) -> Counts:
        situation = Situation(seen.ready, seen.draining, START_S)
        made = decide(self._rules, self._memory, self._measured(seen), situation, seen.now)
        if made.memory != self._memory:
            self.said.append(f"{seen.now:.0f} {made.what}: {made.why}")
        self._memory, self.from_tokens = made.memory, made.memory.from_tokens
        return made.memory.counts


class Clairvoyant(Kvferry):
    """Replays what will arrive until an instance that starts now is ready, and releases at once."""

    def __init__(self, start: Counts, rules: Rules, arrivals: Sequence[Arrival]) -> None:
        super().__init__(start, replace(rules, cool_down_s=0.0))
        self._requests = np.array(
            [
                (one.at_s, left, one.answer_tokens)
                for one, left in zip(arrivals, uncached(arrivals), strict=True)
            ]
        )  # fmt: skip
        self.base: float = 0.0
        """When the first one arrives."""

    def _measured(self, seen: Seen) -> Measured:
        found = super()._measured(seen)
        begins, lasts_s = seen.now - self.base - INTERVAL_S, START_S + 3 * INTERVAL_S
        here = self._requests[(self._requests[:, 0] >= begins) & (self._requests[:, 0] < begins + lasts_s)]
        workload = Workload(np.maximum(here[:, 0] - begins, 0.0), here[:, 1], here[:, 2], lasts_s)
        times = found.times or TIMES
        return replace(found, workload=workload, times=times, num_known=99, demand=Demand([0.0] * 60, INTERVAL_S))

    def decide(self, seen: Seen) -> Counts:
        self._memory = msgspec.structs.replace(self._memory, changed_at=-1e18)
        return super().decide(seen)


def uncached(arrivals: Sequence[Arrival]) -> list[float]:
    """Tokens of each prompt that no earlier one had."""
    known: set[int] = set()
    found = []
    for one in arrivals:
        found.append(max(1.0, one.prompt_tokens - BLOCK_TOKENS * sum(block in known for block in one.block_ids)))
        known.update(one.block_ids)
    return found


@dataclass
class Hpa(Rule):
    """As a HorizontalPodAutoscaler for each role: to a share of busy time, with its tolerance, and with the highest
    recommendation of the cool-down before anything is released."""

    target: float = 0.7
    tolerance: float = 0.1
    wanted: list[tuple[float, Counts]] = field(default_factory=list)

    def decide(self, seen: Seen) -> Counts:
        here = seen.counts
        new = Counts(
            self._of(here.prefill, seen.ready.prefill, seen.busy_prefill),
            self._of(here.decode, seen.ready.decode, seen.busy_decode),
        )
        return self._stabilised(seen, new)

    def _of(self, here: int, ready: int, busy: float) -> int:
        ratio = busy / self.target
        wanted = here if abs(ratio - 1) <= self.tolerance else math.ceil(max(1, ready) * ratio)
        return min(MOST, max(1, wanted))

    def _stabilised(self, seen: Seen, new: Counts) -> Counts:
        self.wanted = [one for one in self.wanted if one[0] > seen.now - COOL_DOWN_S] + [(seen.now, new)]
        return Counts(max(one.prefill for _, one in self.wanted), max(one.decode for _, one in self.wanted))


class RatioClamp(Hpa):
    """The same, with the ratio kept."""

    def decide(self, seen: Seen) -> Counts:
        found = super().decide(seen)
        prefill = max(found.prefill, math.ceil(found.decode / 2))
        return Counts(min(MOST, prefill), min(MOST, max(found.decode, math.ceil(prefill / 2))))


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
        lately = [one for one in seen.report.requests if one.arrived > seen.now - self._window_s]
        ended = [one.output_tokens for one in seen.report.requests if one.state == "done"]
        answer = sum(ended) / len(ended) if ended else 0.0
        prefill = sum(one.uncached for one in lately) / self._window_s / self._prefill_per_s
        decode = len(lately) * answer / self._window_s / self._decode_per_s
        wanted = (min(MOST, max(1, math.ceil(one))) for one in (prefill, decode))
        return self._stabilised(seen, Counts(*wanted))


@dataclass
class Member:
    instance: SimInstance
    role: str
    serves: bool = False
    draining_since: float | None = None
    busy_s: float = 0.0


class ScaledFleet:
    """A simulated fleet whose counts a rule decides."""

    def __init__(
        self,
        rule: Rule,
        start: Counts,
        arrivals: Sequence[Arrival],
        targets: LatencyTargets,
        instance: SimInstanceSpec = INSTANCE,
    ) -> None:
        self._rule, self._start, self._arrivals, self._targets = rule, start, arrivals, targets
        self._instance = instance
        self.answered: list[tuple[float, float]] = []
        """(TTFT, ITL) of each request that was answered completely, in seconds."""
        self._members: dict[str, Member] = {}
        self._wanted, self._number = start, 0
        self.instance_s = 0.0
        self.most = start
        self.num_starts = self.num_switches = 0

    def run(self) -> dict[str, Any]:
        """Returns figures."""
        begun = time.process_time()
        spec = WorldSpec(0, 0, instance=self._instance, router={"declared": True}, has_log=False)
        world = self._world = World(spec, 1)
        with world.running():
            for role, number in (("prefill", self._start.prefill), ("decode", self._start.decode)):
                for _ in range(number):
                    self._add(role, 0.0)
            while not all(one.serves for one in self._members.values()):
                self._pass(LOOK_S)
            self._pass(3.0)
            first_s = world.simulation.now
            self.instance_s = 0.0
            if isinstance(self._rule, Clairvoyant):
                self._rule.base = self._wall()
            world.submit(self._requests(first_s))
            decide_at = first_s
            until = first_s + self._arrivals[-1].at_s + 300.0
            while not world.is_done and world.simulation.now < until:
                if world.simulation.now >= decide_at:
                    self._decide()
                    decide_at += INTERVAL_S
                self._pass(LOOK_S)
            world.end()
        results = world.results
        done = [one for one in results if one.outcome == "complete"]
        ttft = [one.first_s or 0.0 for one in done]
        itl = [((one.end_s or 0.0) - (one.first_s or 0.0)) / max(1, one.num_tokens - 1) for one in done]
        self.answered = list(zip(ttft, itl, strict=True))
        within = sum(a <= self._targets.ttft_s and b <= self._targets.itl_s for a, b in self.answered)
        return {
            "requests": len(results),
            "complete": len(done),
            "within": within / len(results),
            "ttft_within": sum(one <= self._targets.ttft_s for one in ttft) / len(results),
            "itl_within": sum(one <= self._targets.itl_s for one in itl) / len(results),
            "instance_s": self.instance_s,
            "most": [self.most.prefill, self.most.decode],
            "starts": self.num_starts,
            "switches": self.num_switches,
            "errors": world.logged[:3],
            "cpu_s": time.process_time() - begun,
        }

    def _requests(self, first_s: float) -> Any:
        for number, one in enumerate(self._arrivals):
            yield RequestSpec(
                first_s + one.at_s, TracePrompt(one, number, 0, self._instance.vocab_size), one.answer_tokens, number
            )

    def _wall(self) -> float:
        return self._world.simulation.wall()

    # Members.

    def _add(self, role: str, start_s: float) -> None:
        name = f"{role}-{self._number}"
        self._number += 1
        self.num_starts += start_s > 0
        process = self._world.network.host(name).process(name)
        instance = SimInstance(name, "both", self._instance, process, 8000, TOKEN)
        self._members[name] = Member(instance, role)
        self._world.instances.append(instance)
        self._world.clients.call_later(start_s, instance.start)

    def _of(self, role: str) -> list[Member]:
        return [one for one in self._members.values() if one.role == role and one.draining_since is None]

    def _reconcile(self) -> None:
        """Roles change first, then instances start and drain; those that are drained are stopped."""
        wanted = {"prefill": self._wanted.prefill, "decode": self._wanted.decode}
        missing = {role: number - len(self._of(role)) for role, number in wanted.items()}
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            for one in self._of(role):
                if one.serves and missing[role] < 0 < missing[other]:
                    one.role = other
                    missing[role] += 1
                    missing[other] -= 1
                    self.num_switches += 1
        for role, number in missing.items():
            for _ in range(number):
                self._add(role, START_S)
            for one in sorted(self._of(role), key=lambda one: one.serves)[: max(0, -number)]:
                one.draining_since = self._world.simulation.now

    def _declare(self) -> None:
        declared = [
            Declared(name, "prefill" if one.role == "prefill" else "decode", one.instance.url,
                     draining=one.draining_since is not None)
            for name, one in self._members.items()
            if one.serves
        ]  # fmt: skip
        plan = FleetPlan({}, disaggregate_from=self._rule.from_tokens)
        text = msgspec.json.encode(plan).decode()
        self._world.routers[0].operate("declares", lambda membership: membership.declare(declared, text))

    def _pass(self, seconds: float) -> None:
        """Let time pass, and look after the members."""
        world = self._world
        before = world.simulation.now
        self._reconcile()
        for one in self._members.values():
            one.serves = one.serves or one.instance.engine is not None
        self._declare()
        world.run_until(lambda: world.is_done and bool(world.results), seconds)
        self.instance_s += len(self._members) * (world.simulation.now - before)
        router = world.routers[0].router
        assert router is not None
        drained = {one.name for one in router.services.pools.leaving if one.drained}
        for name, one in list(self._members.items()):
            since = one.draining_since
            if since is not None and (not one.serves or name in drained or world.simulation.now - since > DRAIN_S):
                del self._members[name]
                world.clients.call_soon(one.instance.stop)

    # Decisions.

    def _decide(self) -> None:
        router = self._world.routers[0].router
        assert router is not None
        text = router.services.chooser.traffic.encode(self._wall(), 3600, 1024)
        report = msgspec.json.decode(text, type=TrafficReport)
        ready = Counts(*(sum(one.serves for one in self._of(role)) for role in ("prefill", "decode")))
        lately = [one for one in report.requests if one.state == "done" and one.arrived > self._wall() - 60.0]
        seen = Seen(
            now=self._wall(),
            counts=self._wanted,
            ready=ready,
            draining=sum(one.draining_since is not None for one in self._members.values()),
            report=report,
            busy_prefill=self._busy("prefill"),
            busy_decode=self._busy("decode"),
            decode_tokens_per_s=sum(one.output_tokens for one in lately) / 60.0,
        )
        self._wanted = self._rule.decide(seen)
        self.most = Counts(max(self.most.prefill, self._wanted.prefill), max(self.most.decode, self._wanted.decode))

    def _busy(self, role: str) -> float:
        """The share of the time in which the instances of a role computed, since this was asked last."""
        here = [one for one in self._of(role) if one.serves and one.instance.executor is not None]
        total = 0.0
        for one in here:
            assert one.instance.executor is not None
            total += one.instance.executor.busy_s - one.busy_s
            one.busy_s = one.instance.executor.busy_s
        return total / (INTERVAL_S * len(here)) if here else 0.0


def compare(arrivals: Sequence[Arrival], start: Counts, rules: Rules, wanted: Sequence[str]) -> dict[str, Any]:
    """Figures of each rule."""
    found: dict[str, Any] = {}

    def run(name: str, rule: Rule, begin: Counts = start) -> dict[str, Any]:
        figures = found[name] = ScaledFleet(rule, begin, arrivals, rules.targets).run()
        if isinstance(rule, Kvferry):
            figures["said"] = rule.said
        print(
            f"{name:<16} {100 * figures['within']:>6.2f} % {figures['instance_s']:>8.0f} instance-s"
            f"  TTFT {100 * figures['ttft_within']:.1f} % ITL {100 * figures['itl_within']:.1f} %"
            f"  most {figures['most']}  starts {figures['starts']}  roles {figures['switches']}"
            f"  {figures['complete']}/{figures['requests']}  ({figures['cpu_s']:.0f} s CPU) {figures['errors']}",
            flush=True,
        )
        return figures

    if "kvferry" in wanted:
        run("kvferry", Kvferry(start, rules))
    if "deflect" in wanted:
        run("kvferry, deflect = true", Kvferry(start, replace(rules, deflect=True)))
    if "clairvoyant" in wanted:
        run("clairvoyant", Clairvoyant(start, rules, arrivals))
    if "hpa" in wanted:
        run("hpa", Hpa())
    if "clamp" in wanted:
        run("ratio clamp", RatioClamp())
    if "velocity" in wanted:
        run("token velocity", TokenVelocity(rules.targets))
    best = start
    if "static" in wanted:
        sizes = sorted((Counts(p, d) for p in range(1, 6) for d in range(1, 6)), key=lambda one: one.total)
        for best in _promising(arrivals, rules, sizes):
            if run(f"static {best.prefill}+{best.decode}", Static(best), best)["within"] >= GOAL:
                break
    if "tps" in wanted:
        tokens_per_s = sum(one.answer_tokens for one in arrivals) / arrivals[-1].at_s
        run("decode tps", DecodeTps(tokens_per_s / best.decode, best.prefill / best.decode))
    return found


def _promising(arrivals: Sequence[Arrival], rules: Rules, sizes: Sequence[Counts]) -> list[Counts]:
    """Of each number of instances the division that is expected to keep the most, where that is more than half."""
    requests = [
        (one.at_s, left, one.answer_tokens) for one, left in zip(arrivals, uncached(arrivals), strict=True)
    ]  # fmt: skip
    outlook = Outlook(rules, [Workload.of(requests, arrivals[-1].at_s)], TIMES)
    best: dict[int, Counts] = {}
    for one in sizes:
        before = best.get(one.total)
        if before is None or outlook.best(one).attained > outlook.best(before).attained:
            best[one.total] = one
    return [one for one in best.values() if outlook.best(one).attained > 0.5]


def generated(name: str, seed: int, for_s: float) -> list[Arrival]:
    """Poisson processes with a rate that changes."""
    random, now, found = Random(seed), 0.0, []
    most = 8.0 if name == "sine" else 3.0
    while (now := now + random.expovariate(most)) < for_s:
        if name == "sine":
            rate, prompt, output = 4.5 - 3.5 * math.cos(2 * math.pi * now / 900.0), 8000, 1000
        else:
            rate = 1.0 if int(now / 120.0) % 3 else 3.0
            prompt = min(8000, 16 + int(random.lognormvariate(6.0, 1.0)))
            output = min(6000, 50 + int(random.lognormvariate(7.0, 0.7)))
        if random.random() < rate / most:
            found.append(Arrival(now, prompt, output))
    return [replace(one, at_s=one.at_s - found[0].at_s) for one in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, help="a file, sine or reasoning")
    parser.add_argument("--from-s", type=float, default=0.0)
    parser.add_argument("--for-s", type=float, default=600.0)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="of a generated trace")
    parser.add_argument("--ttft-s", type=float, default=1.0)
    parser.add_argument("--itl-s", type=float, default=0.030)
    parser.add_argument("--rules", nargs="+", choices=RULES_HERE, default=RULES_HERE)
    parser.add_argument("--save", default="", help="a name for the results, autoscale_NAME")
    options = parser.parse_args()
    print_machine()
    if options.trace in ("sine", "reasoning"):
        arrivals = generated(options.trace, options.seed, options.for_s)
    else:
        recorded = faster(read_traffic(Path(options.trace)), options.speed)
        arrivals = part_of(recorded, first_s=options.from_s, last_s=options.from_s + options.for_s)
    print(f"{len(arrivals)} requests in {options.for_s:g} s")
    rules = replace(RULES, targets=LatencyTargets(options.ttft_s, options.itl_s))
    found = compare(arrivals, Counts(2, 1), rules, options.rules)
    if options.save:
        settings = {**vars(options), "trace": Path(options.trace).name}
        save(f"autoscale_{options.save}", {**settings, "goal": GOAL, "start_s": START_S}, found)


if __name__ == "__main__":
    main()
