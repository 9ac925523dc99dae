"""Speed of the simulator, and growth of its memory.

    python benchmarks/simulator.py azure_2023_code.csv --instances 100 --requests 100000

The trace is repeated until there are so many requests, `--speed` times as fast as it was recorded. Figures are of one
process on one core: requests a second of CPU time, how many virtual seconds pass in one, and the resident memory after
each tenth of the requests. They are kept after each tenth, so a run that is interrupted leaves those up to there.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.core.percentile import percentile
from kvferry.sim.engine import SimInstanceSpec
from kvferry.sim.traffic import Arrival, TracePrompt, faster, read_traffic
from kvferry.sim.world import RequestSpec, World, WorldSpec
from report import print_machine, save

SEED = 1
INSTANCE = SimInstanceSpec(num_blocks=8192)
FAST = replace(INSTANCE, has_contents=False, tokens_at_once=16, empty_step_s=0.0)


def main() -> None:
    """Run one simulation, print its figures and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--speed", type=float, default=40.0)
    parser.add_argument("--prefill", type=float, default=0.4, help="share of the instances that prefill")
    parser.add_argument("--exact", action="store_true", help="with contents of blocks, token by token, with all events")
    arguments = parser.parse_args()
    print_machine()
    num_prefill = round(arguments.prefill * arguments.instances)
    spec = WorldSpec(
        num_prefill=num_prefill,
        num_decode=arguments.instances - num_prefill,
        instance=INSTANCE if arguments.exact else FAST,
        logs_events=arguments.exact,
    )
    arrivals = faster(read_traffic(arguments.trace), arguments.speed)
    settings = {name: str(value) for name, value in vars(arguments).items()} | {"trace": arguments.trace.name}
    for figures in _run(spec, arrivals, arguments.requests):
        path = save("simulator", settings, figures)
        print(f"{figures['requests']} requests, {figures['cpu_s']} s, {figures['memory_mib'][-1]} MiB", flush=True)
    for name, value in figures.items():
        print(f"{name}: {value}")
    print(path)


def _run(spec: WorldSpec, arrivals: Sequence[Arrival], number: int) -> Iterator[dict[str, Any]]:
    """The figures until now, after each tenth of the requests."""
    world, tenth = World(spec, SEED), max(1, number // 10)
    memory_mib: list[int] = []
    cpu_s: list[float] = []
    with world.running():
        start_s = world.simulation.now
        world.submit(_requests(arrivals, number, start_s, spec.instance.vocab_size))
        for part in range(1, 11):
            begun = time.process_time()
            while not world.is_done and world.num_ended < part * tenth:
                world.run_until(lambda: world.is_done or world.num_ended >= part * tenth, spec.request_timeout_s)  # noqa: B023
            cpu_s.append(round(time.process_time() - begun, 1))
            memory_mib.append(_resident_mib())
            yield _figures(world, world.simulation.now - start_s, cpu_s, memory_mib)


def _figures(world: World, virtual_s: float, cpu_s: list[float], memory_mib: list[int]) -> dict[str, Any]:
    ended = [result for result in world.results if result.num_ends]
    complete = [result for result in ended if result.outcome == "complete"]
    return {
        "requests": len(ended),
        "complete": len(complete),
        "wrong": sum(not result.has_expected_tokens for result in ended),
        "tokens": sum(result.num_tokens for result in complete),
        "cpu_s": round(sum(cpu_s), 1),
        "virtual_s": round(virtual_s, 1),
        "requests_per_s": round(len(ended) / sum(cpu_s), 1),
        "times_real": round(virtual_s / sum(cpu_s), 2),
        "instance_seconds_per_s": round(virtual_s * len(world.instances) / sum(cpu_s)),
        "memory_mib": memory_mib,
        "cpu_s_of_each_tenth": cpu_s,
        "ttft_s": _spread(np.array([result.ttft_s or 0.0 for result in complete])),
        "itl_s": _spread(np.array(world.itl_s)),
        "errors": world.logged_errors[:3],
    }


def _spread(seconds: NDArray[np.floating[Any]]) -> dict[str, float]:
    ordered = sorted(seconds.tolist())
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    spread = {"p50": p50, "p90": p90, "p99": p99, "mean": float(seconds.mean())}
    return {name: round(value, 5) for name, value in spread.items()}


def _requests(arrivals: Sequence[Arrival], number: int, start_s: float, vocab_size: int) -> Iterator[RequestSpec]:
    length_s = arrivals[-1].at_s + 1.0
    made = 0
    for turn in count():
        for arrival in arrivals:
            if made == number:
                return
            at_s = start_s + turn * length_s + arrival.at_s
            yield RequestSpec(at_s, TracePrompt(arrival, made, SEED, vocab_size), arrival.answer_tokens, made)
            made += 1


def _resident_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20


if __name__ == "__main__":
    main()
