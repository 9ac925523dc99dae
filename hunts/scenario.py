"""Scenarios that a seed decides, and their reports. `python -m hunts SEED …` runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from hunts.faults import GENTLE, KINDS, STORE_KINDS, Fault, FaultInjector, draw_faults
from hunts.invariants import (
    Violation,
    check_blocks,
    check_errors,
    check_hand_offs,
    check_idle,
    check_leases,
    check_requests,
    check_steps,
    check_stores,
)
from hunts.stores import draw_store
from hunts.variants import direct, draw_variant, longest_prompt, many, slow, with_turns
from kvferry.engine.core import EngineCore
from kvferry.sim.engine import SimInstanceSpec
from kvferry.sim.network import NetworkSpec
from kvferry.sim.times import StepTimes
from kvferry.sim.world import RequestSpec, World, WorldSpec

LEASE_S = 1.0
SETTLES_S = 10.0
"""Seconds after the last request and fault in which leases, loads and timeouts of the connectors end."""
_CHECK_EVERY_S = 0.25
_STORES_ARE_BACK_S = 3.0
"""Instances use a store again so long after it has been well: `store.tiered.breaker`."""
_STORE_SHARE = 0.35
"""Share of the seeds whose instances have a store."""
AUDITED_EVERY = 64
"""Movements of the time between two audits of all blocks."""
AUDITED_STEPS = 16
"""Steps of engines between two audits of the blocks of the engine that has made one."""


_IMPATIENT = {
    "first_byte_timeout_s": 4.0,
    "between_bytes_timeout_s": 3.0,
    "continuation_timeout_s": 6.0,
    "waiting_timeout_s": 6.0,
    "busy_wait_s": 2.0,
    "health_timeout_s": 1.0,
}
"""Limits of the router, far shorter than their defaults, so that no request waits a minute for a dead machine."""


@dataclass(frozen=True)
class Scenario:
    """A deployment, its requests, and its faults."""

    seed: int
    world: WorldSpec
    requests: list[RequestSpec]
    faults: list[Fault]
    keeps_hand_offs: bool = False
    """True if no hand-off may be lost: nothing breaks, and there is time for all of them."""

    @property
    def must_answer_all(self) -> bool:
        """True if each request must be answered, unless its client leaves. With the policy `fail`, a hand-off that
        takes too long is an error, which needs no fault."""
        if self.world.instance.kv_load_failure_policy == "fail":
            return False
        enough = min(self.world.num_prefill, self.world.num_decode) > 1
        kinds = [fault.kind for fault in self.faults]
        return all(kind in STORE_KINDS for kind in kinds) or (enough and len(kinds) == 1 and kinds[0] in GENTLE)

    def only(self, requests: Sequence[int], faults: Sequence[int]) -> Scenario:
        """The scenario with only these of its requests and faults, by their numbers."""
        return replace(
            self, requests=[self.requests[index] for index in requests], faults=[self.faults[index] for index in faults]
        )


@dataclass
class Report:
    """The result of a scenario. `digest` is equal for two runs exactly if all events were."""

    seed: int
    digest: str = ""
    num_events: int = 0
    num_callbacks: int = 0
    virtual_s: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    last_events: list[str] = field(default_factory=list)

    def end(self, world: World) -> None:
        """Record the state at the end."""
        simulation = world.simulation
        for result in world.results:
            self.outcomes[result.outcome] = self.outcomes.get(result.outcome, 0) + 1
        self.digest, self.num_events = simulation.log.digest(), simulation.log.num_events
        self.num_callbacks, self.virtual_s = simulation.num_callbacks, simulation.now
        self.last_events = list(simulation.log.last)


def draw(seed: int, *, with_faults: bool = True) -> Scenario:
    """The scenario of a seed: a small deployment with little memory, so that what is rare elsewhere is common."""
    random = Random(f"kvferry scenario {seed}")
    instance = SimInstanceSpec(
        num_blocks=random.choice((48, 96, 256, 1024)),
        block_size=random.choice((8, 16)),
        max_num_seqs=random.choice((2, 8, 32)),
        max_num_batched_tokens=random.choice((64, 256, 1024)),
        max_model_len=512,
        max_waiting=random.choice((8, 256)),
        times=StepTimes(base_s=random.choice((0.001, 0.01))),
        start_s=0.5,
        kv_load_failure_policy=random.choice(("recompute", "recompute", "fail")),
        takes_any_role=random.random() < 0.5,
        options={
            "lease_s": LEASE_S,
            "timeout_s": LEASE_S,
            "unsealed_s": 4 * LEASE_S,
        },
    )
    store_rng = Random(f"kvferry store {seed}")  # so that seeds without a store stay what they were
    has_store = store_rng.random() < _STORE_SHARE
    if has_store:
        instance = draw_store(store_rng, instance)
    late = random.choice((0.0, 0.001, 0.02))
    is_gentle = random.random() < 0.2
    world = WorldSpec(
        num_prefill=2 if is_gentle else random.choice((1, 1, 2, 3)),
        num_decode=2 if is_gentle else random.choice((1, 1, 2, 3)),
        num_routers=random.choice((1, 1, 2)),
        instance=instance,
        network=NetworkSpec(
            late_share=late, max_extra_latency_s=random.choice((0.01, 0.5)), bandwidth=random.choice((1e8, 1e10))
        ),
        router={
            "policy": random.choice(("cost", "round_robin", "random", "least_loaded", "prefix", "power_of_two")),
            "hand_off": random.choice(("auto", "auto", "sequential", "concurrent")),
            "disaggregate_from": random.choice(("0", "0", "auto", "100")),
            "retries": random.choice((0, 1, 2)),
            **_IMPATIENT,
        },
        request_timeout_s=400.0,
    )
    requests = _draw_requests(random, instance)
    if has_store:
        requests = _repeated(store_rng, requests)
    variant_rng = Random(f"kvferry variant {seed}")
    requests = with_turns(variant_rng, requests, instance)
    variant = draw_variant(variant_rng, has_store=has_store) if with_faults else "usual"
    match variant:
        case "slow":
            return Scenario(seed, *slow(variant_rng, world), [], keeps_hand_offs=True)
        case "direct":
            return Scenario(seed, *direct(variant_rng, world), [])
        case "many":
            world, requests = many(variant_rng, world)
    horizon_s = max(request.at_s for request in requests) + 2.0
    faults: list[Fault] = []
    if with_faults and is_gentle:
        faults = draw_faults(random, 1, horizon_s, STORE_KINDS if has_store and store_rng.random() < 0.7 else GENTLE)
    elif with_faults:
        kinds = (*KINDS, *STORE_KINDS, *STORE_KINDS) if has_store else KINDS
        faults = draw_faults(random, random.choice((1, 2, 4, 8)), horizon_s, kinds)
    return Scenario(seed, world, requests, faults)


def _repeated(random: Random, requests: Sequence[RequestSpec]) -> list[RequestSpec]:
    """The same requests, half of them with the prompt of an earlier one, or with its beginning and another end, so that
    stores are used."""
    drawn: list[RequestSpec] = []
    for request in requests:
        if drawn and random.random() < 0.5:
            earlier = random.choice(drawn).prompt
            num_shared = random.choice((len(earlier), random.randrange(len(earlier) + 1)))
            prompt = [*earlier[:num_shared], *request.prompt[num_shared:]]
            request = replace(request, prompt=prompt[: max(len(request.prompt), len(earlier))])
        drawn.append(request)
    return drawn


def _draw_requests(random: Random, instance: SimInstanceSpec) -> list[RequestSpec]:
    drawn, now = [], 0.0
    rate = random.choice((5.0, 20.0, 100.0))
    prefixes = [[random.randrange(instance.vocab_size) for _ in range(96)] for _ in range(3)]
    leaving = random.choice((0.0, 0.1, 0.4))
    for _ in range(random.choice((5, 10, 20))):
        now += random.expovariate(rate)
        prompt = [random.randrange(instance.vocab_size) for _ in range(random.choice((5, 40, 200)))]
        if random.random() < 0.5:
            prompt = random.choice(prefixes)[: random.randrange(97)] + prompt
        max_tokens = random.choice((1, 2, 10, 60))
        prompt = prompt[: longest_prompt(instance, max_tokens)]
        leaves = random.expovariate(2.0) if random.random() < leaving else None
        drawn.append(RequestSpec(now, prompt, max_tokens, random.getrandbits(32), leaves))
    return drawn


def run(
    scenario: Scenario, *, keep_log: bool = False, before_end: Callable[[World], None] = lambda world: None
) -> Report:
    """Let it happen, and look whether everything held that must. `before_end` sees the world that has settled."""
    world = World(scenario.world, scenario.seed, keep_log=keep_log)
    with judged(world, scenario, before_end=before_end) as report:
        breaker = FaultInjector(world)
        breaker.schedule(scenario.faults)
        require_finished(world, report)
        if scenario.keeps_hand_offs:
            report.violations.extend(check_hand_offs(world))
        world.run_until(lambda: not breaker.lasting, 100.0)
        world.run_for(_STORES_ARE_BACK_S)
        breaker.unpin()
    return report


class Judged(Protocol):
    """A scenario of one deployment or of a fleet."""

    @property
    def seed(self) -> int: ...
    @property
    def requests(self) -> list[RequestSpec]: ...
    @property
    def must_answer_all(self) -> bool: ...


@contextmanager
def judged(
    world: World,
    scenario: Judged,
    always: Callable[[], list[Violation]] = lambda: [],
    before_end: Callable[[World], None] = lambda world: None,
) -> Iterator[Report]:
    """Run the world with the scenario's requests. The body lets happen what happens beside them; then the world has
    time to settle, `before_end` sees it, it is shut down, and the report has what came of it all. `always`: what must
    hold at any time, besides what must in each world."""
    report, moves, steps = Report(scenario.seed), 0, 0
    violations = report.violations

    def audit() -> None:
        nonlocal moves
        moves += 1
        if moves % AUDITED_EVERY == 0 and not violations:
            violations.extend(check_blocks(world) + check_leases(world) + always())

    def audit_step(engine: EngineCore) -> None:
        nonlocal steps
        steps += 1
        if steps % AUDITED_STEPS == 0 and not violations:
            violations.extend(check_steps(engine))

    with world.running():
        simulation = world.simulation
        simulation.after_callbacks, simulation.after_step = audit, audit_step
        begins = simulation.now
        world.submit([replace(request, at_s=request.at_s + begins) for request in scenario.requests])
        yield report
        settled_by = simulation.now + SETTLES_S
        while (check_idle(world) or check_stores(world)) and simulation.now < settled_by:
            world.run_for(_CHECK_EVERY_S)
        violations += check_requests(world.results, has_faults=not scenario.must_answer_all)
        violations += check_idle(world) + check_stores(world)
        before_end(world)
        if not world.shut_down():
            violations.append(Violation("everything can be shut down", "tasks or members are left"))
        if world.network.num_open:
            violations.append(Violation("no connection is left", f"{world.network.num_open} ends are open"))
        violations += check_errors(world)
        report.end(world)


def require_finished(world: World, report: Report) -> None:
    """Run until all requests have ended; a violation if some do not."""
    if not world.run_all_requests():
        waiting = [result.number for result in world.results if not result.num_ends]
        report.violations.append(Violation("nothing waits without an end", f"requests {waiting}"))
