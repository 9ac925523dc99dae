"""What moving and keeping the KV of a trace needs: bytes a second from P to D, and what stores of several sizes would
find, read and write. Computed from the block hashes; nothing is simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvferry.sim.times import MachineTimes, StepTimes, StepWork
from kvferry.sim.traffic import BLOCK_TOKENS, Arrival
from kvferry.store.eviction.table import make_eviction_policy
from kvferry.store.trace.caches import PolicyCache
from kvferry.store.trace.records import TraceRequest

WINDOW_S = 10.0
STORE_POLICY = "lru"
"""The eviction of every store by default."""
_SIZES = (1 / 16, 1 / 4, 1.0)
"""Sizes of stores, as shares of all different blocks of a trace; each is rounded up to a power of two of bytes."""
ENOUGH = 0.95
"""Share of what the largest store finds from which a smaller one is as good."""
WORTH = 0.05
"""How much larger a share of prompts' tokens than the prefix caches a store must find to be worth its trouble."""


def prefill_seconds(times: StepTimes, num_tokens: int, chunk: int, start: int = 0) -> float:
    """The steps of one prompt from a token on: those before it are there already."""
    seconds = times.request_s
    while start < num_tokens:
        number = min(chunk, num_tokens - start)
        pairs = number * (start + (number + 1) / 2)
        seconds += times.seconds(StepWork(number, pairs, 0, start + number))
        start += number
    return seconds


@dataclass(frozen=True)
class StoreUse:
    """What one store would do for a trace, if no instance had a prefix cache.

    `num_bytes`: its size; `found`: the share of the prompts' tokens that it has; `reads`, `writes`: bytes a second, of
    the blocks that it has and of those that it gets, each in its busiest ten seconds; `saves`: seconds of prefill that
    it saves in a second, in the mean: so many instances; `min_bandwidth`: bytes a second at which reading takes as
    long as computing, 0 if nothing is found.
    """

    num_bytes: int
    found: float
    reads: float
    writes: float
    saves: float
    min_bandwidth: float


def peak_rate(tokens: Iterable[tuple[float, float]], token_bytes: int) -> float:
    """Bytes a second in the busiest of all windows of ten seconds, of (second, tokens) in the order of their time."""
    window = deque[tuple[float, float]]()
    here = most = 0.0
    for at_s, number in tokens:
        window.append((at_s, number))
        here += number
        while window[0][0] <= at_s - WINDOW_S:
            here -= window.popleft()[1]
        most = max(most, here)
    return most * token_bytes / WINDOW_S


def hand_off_rate(arrivals: Sequence[Arrival], token_bytes: int) -> float:
    """Bytes a second from P to D in the busiest ten seconds, if every prompt is handed off as a whole."""
    return peak_rate(((one.at_s, one.prompt_tokens) for one in arrivals), token_bytes)


