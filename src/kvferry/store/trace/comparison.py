"""Compares several policies and sizes on one trace, in two passes over the file, without keeping the requests in
memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.store.eviction.table import make_eviction_policy
from kvferry.store.trace.caches import NextUses, OptimalCache, PolicyCache, UnboundedCache
from kvferry.store.trace.records import TraceRequest, read_trace

Requests = Callable[[], Iterator[TraceRequest]]
"""Each call returns the requests of the trace, from the first one on."""


class PolicyFigures(msgspec.Struct, frozen=True):
    """One policy at one size. `cpu_s`: processor time of the whole replay."""

    policy: str
    capacity_tokens: int
    capacity_blocks: int
    hit_ratio: float
    evictions: int
    operations: int
    cpu_s: float


class Comparison(msgspec.Struct, frozen=True):
    """Properties of a trace, and the share of its blocks that each cache found."""

    requests: int
    blocks: int
    different_blocks: int
    block_tokens: int
    infinite_hit_ratio: float
    optimal_hit_ratio: dict[int, float]
    """By capacity in tokens: the largest share that any cache of this capacity can find, with knowledge of the
    future."""
    policies: list[PolicyFigures]


def compare(
    requests: Requests,
    policies: Sequence[str],
    capacities: Sequence[int],
    *,
    block_tokens: int = 512,
    uses_finishes: bool = True,
) -> Comparison:
    """Replay through each of `policies` at each of `capacities` (tokens). Raises `ConfigError`, also for blocks that
    are not chained (`NextUses.request`)."""
    sizes = {capacity: _num_blocks(capacity, block_tokens) for capacity in capacities}
    unbounded, next_uses = UnboundedCache(), NextUses()
    for request in requests():
        unbounded.request(request)
        next_uses.request(request)
    if unbounded.num_blocks == 0:
        raise ConfigError("the trace has no blocks")
    optima = {capacity: OptimalCache(num, next_uses) for capacity, num in sizes.items()}
    replays = [_Replay(name, capacity, num, uses_finishes) for name in policies for capacity, num in sizes.items()]
    for request in requests():
        for optimum in optima.values():
            optimum.request(request)
        for replay in replays:
            replay.request(request)
    return Comparison(
        requests=unbounded.num_requests,
        blocks=unbounded.num_blocks,
        different_blocks=unbounded.num_distinct,
        block_tokens=block_tokens,
        infinite_hit_ratio=unbounded.hits / unbounded.num_blocks,
        optimal_hit_ratio={capacity: cache.hits / unbounded.num_blocks for capacity, cache in optima.items()},
        policies=[replay.figures(unbounded.num_blocks) for replay in replays],
    )


def compare_file(
    path: Path,
    policies: Sequence[str],
    capacities: Sequence[int],
    *,
    block_tokens: int = 512,
    uses_finishes: bool = True,
    on_read: Callable[[int], None] = lambda _: None,
) -> Comparison:
    """Like `compare`, for a file. `on_read`: called with the number of bytes of each line, in both passes. Raises
    `ConfigError`."""
    if not path.exists():
        raise ConfigError(f"there is no trace {path}")
    if not path.is_file():
        raise ConfigError(f"cannot read the trace {path}: it must be a file, as it is read twice")
    return compare(
        lambda: read_trace(path, on_read),
        policies,
        capacities,
        block_tokens=block_tokens,
        uses_finishes=uses_finishes,
    )


class _Replay:
    """One policy at one size, with its processor time."""

    def __init__(self, name: str, capacity: int, num_blocks: int, uses_finishes: bool) -> None:
        self._name, self._capacity, self._num_blocks = name, capacity, num_blocks
        policy = make_eviction_policy(name, num_blocks)
        self._cache = PolicyCache(policy, num_blocks, uses_finishes=uses_finishes)
        self._cpu_s = 0.0

    def request(self, request: TraceRequest) -> None:
        started = time.thread_time()
        self._cache.request(request)
        self._cpu_s += time.thread_time() - started

    def figures(self, num_accesses: int) -> PolicyFigures:
        cache = self._cache
        return PolicyFigures(
            policy=self._name,
            capacity_tokens=self._capacity,
            capacity_blocks=self._num_blocks,
            hit_ratio=cache.hits / num_accesses,
            evictions=cache.evictions,
            operations=cache.operations,
            cpu_s=self._cpu_s,
        )


def _num_blocks(capacity: int, block_tokens: int) -> int:
    if block_tokens < 1:
        raise ConfigError(f"a block has at least 1 token, not {block_tokens}")
    if capacity < block_tokens:
        raise ConfigError(f"a cache of {capacity} tokens cannot hold a block of {block_tokens}")
    return capacity // block_tokens
