"""How many instance-seconds does each rule of scaling take, and what share of the requests does it keep within targets?

    python benchmarks/autoscale.py --trace azure_2023_code.csv --from-s 0 --for-s 600 --speed 2

A trace runs on a simulated fleet: kvferry's router, HTTP, scheduler, block pool and connectors on a virtual clock, with
instances that start, drain and change their role while it runs. What is compared decides every five seconds:

    kvferry        fleet.scaling, from what the router reports
    static P+D     always the same; the cheapest that keeps the goal is looked for
    hpa            each role by its own busy share, to 70 %, as a HorizontalPodAutoscaler does
    ratio clamp    the same, and the ratio of P to D kept within 1:2 and 2:1 (Kthena)
    decode tps     D by the tokens that they give a second, P by a fixed ratio (HeteroScale)
    clairvoyant    kvferry's prediction, told the highest rate until a start that is begun now is done

The rules are written from their descriptions; the real programs are not run.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.messages.traffic import FleetPlan, TrafficReport
from kvferry.fleet.scaling.demand import Demand
from kvferry.fleet.scaling.measuring import Measuring
from kvferry.fleet.scaling.predictor import LatencyTargets
from kvferry.fleet.scaling.rules import Counts, Rules
from kvferry.fleet.scaling.scaler import Measured, ScalingMemory, Situation, decide
from kvferry.router.instances.membership import Declared
from kvferry.sim.engine import SimInstance, SimInstanceSpec
from kvferry.sim.traffic import Arrival, TracePrompt, faster, part_of, read_traffic
from kvferry.sim.world import TOKEN, RequestSpec, World, WorldSpec
from report import print_machine, save

INTERVAL_S, LOOK_S = 5.0, 1.0
START_S, DRAIN_S, COOL_DOWN_S = 30.0, 120.0, 120.0
TARGETS = LatencyTargets(ttft_s=1.0, itl_s=0.030)
GOAL, MOST = 0.99, 8
RULES = Rules(
    targets=TARGETS,
    least=Counts(1, 1),
    most=Counts(MOST, MOST),
    budget=2 * MOST,
    goal=GOAL,
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
    """The same prediction, and the cheapest for the highest rate until an instance that starts now has started; nothing
    is kept for longer."""

    def __init__(self, start: Counts, arrivals: Sequence[float]) -> None:
        super().__init__(start)
        self._arrivals = arrivals

    def _measured(self, seen: Seen) -> Measured:
        found = super()._measured(seen)
        until = seen.now + START_S + 2 * INTERVAL_S
        coming = [one for one in self._arrivals if seen.now - INTERVAL_S <= one < until]
        bins = [0.0] * max(1, round((until - seen.now + INTERVAL_S) / INTERVAL_S))
        for one in coming:
            bins[min(len(bins) - 1, int((one - seen.now + INTERVAL_S) / INTERVAL_S))] += 1
        return replace(found, demand=Demand([max(bins)] * 60, INTERVAL_S))

    def decide(self, seen: Seen) -> Counts:
        self._memory = msgspec.structs.replace(self._memory, changed_at=-1e18)
        return super().decide(seen)


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


@dataclass
class Member:
    instance: SimInstance
    role: str
    serves: bool = False
    draining_since: float | None = None
    busy_s: float = 0.0


class ScaledFleet:
    """A simulated fleet whose counts a rule decides."""

    def __init__(self, rule: Rule, start: Counts, arrivals: Sequence[Arrival]) -> None:
        self._rule, self._start, self._arrivals = rule, start, arrivals
        self._members: dict[str, Member] = {}
        self._wanted, self._number = start, 0
        self.instance_s = 0.0
        self.most = start
        self.num_starts = self.num_switches = 0

    def run(self) -> dict[str, Any]:
        """Returns figures."""
        begun = time.process_time()
        spec = WorldSpec(0, 0, instance=INSTANCE, router={"declared": True}, has_log=False)
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
                base = self._wall()
                self._rule._arrivals = [base + one.at_s for one in self._arrivals]
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
        within = sum(a <= TARGETS.ttft_s and b <= TARGETS.itl_s for a, b in zip(ttft, itl, strict=True))
        return {
            "requests": len(results),
            "complete": len(done),
            "within": within / len(results),
            "ttft_within": sum(one <= TARGETS.ttft_s for one in ttft) / len(results),
            "itl_within": sum(one <= TARGETS.itl_s for one in itl) / len(results),
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
                first_s + one.at_s, TracePrompt(one, number, 0, INSTANCE.vocab_size), one.answer_tokens, number
            )

    def _wall(self) -> float:
        return self._world.simulation.wall()

    # Members.

    def _add(self, role: str, start_s: float) -> None:
        name = f"{role}-{self._number}"
        self._number += 1
        self.num_starts += start_s > 0
        process = self._world.network.host(name).process(name)
        instance = SimInstance(name, "both", INSTANCE, process, 8000, TOKEN)
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


def compare(arrivals: Sequence[Arrival], start: Counts) -> dict[str, Any]:
    """Figures of each rule."""
    found: dict[str, Any] = {}

    def run(name: str, rule: Rule, begin: Counts = start) -> dict[str, Any]:
        figures = found[name] = ScaledFleet(rule, begin, arrivals).run()
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

    run("kvferry", Kvferry(start, replace(RULES, deflect=False)))
    run("kvferry, deflect = true", Kvferry(start))
    run("clairvoyant", Clairvoyant(start, ()))
    run("hpa", Hpa())
    run("ratio clamp", RatioClamp())
    best = start
    for best in (Counts(1, 1), Counts(2, 1), Counts(1, 2), Counts(2, 2), Counts(3, 1), Counts(3, 2), Counts(4, 2)):
        if run(f"static {best.prefill}+{best.decode}", Static(best), best)["within"] >= GOAL:
            break
    lasted_s = arrivals[-1].at_s
    tokens_per_s = sum(one.answer_tokens for one in arrivals) / lasted_s
    run("decode tps", DecodeTps(tokens_per_s / best.decode, best.prefill / best.decode))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--from-s", type=float, default=0.0)
    parser.add_argument("--for-s", type=float, default=600.0)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    print_machine()
    recorded = faster(read_traffic(options.trace), options.speed)
    arrivals = part_of(recorded, first_s=options.from_s, last_s=options.from_s + options.for_s)
    print(f"{len(arrivals)} requests in {options.for_s:g} s")
    found = compare(arrivals, Counts(2, 1))
    if options.save:
        settings = {**vars(options), "trace": options.trace.name, "ttft_s": TARGETS.ttft_s, "itl_s": TARGETS.itl_s}
        save("autoscale", {**settings, "goal": GOAL, "start_s": START_S}, found)


if __name__ == "__main__":
    main()
