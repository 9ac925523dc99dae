"""A run of a trace on a simulated deployment, and its results.

Owns the statistics of one run. `sim.world` runs it; `sim.times` has the costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.messages.traffic import ScaleDecision
from kvferry.core.percentile import percentile
from kvferry.core.text import shortened
from kvferry.fleet.spec.fleet_spec import DesiredFleet
from kvferry.sim.engine import Role, SimInstance
from kvferry.sim.fleet import FleetWorld
from kvferry.sim.loop import EPOCH_S, SimProcess
from kvferry.sim.targets import Targets
from kvferry.sim.traffic import Arrival, TracePrompt
from kvferry.sim.world import RequestResult, RequestSpec, World, WorldSpec

_MAX_SHOWN = 3
"""Maximum number of different reasons that are shown."""
_STORE_COUNTERS = ("stored", "loaded", "evicted")


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles and mean, in seconds; 0 without values."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    mean: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """The percentiles of values in any order."""
        if not values:
            return cls()
        ordered = sorted(values)
        p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(p50, p90, p99, sum(ordered) / len(ordered))


class RoleFigures(msgspec.Struct, frozen=True):
    """The instances of one role. `instances`, `fewest`: maximum and minimum number at a time. `instance_s`: their total
    seconds, including start and drain. `busy`: share of these seconds in which they computed. `kv_mean`, `kv_peak`:
    share of their KV caches that requests used or that was held for peers. `prefix_hits`: share of the looked up tokens
    that were in the prefix cache."""

    instances: int
    fewest: int
    instance_s: float
    busy: float
    kv_mean: float
    kv_peak: float
    prefix_hits: float
    preemptions: int


class ReplayFigures(msgspec.Struct, frozen=True):
    """The results of a trace. Latencies, in seconds, are of completely answered requests. `within`: share of all
    requests that were answered completely and met the targets; `goodput`: number of these requests per second;
    `instance_s`: total seconds of instances, from the beginning of the replayed trace to the last end;
    `most_instances`: maximum number of instances of all roles together at a time."""

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
    decisions: list[ScaleDecision]
    """Decisions of `[scale]`, as routers show them; `at`: seconds since the beginning of the replayed trace."""
    digest: str
    stores: dict[str, int]
    """Blocks that all instances have `stored` in their stores, `loaded` from them, and `evicted`."""
    reasons: dict[str, int]
    """The most frequent reasons why requests were not answered completely."""
    errors: list[str]
    """Errors that kvferry's own code logged: defects to be reported."""


@dataclass(frozen=True)
class CompletedRequest:
    """A completely answered request: its arrival and its times."""

    at_s: float
    ttft_s: float
    e2e_s: float
    num_tokens: int


@dataclass
class _RoleUse:
    """Measurements of one role. `kv_total`, `kv_peak`: sum and maximum of the used share of a KV cache, over
    `num_samples` samples, each of one instance; `counters`: sums of the counters of all instances while they had this
    role."""

    min_instances: int
    max_instances: int = 0
    instance_s: float = 0.0
    num_samples: int = 0
    kv_total: float = 0.0
    kv_peak: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)

    def note(self, number: int, for_s: float) -> None:
        """Record that there were `number` instances for `for_s` seconds."""
        self.min_instances = min(self.min_instances, number)
        self.max_instances = max(self.max_instances, number)
        self.instance_s += number * for_s

    def note_kv(self, share: float) -> None:
        """Record a sample: the used share of one instance's KV cache."""
        self.num_samples += 1
        self.kv_total += share
        self.kv_peak = max(self.kv_peak, share)

    def figures(self) -> RoleFigures:
        """The results."""
        counters = self.counters
        return RoleFigures(
            instances=self.max_instances,
            fewest=self.min_instances,
            instance_s=self.instance_s,
            busy=min(1.0, counters.get("busy_s", 0.0) / max(self.instance_s, 1e-9)),  # a step counts from its beginning
            kv_mean=self.kv_total / max(1, self.num_samples),
            kv_peak=self.kv_peak,
            prefix_hits=counters.get("hits", 0.0) / max(1.0, counters.get("queries", 0.0)),
            preemptions=int(counters.get("preemptions", 0)),
        )


