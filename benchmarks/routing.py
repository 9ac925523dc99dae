"""The share of prompts found in the instances' caches, and the balance of the work. The router's own policies,
prefix index and estimates, driven over a trace on a virtual clock.

    python benchmarks/routing.py TRACE.jsonl                    a trace in Mooncake's form
    python benchmarks/routing.py --generated                    sessions with a shared system block
    python benchmarks/routing.py --generated --routers 4        several routers, which do not talk to each other

Each instance has the engine's own block pool, without bytes, with each order of eviction that is asked for, and
computes uncached tokens one prompt after the other. The *hit ratio* is that of blocks of 512 tokens; *uncached load* is
the tokens that an instance had to compute, over the whole trace and within windows of a minute. Nothing is timed, so a
busy machine gives the same figures.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.core.clock import Clock, ManualClock
from kvferry.engine.blocks.block_pool import BlockPool
from kvferry.engine.blocks.cached_order import make_cached_order
from kvferry.router.choice.cost import Estimates
from kvferry.router.choice.disaggregation import Threshold
from kvferry.router.choice.policies.base import Options, PolicyContext, PromptTraits
from kvferry.router.choice.policies.table import POLICIES, make_policy
from kvferry.router.choice.prefix_index import PrefixIndex
from kvferry.router.choice.prompt import Prefix
from kvferry.router.instances.load import InstanceLoad, LoadTable, Work
from report import save

BLOCK = 512
WINDOW_S = 60.0
TOKEN_S = 0.02
"""Of decoding, each token."""


@dataclass(frozen=True)
class Arrival:
    """One request of a trace: seconds, tokens, and the names of its prompt's blocks, chained."""

    at: float
    num_tokens: int
    num_answer: int
    blocks: tuple[int, ...]


def read_trace(path: Path) -> list[Arrival]:
    """Mooncake's form: one JSON object a line."""
    arrivals = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        arrivals.append(
            Arrival(
                record["timestamp"] / 1000, record["input_length"], record["output_length"], tuple(record["hash_ids"])
            )
        )
    return arrivals


def generate(num_sessions: int = 5000, seconds: float = 3600.0, seed: int = 7) -> list[Arrival]:
    """Sessions that all begin with one system block; gaps between turns with median 135 s and 90th percentile 531 s;
    three quarters of the blocks are used once."""
    rng = random.Random(seed)
    sigma = math.log(531 / 135) / 1.2816
    fresh = iter(range(1, 1 << 60))
    arrivals: list[Arrival] = []
    for _ in range(num_sessions):
        at, blocks = rng.uniform(0, seconds), [0]
        turns = 1 if rng.random() < 0.7 else 2 + int(rng.expovariate(1 / 0.8))
        for _ in range(turns):
            blocks += [next(fresh) for _ in range(1 + int(rng.lognormvariate(2.3, 0.9)))]
            answer = 1 + int(rng.lognormvariate(5, 0.8))
            # The last block of a prompt is not full: the next turn has another in its place.
            prompt = [*blocks, next(fresh)]
            arrivals.append(Arrival(at, len(prompt) * BLOCK - rng.randrange(BLOCK), answer, tuple(prompt)))
            at += 135 * math.exp(rng.gauss(0, sigma))
    return sorted(arrivals, key=lambda arrival: arrival.at)


