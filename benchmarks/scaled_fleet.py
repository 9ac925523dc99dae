"""A simulated fleet whose counts a rule decides while it runs: kvferry's router, HTTP, scheduler, block pool and
connectors on a virtual clock, with instances that start, drain and change their role."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.core.messages.traffic import FleetPlan, TrafficReport
from kvferry.fleet.scaling.predictor import LatencyTargets
from kvferry.fleet.scaling.rules import Counts
from kvferry.router.instances.membership import Declared
from kvferry.sim.engine import SimInstance, SimInstanceSpec
from kvferry.sim.traffic import Arrival, TracePrompt
from kvferry.sim.world import TOKEN, RequestSpec, World, WorldSpec
from scaled_rules import DRAIN_S, INSTANCE, INTERVAL_S, START_S, Clairvoyant, Rule, Seen

LOOK_S = 1.0


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
        self.answered: list[tuple[float, float, float]] = []
        """(arrival, TTFT, ITL) of each request that was answered completely, in seconds."""
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
        self.answered = [(one.spec.at_s - first_s, a, b) for one, a, b in zip(done, ttft, itl, strict=True)]
        within = sum(a <= self._targets.ttft_s and b <= self._targets.itl_s for _, a, b in self.answered)
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
                is_last = sum(each.serves for each in self._of(role)) == 1
                if one.serves and not is_last and missing[role] < 0 < missing[other]:
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
        targets = self._rule.targets or LatencyTargets(0.0, 0.0)
        plan = FleetPlan({}, self._rule.from_tokens, ttft_s=targets.ttft_s, itl_s=targets.itl_s)
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
