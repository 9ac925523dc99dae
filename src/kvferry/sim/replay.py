"""A trace, run on a simulated deployment, and what came of it.

Owns the figures of one run. What runs is `sim.world`; what it costs in time, `sim.times`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.messages.traffic import Decided
from kvferry.fleet.spec.fleet_spec import DesiredFleet
from kvferry.sim.engine import Role, SimInstance
from kvferry.sim.fleet import FleetWorld
from kvferry.sim.loop import EPOCH_S, SimProcess
from kvferry.sim.targets import Targets
from kvferry.sim.traffic import Arrival, TracePrompt
from kvferry.sim.world import RequestResult, RequestSpec, World, WorldSpec

_LOOK_EVERY_S = 0.1
"""Virtual seconds between two looks at how full the KV caches are, and between two reports of progress."""
_REASONS = 3
_OF_STORES = ("stored", "loaded", "evicted")
_MAX_REASON = 200


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles in seconds, by the nearest rank; 0 where there was nothing."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    mean: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """The quantiles of values in any order."""
        if not values:
            return cls()
        ordered = sorted(values)

        def at(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(len(ordered) * share))]

        return cls(at(0.5), at(0.9), at(0.99), sum(ordered) / len(ordered))


class RoleFigures(msgspec.Struct, frozen=True):
    """The instances of one role. `instances`, `fewest`: there were at a time, at most and at least; `instance_s`: their
    seconds, those in which they start and drain included; `busy`: share of it in which they computed; `kv_mean`,
    `kv_peak`: share of their KV caches in use, by requests or held for peers; `prefix_hits`: share of the tokens that
    were looked for in the prefix cache and found."""

    instances: int
    fewest: int
    instance_s: float
    busy: float
    kv_mean: float
    kv_peak: float
    prefix_hits: float
    preemptions: int


class ReplayFigures(msgspec.Struct, frozen=True):
    """What came of a trace. Times in seconds, of requests that were answered completely; `within`: the share of all
    requests that were, and met the targets; `goodput`: how many of these a second; `instance_s`: seconds of instances,
    from the first arrival to the last end; `most_instances`: of all roles, at a time."""

    requests: int
    complete: int
    refused: int
    broken: int
    duration_s: float
    ttft: Percentiles
    itl: Percentiles
    e2e: Percentiles
    within: float
    goodput: float
    hand_offs: int
    roles: dict[str, RoleFigures]
    instance_s: float
    most_instances: int
    decisions: list[Decided]
    """What `[scale]` has decided, as routers show it; `at`: seconds since the first arrival."""
    digest: str
    stores: dict[str, int]
    """Blocks that all instances have `stored` in their stores, `loaded` from them, and `evicted`."""
    reasons: dict[str, int]
    """Why requests were not answered completely: the most frequent reasons."""
    errors: list[str]
    """What kvferry's own code logged as errors: a mistake of the code, to be reported."""


@dataclass(frozen=True)
class CompletedRequest:
    """One request that was answered completely: when it arrived, and its times."""

    at_s: float
    ttft_s: float
    e2e_s: float
    num_tokens: int


@dataclass
class _RoleUse:
    """What is seen of one role. `kv`: how full the KV caches were, over `looks` at one; `counted`: by all instances,
    for as long as they had this role."""

    fewest: int
    most: int = 0
    instance_s: float = 0.0
    looks: int = 0
    kv_total: float = 0.0
    kv_peak: float = 0.0
    counted: dict[str, float] = field(default_factory=dict)

    def note(self, number: int, for_s: float) -> None:
        """There were so many instances, for this long."""
        self.fewest, self.most = min(self.fewest, number), max(self.most, number)
        self.instance_s += number * for_s

    def note_kv(self, share: float) -> None:
        """Count one more look at one instance."""
        self.looks += 1
        self.kv_total += share
        self.kv_peak = max(self.kv_peak, share)

    def figures(self) -> RoleFigures:
        """What came of it."""
        counted = self.counted
        return RoleFigures(
            instances=self.most,
            fewest=self.fewest,
            instance_s=self.instance_s,
            busy=min(1.0, counted.get("busy_s", 0.0) / max(self.instance_s, 1e-9)),  # a step counts from its beginning
            kv_mean=self.kv_total / max(1, self.looks),
            kv_peak=self.kv_peak,
            prefix_hits=counted.get("hits", 0.0) / max(1.0, counted.get("queries", 0.0)),
            preemptions=int(counted.get("preemptions", 0)),
        )


