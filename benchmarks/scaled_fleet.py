"""A simulated fleet whose counts a rule decides while it runs. kvferry's rule is the `[scale]` of the fleet's spec;
what others decide is applied as a changed spec. Starts, drains, changes of roles and what routers are told are the work
of kvferry's own controller (`kvferry.sim.fleet`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from kvferry.core.messages.traffic import TrafficReport
from kvferry.fleet.control.facts import RoleStatus
from kvferry.fleet.scaling.predictor import LatencyTargets
from kvferry.fleet.scaling.scaling_rules import DECODE, PREFILL, Counts
from kvferry.fleet.spec.fleet_spec import DesiredFleet, fleet_from
from kvferry.sim.engine import SimInstanceSpec
from kvferry.sim.fleet import FleetWorld
from kvferry.sim.replay import TraceReplay
from kvferry.sim.targets import Targets
from kvferry.sim.traffic import Arrival
from kvferry.sim.world import World, WorldSpec
from scaled_rules import DRAIN_S, INSTANCE, INTERVAL_S, RULES, START_S, Clairvoyant, Kvferry, Rule, Seen

ROLES = (PREFILL, DECODE)


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
        self._rule, self._targets, self._decide_at = rule, targets, 0.0
        self._is_followed = isinstance(rule, Kvferry) and not isinstance(rule, Clairvoyant)
        router = {} if rule.from_tokens is None else {"disaggregate_from": str(rule.from_tokens)}
        kind = replace(instance, start_s=START_S, takes_any_role=True)
        spec = WorldSpec(instance=kind, router=router, logs_events=False)
        self._replay = TraceReplay(spec, arrivals, seed=1, fleet=self._fleet(start), on_sample=self._look)
        self._roles: dict[str, str] = {}
        """The role of each instance when it was looked at last."""
        self._busy_s: dict[str, float] = {}
        self._most = start
        self._num_starts = self._num_switches = 0

    @property
    def answered(self) -> list[tuple[float, float, float]]:
        """(arrival, TTFT, ITL) of each request that was answered completely, in seconds."""
        return [
            (result.at_s, result.ttft_s, (result.e2e_s - result.ttft_s) / max(1, result.num_tokens - 1))
            for result in self._replay.completed_requests
        ]

    def run(self) -> dict[str, Any]:
        """Returns figures."""
        begun, targets = time.process_time(), self._targets
        figures = self._replay.run(Targets(ttft=targets.ttft_s, itl=targets.itl_s))
        if isinstance(self._rule, Kvferry) and self._is_followed:
            self._rule.said = [
                f"{decision.at:.0f} {decision.what}: {decision.reason}" for decision in figures.decisions
            ]
        return {
            "requests": figures.requests,
            "complete": figures.complete,
            "within": figures.within,
            "ttft_within": sum(ttft_s <= targets.ttft_s for _, ttft_s, _ in self.answered) / figures.requests,
            "itl_within": sum(itl_s <= targets.itl_s for _, _, itl_s in self.answered) / figures.requests,
            "instance_s": figures.instance_s,
            "most": [self._most.prefill, self._most.decode],
            "starts": self._num_starts,
            "switches": self._num_switches,
            "errors": figures.errors,
            "cpu_s": time.process_time() - begun,
        }

    def _fleet(self, counts: Counts) -> DesiredFleet:
        """The spec with these counts. Where routers know the targets and `[scale]` does not decide, its bounds leave it
        no choice."""
        rules = self._rule.rules if isinstance(self._rule, Kvferry) else RULES
        min_counts, budget = (rules.min_counts, rules.budget) if self._is_followed else (counts, counts.total)
        bounds = {
            PREFILL: (min_counts.prefill, rules.max_counts.prefill),
            DECODE: (min_counts.decode, rules.max_counts.decode),
        }
        role = {
            name: {"count": count, "min": bounds[name][0], "max": bounds[name][1], "can_be": [other]}
            for name, count, other in ((PREFILL, counts.prefill, DECODE), (DECODE, counts.decode, PREFILL))
        }
        scale = {
            "ttft": _duration(rules.targets.ttft_s), "itl": _duration(rules.targets.itl_s), "attainment": rules.goal,
            "budget": int(budget), "interval": _duration(INTERVAL_S),
            "cool_down": _duration(rules.cool_down_s), "starts": _duration(START_S),
        }  # fmt: skip
        table = {"name": "scaled", "model": "simulated", "mode": "pooling", "role": role, "router": {"count": 1}}
        scaling = {"scale": scale} if self._rule.targets is not None else {}
        return fleet_from({**table, **scaling, "failure": {"drain": _duration(DRAIN_S)}})

    # While it runs.

    def _look(self, world: World) -> None:
        """Count what has changed, and have the rule decide when it is time."""
        assert isinstance(world, FleetWorld)
        roles = {instance.name: instance.role for instance in world.instances}
        if self._roles:
            self._num_starts += len(roles.keys() - self._roles.keys())
            self._num_switches += sum(self._roles.get(name, role) != role for name, role in roles.items())
        self._roles = dict(roles)
        if not world.results or world.simulation.now < self._decide_at:
            return
        self._decide_at = world.simulation.now + INTERVAL_S
        status = world.ledger.status()
        assert status is not None
        current = Counts(*(status.roles[role].desired for role in ROLES))
        self._most = Counts(max(self._most.prefill, current.prefill), max(self._most.decode, current.decode))
        if not self._is_followed:
            desired = self._rule.decide(self._seen(world, current, [status.roles[role] for role in ROLES]))
            if desired != current:
                world.apply(self._fleet(desired))

    def _seen(self, world: FleetWorld, current: Counts, roles: Sequence[RoleStatus]) -> Seen:
        router, now = world.routers[0].router, world.simulation.wall()
        assert router is not None
        if isinstance(self._rule, Clairvoyant):
            self._rule.base = now - world.simulation.now + world.results[0].spec.at_s
        text = router.services.chooser.traffic.encode(now, 3600, 1024)
        report = msgspec.json.decode(text, type=TrafficReport)
        lately = [request for request in report.requests if request.state == "done" and request.arrived > now - 60.0]
        return Seen(
            now=now,
            counts=current,
            ready=Counts(*(status.ready for status in roles)),
            draining=sum(status.draining for status in roles),
            report=report,
            busy_prefill=self._busy(world, PREFILL),
            busy_decode=self._busy(world, DECODE),
            decode_tokens_per_s=sum(request.output_tokens for request in lately) / 60.0,
        )

    def _busy(self, world: FleetWorld, role: str) -> float:
        """The share of the time in which the instances of a role computed, since this was asked last."""
        total, instances = (
            0.0,
            [instance for instance in world.instances if instance.role == role and instance.executor is not None],
        )
        for instance in instances:
            assert instance.executor is not None
            before = self._busy_s.get(instance.name, 0.0)
            self._busy_s[instance.name] = busy_s = instance.executor.busy_s
            total += busy_s - before if busy_s >= before else busy_s  # a new process counts from 0
        return total / (INTERVAL_S * len(instances)) if instances else 0.0


def _duration(seconds: float) -> str:
    return f"{min(seconds, 1e8):.6f}s"