class BlockCache:
    """The prefix cache of an instance: its block pool. A prompt's blocks are in use for no time at all."""

    def __init__(self, num_blocks: int, eviction: str, clock: Clock) -> None:
        self._pool = BlockPool(num_blocks, order=make_cached_order(eviction, num_blocks, clock))
        self._num_blocks, self._gone = num_blocks, list[int]()
        events: Any = self
        self._pool.events = events

    def removed(self, name: bytes) -> None:
        """The pool has evicted this block."""
        self._gone.append(int.from_bytes(name, "big"))

    def put(self, blocks: Sequence[int]) -> tuple[int, list[int]]:
        """Number of a prompt's leading blocks that were cached, and the blocks that were evicted for the others."""
        names = [name_of(block) for block in blocks][: self._num_blocks]
        self._gone = []
        held = self._pool.match(names)
        num_found = len(held)
        self._pool.acquire(held)
        held += self._pool.allocate(len(names) - num_found)
        for index in range(num_found, len(names)):
            self._pool.publish(held[index], names[index], names[index - 1] if index else None)
        self._pool.release(held)
        return num_found, self._gone

    def finished(self, blocks: Sequence[int], num_answer: int) -> None:
        """The answer is complete."""
        self._pool.finished([name_of(block) for block in blocks], num_answer)


def name_of(block: int) -> bytes:
    """As a block hash."""
    return block.to_bytes(8, "big")


@dataclass(eq=False)
class Server:
    """One instance of the simulation."""

    name: str
    cache: BlockCache
    free_at: float = 0.0
    uncached: int = 0
    windows: dict[int, int] = field(default_factory=dict)

    def compute(self, now: float, num_blocks: int, rate: float) -> float:
        """When a prompt of so many uncached blocks is computed, behind those that wait."""
        self.uncached += num_blocks
        window = int(now / WINDOW_S)
        self.windows[window] = self.windows.get(window, 0) + num_blocks
        self.free_at = max(self.free_at, now) + num_blocks * BLOCK / rate + 0.005
        return self.free_at


@dataclass(frozen=True)
class Knowledge:
    """The router's knowledge of caches: its own history, or events, late by `stale_s`, of which `lost` are lost."""

    name: str
    events: bool = False
    stale_s: float = 0.0
    lost: float = 0.0


KNOWLEDGE = (
    Knowledge("history"),
    Knowledge("events", events=True),
    Knowledge("events, 5 s late", events=True, stale_s=5.0),
    Knowledge("events, 20 % lost", events=True, lost=0.2),
)


@dataclass(eq=False)
class Seen:
    """An instance as one router sees it: with the work that this router has given to it."""

    server: Server
    load: InstanceLoad

    @property
    def name(self) -> str:
        """The server's."""
        return self.server.name


class Router:
    """One router: its knowledge, and its policy."""

    def __init__(self, settings: argparse.Namespace, policy: str, clock: Clock, servers: Sequence[Server]) -> None:
        self.index, self.estimates = PrefixIndex(2_000_000), Estimates()
        threshold = Threshold(self.estimates, self.index, 0)
        context = PolicyContext(clock, random.Random(5), self.index, self.estimates, threshold)
        self.policy = make_policy(policy, context, settings.policy_option)
        loads = LoadTable()
        self.seen = {server: Seen(server, InstanceLoad(loads)) for server in servers}
        for instance in self.seen.values():
            self.index.set_capacity(instance, settings.cache_tokens)