def store_use(arrivals: Sequence[Arrival], num_bytes: int, times: MachineTimes, chunk: int) -> StoreUse:
    """What a store of this size would do."""
    token_bytes, step = times.kv.token_bytes, times.step
    found = list(_found_tokens(arrivals, num_bytes // (BLOCK_TOKENS * token_bytes)))
    saved_s = sum(
        prefill_seconds(step, one.prompt_tokens, chunk) - prefill_seconds(step, one.prompt_tokens, chunk, number)
        for one, number in zip(arrivals, found, strict=True)
    )
    lasts_s = max(1.0, arrivals[-1].at_s)
    read = [(one.at_s, float(number)) for one, number in zip(arrivals, found, strict=True)]
    written = [(one.at_s, float(one.prompt_tokens - number)) for one, number in zip(arrivals, found, strict=True)]
    return StoreUse(
        num_bytes=num_bytes,
        found=sum(found) / sum(one.prompt_tokens for one in arrivals),
        reads=peak_rate(read, token_bytes),
        writes=peak_rate(written, token_bytes),
        saves=saved_s / lasts_s,
        min_bandwidth=sum(found) * token_bytes / saved_s if saved_s > 0 else 0.0,
    )


def store_uses(arrivals: Sequence[Arrival], times: MachineTimes, chunk: int) -> list[StoreUse]:
    """Stores of several sizes, the largest of which keeps all blocks of the trace; none if no block comes twice."""
    ids = [block for one in arrivals for block in one.block_ids]
    different = len(set(ids))
    if different == len(ids):
        return []
    footprint = different * BLOCK_TOKENS * times.kv.token_bytes
    sizes = sorted({_power_of_two(max(BLOCK_TOKENS * times.kv.token_bytes, share * footprint)) for share in _SIZES})
    return [store_use(arrivals, size, times, chunk) for size in sizes]


def large_enough(uses: Sequence[StoreUse]) -> StoreUse:
    """The smallest store that finds nearly as much as the largest."""
    return next(one for one in uses if one.found >= ENOUGH * uses[-1].found)


def _found_tokens(arrivals: Sequence[Arrival], num_blocks: int) -> Iterator[int]:
    """The tokens at the beginning of each prompt that a store of `num_blocks` blocks has."""
    cache = PolicyCache(make_eviction_policy(STORE_POLICY, num_blocks), num_blocks, uses_finishes=False)
    for one in arrivals:
        before = cache.hits
        cache.request(TraceRequest(one.at_s * 1e3, one.prompt_tokens, one.answer_tokens, list(one.block_ids)))
        yield min(one.prompt_tokens, (cache.hits - before) * BLOCK_TOKENS)


def _power_of_two(number: float) -> int:
    return 1 << (max(1, int(number)) - 1).bit_length()


def to_size(num_bytes: int) -> str:
    """A size as `memory:` takes it."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.4g}{unit}"
    return f"{num_bytes}B"


Way = Literal["nothing", "P2P", "a store", "P2P and a store"]


@dataclass(frozen=True)
class KVPlan:
    """How the KV of a trace is to be moved and kept.

    `hand_offs`: bytes a second from P to D in the busiest ten seconds, 0 for plain instances; `stores`: of several
    sizes; `caches`: a store as large as all prefix caches together, which find at most as much; `store`: the one to
    take, if any; `why`: in one sentence.
    """

    way: Way
    why: str
    hand_offs: float
    stores: list[StoreUse]
    caches: StoreUse | None = None
    store: StoreUse | None = None

    def bandwidths(self) -> Iterator[tuple[Way, float, float, float]]:
        """Bytes a second by P2P, read from and written to the store, for each way to hand off By a store alone, D reads
        all prompts from there."""
        store = self.store or (large_enough(self.stores) if self.stores else None)
        reads, writes = (store.reads, store.writes) if store is not None else (0.0, self.hand_offs)
        yield "P2P", self.hand_offs, 0.0, 0.0
        yield "a store", 0.0, reads + self.hand_offs, writes
        if store is not None:
            yield "P2P and a store", self.hand_offs, reads, writes


def plan_kv(arrivals: Sequence[Arrival], times: MachineTimes, chunk: int, num_caches: int, *, is_split: bool) -> KVPlan:
    """Choose how to move and keep the KV of a trace. `num_caches`: instances that compute prompts."""
    hand_offs = hand_off_rate(arrivals, times.kv.token_bytes) if is_split else 0.0
    without: Way = "P2P" if is_split else "nothing"
    stores = store_uses(arrivals, times, chunk)
    if not stores:
        why = "no prompt of the trace is known to begin like another, so a store would find nothing"
        return KVPlan(without, why, hand_offs, stores)
    store = large_enough(stores)
    caches = store_use(arrivals, num_caches * times.kv.num_tokens * times.kv.token_bytes, times, chunk)
    why = (
        f"a store would have {store.found:.0%} of the prompts' tokens, and the prefix caches of {num_caches} instances"
        f" together {caches.found:.0%} at most"
    )
    if store.found < caches.found + WORTH:
        return KVPlan(without, why, hand_offs, stores, caches)
    if times.transfer.bandwidth < store.min_bandwidth:
        why += ", but computing a prompt is faster than hand-offs were measured to be"
        return KVPlan(without, why, hand_offs, stores, caches)
    return KVPlan("P2P and a store" if is_split else "a store", why, hand_offs, stores, caches, store)