class TraceReplay:
    """One run of a trace. `fleet`: its controller brings it up and looks after it; otherwise, the instances of `spec`
    are there all the time. `on_look`: called with the world ten times a virtual second, and may change what is wanted
    of the fleet."""

    def __init__(
        self,
        spec: WorldSpec,
        arrivals: Sequence[Arrival],
        *,
        seed: int = 0,
        fleet: DesiredFleet | None = None,
        on_look: Callable[[World], None] = lambda _: None,
    ) -> None:
        self._spec, self._arrivals, self._seed, self._fleet = spec, arrivals, seed, fleet
        self._on_look = on_look
        self._roles: dict[Role, _RoleUse] = {}
        self._most = 0
        self._before: dict[SimProcess, dict[str, float]] = {}
        """What each process had counted when that was last added to its role's."""
        self.answered: list[CompletedRequest] = []
        self.gaps_s: Sequence[float] = ()

    def run(self, targets: Targets, on_progress: Callable[[float], None] = lambda _: None) -> ReplayFigures:
        """Let it happen. `on_progress` gets the share of requests that have ended. Raises `ConfigError` if the fleet
        does not come up."""
        world = self._world()
        with world.running():
            first_s = world.simulation.now
            _require_up(world)
            world.submit(self._requests(first_s))
            duration_s = self._run(world, first_s, on_progress)
            for instance in world.instances:
                self._count(instance)
            decisions = _decisions(world, first_s)
            world.end()
        self.gaps_s = world.gaps_s
        for one in world.results:
            if one.outcome == "complete" and one.first_s is not None and one.end_s is not None:
                self.answered.append(CompletedRequest(one.spec.at_s - first_s, one.first_s, one.end_s, one.num_tokens))
        met = sum(targets.met_by(one.ttft_s, one.e2e_s, one.num_tokens) for one in self.answered)
        results = world.results
        return ReplayFigures(
            requests=len(results),
            complete=len(self.answered),
            refused=sum(one.outcome == "refused" for one in results),
            broken=sum(one.outcome not in ("complete", "refused") for one in results),
            duration_s=duration_s,
            ttft=Percentiles.of([one.ttft_s for one in self.answered]),
            itl=Percentiles.of(world.gaps_s),
            e2e=Percentiles.of([one.e2e_s for one in self.answered]),
            within=met / len(results),
            goodput=met / duration_s,
            hand_offs=self._counted("hand_offs"),
            roles={role: one.figures() for role, one in self._roles.items()},
            instance_s=sum(one.instance_s for one in self._roles.values()),
            most_instances=self._most,
            decisions=decisions,
            digest=world.simulation.log.digest(),
            stores={name: self._counted(name) for name in _OF_STORES},
            reasons=_reasons(results),
            errors=world.logged[:_REASONS],
        )

    def _world(self) -> World:
        if self._fleet is None:
            return World(self._spec, self._seed)
        world = FleetWorld(self._spec, self._fleet, self._seed)
        world.before_change = self._count
        return world

    def _requests(self, first_s: float) -> Iterator[RequestSpec]:
        vocab_size = self._spec.instance.vocab_size
        for number, one in enumerate(self._arrivals):
            prompt = TracePrompt(one, number, self._seed, vocab_size)
            yield RequestSpec(first_s + one.at_s, prompt, one.answer_tokens, number)

    def _run(self, world: World, first_s: float, on_progress: Callable[[float], None]) -> float:
        """Returns how long it took, in virtual seconds."""
        last, until = 0, first_s + self._arrivals[-1].at_s + self._spec.patience_s
        while not world.is_done and world.simulation.now < until:
            before = world.simulation.now
            world.run_until(lambda: world.is_done, _LOOK_EVERY_S)
            self._look(world, world.simulation.now - before)
            self._on_look(world)
            if (seen := world.num_ended + len(world.gaps_s)) != last:  # it goes on, however long it takes
                last, until = seen, max(until, world.simulation.now + self._spec.patience_s)
            on_progress(world.num_ended / len(self._arrivals))
        return world.simulation.now - first_s

    def _look(self, world: World, for_s: float) -> None:
        numbers = Counter[Role](one.role for one in world.instances)
        self._most = max(self._most, numbers.total())
        for role in (*numbers, *(one for one in self._roles if one not in numbers)):
            self._role(role, numbers[role]).note(numbers[role], for_s)
        for one in world.instances:
            if one.engine is not None:
                self._role(one.role).note_kv(one.engine.pool.statistics().usage())

    def _role(self, role: Role, number: int = 0) -> _RoleUse:
        return self._roles.setdefault(role, _RoleUse(fewest=number))

    def _count(self, one: SimInstance) -> None:
        """Add what an instance has counted since this was called last to its role's."""
        if one.engine is None or one.executor is None:
            return
        figures = one.engine.statistics()
        counted = {
            "busy_s": one.executor.busy_s,
            "queries": figures.scheduler.num_prefix_queries,
            "hits": figures.scheduler.num_prefix_hits,
            "preemptions": figures.scheduler.num_preemptions,
            "hand_offs": _counted(figures.connector, "fetches"),
            **{name: _counted(figures.connector, f"{name}_blocks") for name in _OF_STORES},
        }
        before, total = self._before.get(one.process, {}), self._role(one.role).counted
        for name, value in counted.items():
            total[name] = total.get(name, 0.0) + value - before.get(name, 0.0)
        self._before[one.process] = counted

    def _counted(self, name: str) -> int:
        return int(sum(one.counted.get(name, 0.0) for one in self._roles.values()))


def _require_up(world: World) -> None:
    if isinstance(world, FleetWorld) and not world.is_settled:
        seen = world.ledger.status()
        why = "; ".join(seen.trouble) if seen is not None else ""
        raise ConfigError(f"the fleet does not come up: {why or 'its instances are not ready'}")


def _decisions(world: World, first_s: float) -> list[Decided]:
    if not isinstance(world, FleetWorld):
        return []
    noted = (one for one in world.ledger.history() if one.what in ("scale", "recommend"))
    return [Decided(one.at - EPOCH_S - first_s, one.name, one.why) for one in noted]


def _counted(figures: Mapping[str, float], name: str) -> int:
    """A connector's counter; with several connectors, over all of them."""
    return int(sum(value for one, value in figures.items() if one.lstrip("0123456789_") == name))


def _reasons(results: Sequence[RequestResult]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in results:
        if one.outcome != "complete":
            reason = f"{one.outcome or 'never ended'} {one.status or ''} {one.why[:_MAX_REASON]}".strip()
            counts[reason] = counts.get(reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda one: -one[1])[:_REASONS])
