"""A trace, run on a simulated deployment, and what came of it.

Owns the figures of one run. What runs is `sim.world`; what it costs in time, `sim.times`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.sim.engine import Role
from kvferry.sim.targets import Targets
from kvferry.sim.traffic import Arrival, TracePrompt
from kvferry.sim.world import RequestResult, RequestSpec, World, WorldSpec

_LOOK_EVERY_S = 0.1
"""Virtual seconds between two looks at how full the KV caches are, and between two reports of progress."""
_REASONS = 3
_OF_STORES = ("stored", "loaded", "evicted")
_LONGEST_REASON = 200


class Spread(msgspec.Struct, frozen=True):
    """Percentiles in seconds, by the nearest rank; 0 where there was nothing."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    mean: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The quantiles of values in any order."""
        if not values:
            return cls()
        ordered = sorted(values)

        def at(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(len(ordered) * share))]

        return cls(at(0.5), at(0.9), at(0.99), sum(ordered) / len(ordered))


class RoleFigures(msgspec.Struct, frozen=True):
    """The instances of one role. `busy`: share of the time in which they computed; `kv_mean`, `kv_peak`: share of
    their KV caches in use, by requests or held for peers; `prefix_hits`: share of the tokens that were looked for in
    the prefix cache and found."""

    instances: int
    busy: float
    kv_mean: float
    kv_peak: float
    prefix_hits: float
    preemptions: int


class ReplayFigures(msgspec.Struct, frozen=True):
    """What came of a trace. Times in seconds, of requests that were answered completely; `within`: the share of all
    requests that were, and met the targets; `goodput`: how many of these a second; `instance_s`: seconds of instances,
    from the first arrival to the last end."""

    requests: int
    complete: int
    refused: int
    broken: int
    duration_s: float
    ttft: Spread
    itl: Spread
    e2e: Spread
    within: float
    goodput: float
    hand_offs: int
    roles: dict[str, RoleFigures]
    instance_s: float
    digest: str
    simulated_in_s: float
    """CPU time that the simulation took."""
    stores: dict[str, int]
    """Blocks that all instances have `stored` in their stores, `loaded` from them, and `evicted`."""
    reasons: dict[str, int]
    """Why requests were not answered completely: the most frequent reasons."""
    errors: list[str]
    """What kvferry's own code logged as errors: a mistake of the code, to be reported."""


@dataclass(frozen=True)
class Answered:
    """One request that was answered completely: when it arrived, and its times."""

    at_s: float
    ttft_s: float
    e2e_s: float
    num_tokens: int


@dataclass
class _Usage:
    """How full the KV caches of a role were, over all looks at them."""

    number: int = 0
    total: float = 0.0
    peak: float = 0.0

    def note(self, share: float) -> None:
        """Count one more look at one instance."""
        self.number += 1
        self.total += share
        self.peak = max(self.peak, share)


class TraceReplay:
    """One run of a trace."""

    def __init__(self, spec: WorldSpec, arrivals: Sequence[Arrival], *, seed: int = 0) -> None:
        self._spec, self._arrivals, self._seed = spec, arrivals, seed
        self._kv: dict[Role, _Usage] = {}
        self.answered: list[Answered] = []
        self.gaps_s: Sequence[float] = ()

    def run(self, targets: Targets, on_progress: Callable[[float], None] = lambda _: None) -> ReplayFigures:
        """Let it happen. `on_progress` gets the share of requests that have ended."""
        begun = time.process_time()
        world = World(self._spec, self._seed)
        with world.running():
            first_s = world.simulation.now
            world.submit(self._requests(first_s))
            duration_s = self._run(world, first_s, on_progress)
            roles = self._roles(world, duration_s)
            world.end()
        self.gaps_s = world.gaps_s
        for one in world.results:
            if one.outcome == "complete" and one.first_s is not None and one.end_s is not None:
                self.answered.append(Answered(one.spec.at_s - first_s, one.first_s, one.end_s, one.num_tokens))
        met = sum(targets.met_by(one.ttft_s, one.e2e_s, one.num_tokens) for one in self.answered)
        results = world.results
        return ReplayFigures(
            requests=len(results),
            complete=len(self.answered),
            refused=sum(one.outcome == "refused" for one in results),
            broken=sum(one.outcome not in ("complete", "refused") for one in results),
            duration_s=duration_s,
            ttft=Spread.of([one.ttft_s for one in self.answered]),
            itl=Spread.of(world.gaps_s),
            e2e=Spread.of([one.e2e_s for one in self.answered]),
            within=met / len(results),
            goodput=met / duration_s,
            hand_offs=self._num_hand_offs,
            roles=roles,
            instance_s=duration_s * len(world.instances),
            digest=world.simulation.log.digest(),
            simulated_in_s=time.process_time() - begun,
            stores=self._stores,
            reasons=_reasons(results),
            errors=world.logged[:_REASONS],
        )

    def _requests(self, first_s: float) -> Iterator[RequestSpec]:
        vocab_size = self._spec.instance.vocab_size
        for number, one in enumerate(self._arrivals):
            prompt = TracePrompt(one, number, self._seed, vocab_size)
            yield RequestSpec(first_s + one.at_s, prompt, one.answer_tokens, number)

    def _run(self, world: World, first_s: float, on_progress: Callable[[float], None]) -> float:
        """Returns how long it took, in virtual seconds."""
        until = first_s + self._arrivals[-1].at_s + self._spec.patience_s
        while not world.is_done and world.simulation.now < until:
            world.run_until(lambda: world.is_done, _LOOK_EVERY_S)
            self._look(world)
            on_progress(world.num_ended / len(self._arrivals))
        return world.simulation.now - first_s

    def _look(self, world: World) -> None:
        for one in world.instances:
            if one.engine is not None:
                self._kv.setdefault(one.role, _Usage()).note(one.engine.pool.statistics().usage())

    def _roles(self, world: World, duration_s: float) -> dict[str, RoleFigures]:
        found: dict[str, RoleFigures] = {}
        self._num_hand_offs, self._stores = 0, dict.fromkeys(_OF_STORES, 0)
        for role in dict.fromkeys(one.role for one in world.instances):
            members = [one for one in world.instances if one.role == role]
            snapshots = [one.engine.statistics() for one in members if one.engine is not None]
            self._num_hand_offs += sum(_counted(one.connector, "fetches") for one in snapshots)
            for name in _OF_STORES:
                self._stores[name] += sum(_counted(one.connector, f"{name}_blocks") for one in snapshots)
            busy_s = sum(one.executor.busy_s for one in members if one.executor is not None)
            kv = self._kv.get(role, _Usage())
            queries = sum(one.scheduler.num_prefix_queries for one in snapshots)
            found[role] = RoleFigures(
                instances=len(members),
                busy=busy_s / (duration_s * len(members)),
                kv_mean=kv.total / max(1, kv.number),
                kv_peak=kv.peak,
                prefix_hits=sum(one.scheduler.num_prefix_hits for one in snapshots) / max(1, queries),
                preemptions=sum(one.scheduler.num_preemptions for one in snapshots),
            )
        return found


def _counted(figures: Mapping[str, float], name: str) -> int:
    """A connector's counter; with several connectors, over all of them."""
    return int(sum(value for one, value in figures.items() if one.lstrip("0123456789_") == name))


def _reasons(results: Sequence[RequestResult]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in results:
        if one.outcome != "complete":
            reason = f"{one.outcome or 'never ended'} {one.status or ''} {one.why[:_LONGEST_REASON]}".strip()
            counts[reason] = counts.get(reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda one: -one[1])[:_REASONS])