class TraceReplay:
    """One run of a trace. `fleet`: a fleet whose controller starts and scales the instances; None: the instances of
    `spec` run all the time. `on_sample`: called with the world ten times per virtual second; it may change the fleet's
    spec."""

    sample_interval_s = 0.1
    """Virtual seconds between two samples of the KV cache usage, and between two reports of progress."""

    def __init__(
        self,
        spec: WorldSpec,
        arrivals: Sequence[Arrival],
        *,
        seed: int = 0,
        fleet: DesiredFleet | None = None,
        on_sample: Callable[[World], None] = lambda _: None,
    ) -> None:
        self._spec, self._arrivals, self._seed, self._fleet = spec, arrivals, seed, fleet
        self._on_sample = on_sample
        self._roles: dict[Role, _RoleUse] = {}
        self._max_instances = 0
        self._last_counters: dict[SimProcess, dict[str, float]] = {}
        """The counters of each process when they were last added to the sums of its role."""
        self.completed_requests: list[CompletedRequest] = []
        self.itl_s: Sequence[float] = ()

    def run(self, targets: Targets, on_progress: Callable[[float], None] = lambda _: None) -> ReplayFigures:
        """Run the trace. `on_progress`: called with the share of requests that have ended. Raises `ConfigError` if the
        fleet does not become ready."""
        world = self._world()
        with world.running():
            start_s = world.simulation.now
            _require_ready(world)
            world.submit(self._requests(start_s))
            duration_s = self._run(world, start_s, on_progress)
            for instance in world.instances:
                self._count(instance)
            decisions = _decisions(world, start_s)
            world.shut_down()
        self.itl_s = world.itl_s
        for result in world.results:
            if result.outcome == "complete" and result.ttft_s is not None and result.e2e_s is not None:
                self.completed_requests.append(
                    CompletedRequest(result.spec.at_s - start_s, result.ttft_s, result.e2e_s, result.num_tokens)
                )
        met = sum(targets.met_by(result.ttft_s, result.e2e_s, result.num_tokens) for result in self.completed_requests)
        results = world.results
        return ReplayFigures(
            requests=len(results),
            complete=len(self.completed_requests),
            refused=sum(result.outcome == "refused" for result in results),
            broken=sum(result.outcome not in ("complete", "refused") for result in results),
            duration_s=duration_s,
            ttft=Percentiles.of([result.ttft_s for result in self.completed_requests]),
            itl=Percentiles.of(world.itl_s),
            e2e=Percentiles.of([result.e2e_s for result in self.completed_requests]),
            within=met / len(results),
            goodput=met / duration_s,
            hand_offs=self._counted("hand_offs"),
            roles={role: role_use.figures() for role, role_use in self._roles.items()},
            instance_s=sum(role_use.instance_s for role_use in self._roles.values()),
            most_instances=self._max_instances,
            decisions=decisions,
            digest=world.simulation.log.digest(),
            stores={name: self._counted(name) for name in _STORE_COUNTERS},
            reasons=_reasons(results),
            errors=world.logged_errors[:_MAX_SHOWN],
        )

    def _world(self) -> World:
        if self._fleet is None:
            return World(self._spec, self._seed)
        world = FleetWorld(self._spec, self._fleet, self._seed)
        world.before_change = self._count
        return world

    def _requests(self, start_s: float) -> Iterator[RequestSpec]:
        vocab_size = self._spec.instance.vocab_size
        for number, arrival in enumerate(self._arrivals):
            prompt = TracePrompt(arrival, number, self._seed, vocab_size)
            yield RequestSpec(start_s + arrival.at_s, prompt, arrival.answer_tokens, number)

    def _run(self, world: World, start_s: float, on_progress: Callable[[float], None]) -> float:
        """Run until all requests have ended. Returns the duration in virtual seconds."""
        last, until = 0, start_s + self._arrivals[-1].at_s + self._spec.request_timeout_s
        while not world.is_done and world.simulation.now < until:
            before = world.simulation.now
            world.run_until(lambda: world.is_done, self.sample_interval_s)
            self._sample(world, world.simulation.now - before)
            self._on_sample(world)
            if (progress := world.num_ended + len(world.itl_s)) != last:  # there is progress
                last, until = progress, max(until, world.simulation.now + self._spec.request_timeout_s)
            on_progress(world.num_ended / len(self._arrivals))
        return world.simulation.now - start_s

    def _sample(self, world: World, for_s: float) -> None:
        numbers = Counter[Role](instance.role for instance in world.instances)
        self._max_instances = max(self._max_instances, numbers.total())
        for role in {**numbers, **self._roles}:
            self._role(role, numbers[role]).note(numbers[role], for_s)
        for instance in world.instances:
            if instance.engine is not None:
                self._role(instance.role).note_kv(instance.engine.pool.statistics().usage())

    def _role(self, role: Role, number: int = 0) -> _RoleUse:
        return self._roles.setdefault(role, _RoleUse(min_instances=number))

    def _count(self, instance: SimInstance) -> None:
        """Add the growth of an instance's counters since the last call to the sums of its role."""
        if instance.engine is None or instance.executor is None:
            return
        figures = instance.engine.statistics()
        counters = {
            "busy_s": instance.executor.busy_s,
            "queries": figures.scheduler.num_prefix_queries,
            "hits": figures.scheduler.num_prefix_hits,
            "preemptions": figures.scheduler.num_preemptions,
            "hand_offs": _counted(figures.connector, "fetches"),
            **{name: _counted(figures.connector, f"{name}_blocks") for name in _STORE_COUNTERS},
        }
        before, total = self._last_counters.get(instance.process, {}), self._role(instance.role).counters
        for name, value in counters.items():
            total[name] = total.get(name, 0.0) + value - before.get(name, 0.0)
        self._last_counters[instance.process] = counters

    def _counted(self, name: str) -> int:
        return int(sum(role_use.counters.get(name, 0.0) for role_use in self._roles.values()))


def _require_ready(world: World) -> None:
    if isinstance(world, FleetWorld) and not world.is_settled:
        status = world.ledger.status()
        reason = "; ".join(status.trouble) if status is not None else ""
        raise ConfigError(f"the fleet does not come up: {reason or 'its instances are not ready'}")


def _decisions(world: World, start_s: float) -> list[ScaleDecision]:
    if not isinstance(world, FleetWorld):
        return []
    entries = (entry for entry in world.ledger.history() if entry.what in ("scale", "recommend"))
    return [ScaleDecision(entry.at - EPOCH_S - start_s, entry.name, entry.reason) for entry in entries]


def _counted(figures: Mapping[str, float], name: str) -> int:
    """A counter of the connector; of several connectors, the sum of their counters."""
    return int(sum(value for metric, value in figures.items() if metric.lstrip("0123456789_") == name))


def _reasons(results: Sequence[RequestResult]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for result in results:
        if result.outcome != "complete":
            reason = f"{result.outcome or 'never ended'} {result.status or ''} {shortened(result.reason, 200)}".strip()
            counts[reason] = counts.get(reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:_MAX_SHOWN])