class Simulation:
    """One policy over one trace."""

    def __init__(self, settings: argparse.Namespace, policy: str, knowledge: Knowledge, eviction: str) -> None:
        self._settings, self._knowledge = settings, knowledge
        self._clock, self._rng, self._router_rng = ManualClock(), random.Random(3), random.Random(11)
        blocks = settings.cache_tokens // BLOCK
        self.servers = [
            Server(f"decode-{number}", BlockCache(blocks, eviction, self._clock))
            for number in range(settings.instances)
        ]
        self._routers = [Router(settings, policy, self._clock, self.servers) for _ in range(settings.routers)]
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num_due = self.hits = self.total = 0
        self._waits: list[float] = []

    def run(self, trace: Iterable[Arrival]) -> dict[str, float]:
        """The figures."""
        for arrival in trace:
            self._until(arrival.at)
            self._serve(arrival)
        self._until(math.inf)
        for router in self._routers:
            router.index.check()
            assert all(
                instance.load.num_decodes == instance.load.num_prefills == 0 for instance in router.seen.values()
            )
        waits = sorted(self._waits)
        return {
            "hit_ratio": self.hits / self.total,
            **evenness(self.servers),
            "ttft_mean_s": sum(waits) / len(waits),
            "ttft_p90_s": waits[len(waits) * 9 // 10],
        }

    def _serve(self, arrival: Arrival) -> None:
        ids = [block for block in arrival.blocks for _ in range(BLOCK)] if self._knowledge.events else None
        keys = () if self._knowledge.events else arrival.blocks
        ends = range(BLOCK, BLOCK * len(keys) + 1, BLOCK)
        traits = PromptTraits(num_tokens=len(arrival.blocks) * BLOCK, streams=True, prefix=Prefix(keys, ends, ids))
        router = self._routers[self._router_rng.randrange(len(self._routers))]
        cached = router.index.match(traits.prefix)
        choice = router.policy.choose(traits, Options([], list(router.seen.values())))
        seen, server = choice.decode, choice.decode.server
        router.index.record_sent(seen, traits.prefix)
        router.policy.on_choice_used(traits, choice)
        uncached, begun = max(0, traits.num_tokens - cached.get(seen, 0)), self._clock.now
        work = Work(seen.load, uncached, begun, computes=True, decodes=True)
        hits, gone = server.cache.put(arrival.blocks)
        self.hits, self.total = self.hits + hits, self.total + len(arrival.blocks)
        first = server.compute(self._clock.now, len(arrival.blocks) - hits, self._settings.tokens_per_s)
        self._waits.append(first - self._clock.now)
        self._tell(server, arrival.blocks, hits, gone)
        end = first + arrival.num_answer * TOKEN_S

        def answered() -> None:
            work.on_answered()
            router.estimates.prefilled(server.name, work.ahead + uncached, first - begun)

        def ended() -> None:
            work.end()
            router.estimates.decoded(work.num_concurrent, arrival.num_answer, end - first)

        self._at(first, answered)
        self._at(end, ended)
        self._at(end, partial(server.cache.finished, arrival.blocks, arrival.num_answer))

    def _tell(self, server: Server, blocks: Sequence[int], first: int, gone: Sequence[int]) -> None:
        knowledge = self._knowledge
        if not knowledge.events:
            return
        if self._rng.random() >= knowledge.lost and first < len(blocks):
            parent = blocks[first - 1] if first else None
            ids = [block for block in blocks[first:] for _ in range(BLOCK)]
            for router in self._routers:
                self._later(
                    partial(router.index.record_stored, router.seen[server], blocks[first:], parent, ids, BLOCK)
                )
        if self._rng.random() >= knowledge.lost and gone:
            for router in self._routers:
                self._later(partial(router.index.removed, router.seen[server], gone))

    def _later(self, event: Callable[[], None]) -> None:
        self._at(self._clock.now + self._knowledge.stale_s, event)

    def _at(self, when: float, event: Callable[[], None]) -> None:
        self._num_due += 1
        heapq.heappush(self._due, (when, self._num_due, event))

    def _until(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            when, _, event = heapq.heappop(self._due)
            self._clock.now = max(self._clock.now, when)
            event()
        if now < math.inf:
            self._clock.now = now


def evenness(servers: Sequence[Server]) -> dict[str, float]:
    """Most by mean of the uncached load; over the trace, and the median over its minutes."""
    loads = [server.uncached for server in servers]
    windows = sorted({window for server in servers for window in server.windows})
    ratios = []
    for window in windows:
        num_requests = [server.windows.get(window, 0) for server in servers]
        ratios.append(max(num_requests) * len(num_requests) / max(1, sum(num_requests)))
    return {
        "max_by_mean": max(loads) * len(loads) / max(1, sum(loads)),
        "max_by_mean_in_a_minute": sorted(ratios)[len(ratios) // 2],
    }


def pooled(trace: Iterable[Arrival], num_blocks: int, eviction: str) -> float:
    """The hit ratio of one cache of this size."""
    clock = ManualClock()
    cache, hits, total, answers = BlockCache(num_blocks, eviction, clock), 0, 0, list[tuple[float, int, Arrival]]()
    for number, arrival in enumerate(trace):
        while answers and answers[0][0] <= arrival.at:
            clock.now, _, finished = heapq.heappop(answers)
            cache.finished(finished.blocks, finished.num_answer)
        clock.now = arrival.at
        hits, total = hits + cache.put(arrival.blocks)[0], total + len(arrival.blocks)
        heapq.heappush(answers, (arrival.at + arrival.num_answer * TOKEN_S, number, arrival))
    return hits / total


def shape(trace: Sequence[Arrival]) -> dict[str, float]:
    """The shape of a trace."""
    uses: dict[int, int] = {}
    for arrival in trace:
        for block in arrival.blocks:
            uses[block] = uses.get(block, 0) + 1
    return {
        "requests": len(trace),
        "blocks": sum(uses.values()),
        "used_once": sum(count == 1 for count in uses.values()) / len(uses),
        "seconds": trace[-1].at - trace[0].at,
    }


def measure(settings: argparse.Namespace, name: str, trace: Sequence[Arrival]) -> dict[str, Any]:
    """All policies over one trace, with each eviction."""
    different = len({block for arrival in trace for block in arrival.blocks})
    results: dict[str, Any] = {"shape": shape(trace), "infinite": pooled(trace, different, "lru"), "eviction": {}}
    print(f"\n{name}: {results['shape']}\ninfinite {results['infinite']:.4f}")
    for eviction in settings.eviction:
        results["eviction"][eviction] = _with_eviction(settings, eviction, trace)
    return results


def _with_eviction(settings: argparse.Namespace, eviction: str, trace: Sequence[Arrival]) -> dict[str, Any]:
    num_blocks = settings.instances * settings.cache_tokens // BLOCK
    results: dict[str, Any] = {"pooled": pooled(trace, num_blocks, eviction), "policies": {}}
    print(f"\ninstances with {eviction}; pooled {results['pooled']:.4f}\n")
    heads = ("hit ratio", "max/mean", "in a minute", "TTFT mean s", "TTFT p90 s")
    print(f"{'policy':<14}{'knowledge':<20}" + "".join(f"{head:>13}" for head in heads))
    for policy, knowledge in _cells(settings.policy):
        figures = Simulation(settings, policy, knowledge, eviction).run(trace)
        results["policies"].setdefault(policy, {})[knowledge.name] = figures
        cells = "".join(f"{value:>13.3f}" for value in figures.values())
        print(f"{policy:<14}{knowledge.name:<20}{cells}", flush=True)
    return results


def _cells(policies: Sequence[str]) -> Iterator[tuple[str, Knowledge]]:
    for policy in policies:
        for knowledge in KNOWLEDGE if policy in ("cost", "prefix") else KNOWLEDGE[:1]:
            yield policy, knowledge


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--generated", action="store_true")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--routers", type=int, default=1, help="before them; a request comes to any of these")
    parser.add_argument("--cache-tokens", type=int, default=1_500_000)
    parser.add_argument("--tokens-per-s", type=float, default=10_000.0)
    parser.add_argument("--policy", nargs="+", default=["cost", *sorted(POLICIES.keys() - {"cost"})])
    parser.add_argument("--eviction", nargs="+", default=["lru", "reuse"], help="of the instances' prefix caches")
    parser.add_argument("--policy-option", action="append", default=[])
    parser.add_argument("--no-save", action="store_true")
    settings = parser.parse_args()
    results = {path.stem: measure(settings, path.stem, read_trace(path)) for path in settings.traces}
    if settings.generated or not results:
        results["generated"] = measure(settings, "generated", generate())
    if not settings.no_save:
        options = {name: value for name, value in vars(settings).items() if name not in ("traces", "no_save")}
        print(f"\n{save('routing' if settings.routers == 1 else 'routing_routers', options, results)}")


if __name__ == "__main__":
    main()
