"""Runs of many seeds, and the smallest part of a failing scenario that still fails.

Seeds run in processes of their own, each forked from one that has imported everything. Some run twice: their events
must be the same, bit for bit.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from hunts.fleet_scenario import FleetScenario, draw_fleet, run_fleet
from hunts.invariants import Violation
from hunts.scenario import Report, Scenario, draw, run

_SEEDS_AT_ONCE = 4
ScenarioKind = Literal["deployment", "unharmed", "fleet"]
"""`deployment`: instances and routers, with faults; `unharmed`: the same without; `fleet`: with a controller."""
DIFFERS = "the same seed gives the same events"


def run_seed(seed: int, *, kind: ScenarioKind = "deployment", twice: bool = False) -> Report:
    """The scenario of a seed; `twice`: and once more, to compare."""
    report = _run(seed, kind)
    if twice:
        other = _run(seed, kind)
        if (other.digest, other.num_events) != (report.digest, report.num_events):
            report.violations.append(Violation(DIFFERS, f"{report.num_events} and {other.num_events} events"))
    return report


def _run(seed: int, kind: ScenarioKind) -> Report:
    if kind == "fleet":
        return run_fleet(draw_fleet(seed))
    return run(draw(seed, with_faults=kind == "deployment"))


def _run_one(task: tuple[int, bool], kind: ScenarioKind) -> Report:
    seed, twice = task
    return run_seed(seed, kind=kind, twice=twice)


def hunt(
    seeds: Sequence[int], *, jobs: int = 1, twice_every: int = 0, kind: ScenarioKind = "deployment"
) -> Iterator[Report]:
    """The reports of all these seeds, in their order. One of `twice_every` runs twice; 0: none."""
    gc.freeze()  # what is imported stays: collections between two seeds need not look at it
    tasks = [(seed, bool(twice_every) and index % twice_every == 0) for index, seed in enumerate(seeds)]
    run_task = partial(_run_one, kind=kind)
    if jobs == 1:
        yield from map(run_task, tasks)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(run_task, tasks, _SEEDS_AT_ONCE)
        pool.close()
        pool.join()


AnyScenario = Scenario | FleetScenario


def run_any(scenario: AnyScenario, *, keep_log: bool = False) -> Report:
    """Run either kind."""
    if isinstance(scenario, FleetScenario):
        return run_fleet(scenario, keep_log=keep_log)
    return run(scenario, keep_log=keep_log)


@dataclass(frozen=True)
class Shrunk:
    """The rest of a scenario, by the numbers of its requests and faults, and the report of its violations."""

    scenario: AnyScenario
    requests: list[int]
    faults: list[int]
    report: Report
    num_runs: int

    def command(self) -> str:
        """Runs it again, with all its events."""
        requests, faults = (",".join(map(str, numbers)) or "none" for numbers in (self.requests, self.faults))
        kind = " --fleet" if isinstance(self.scenario, FleetScenario) else ""
        return f"python -m hunts {self.scenario.seed}{kind} --requests {requests} --faults {faults} --log"


def shrink(
    scenario: AnyScenario, *, max_runs: int = 300, run: Callable[[AnyScenario], Report] = run_any
) -> Shrunk | None:
    """Take faults and requests away, large parts first, for as long as an invariant fails that failed at first. Runs
    the scenario at most `max_runs` times. None: all invariants hold."""
    first = run(scenario)
    names = {violation.name for violation in first.violations}
    if not names:
        return None
    best, num_runs = first, 1
    requests, faults = list(range(len(scenario.requests))), list(range(len(scenario.faults)))

    def fails(requests: list[int], faults: list[int]) -> bool:
        nonlocal best, num_runs
        num_runs += 1
        report = run(scenario.only(requests, faults))
        if names.isdisjoint(violation.name for violation in report.violations):
            return False
        best = report
        return True

    def bounded() -> bool:
        return num_runs < max_runs

    changed = True
    while changed and bounded():
        before = len(requests) + len(faults)
        faults = _fewer(faults, lambda some: fails(requests, some), bounded)  # noqa: B023 - called at once
        requests = _fewer(requests, lambda some: fails(some, faults), bounded)  # noqa: B023 - called at once
        changed = len(requests) + len(faults) < before
    return Shrunk(scenario.only(requests, faults), requests, faults, best, num_runs)


def _fewer(items: list[int], fails: Callable[[list[int]], bool], bounded: Callable[[], bool]) -> list[int]:
    """Take parts away, ever smaller ones down to single items, if it still fails without them."""
    size = len(items)
    while size >= 1 and bounded():
        index = 0
        while index < len(items) and bounded():
            rest = items[:index] + items[index + size :]
            if fails(rest):
                items = rest
            else:
                index += size
        size //= 2
    return items
