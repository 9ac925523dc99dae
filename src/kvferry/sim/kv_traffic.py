"""The KV traffic of a trace: bytes a second from P to D, and the hits, reads and writes of stores of several sizes.
Computed from the block hashes; nothing is simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

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
"""Share of the largest store's hits from which a smaller one is as good."""
WORTH = 0.05
"""Min gain of a store's hit share over the prefix caches' to be worth its cost."""


def prefill_seconds(times: StepTimes, num_tokens: int, chunk: int, start: int = 0) -> float:
    """Seconds of the steps of one prompt from token `start` on: earlier ones are cached."""
    seconds = times.request_s
    while start < num_tokens:
        number = min(chunk, num_tokens - start)
        pairs = number * (start + (number + 1) / 2)
        seconds += times.seconds(StepWork(number, pairs, 0, start + number))
        start += number
    return seconds


class StoreUse(msgspec.Struct, frozen=True, rename={"hit_share": "found"}):
    """The effect of one store on a trace, if no instance had a prefix cache.

    `num_bytes`: its size; `hit_share`: the share of the prompts' tokens that it has; `reads`, `writes`: bytes a second
    of hits and of new blocks, each in its busiest ten seconds; `saves`: mean seconds of prefill saved in a second, so
    a number of instances; `min_bandwidth`: bytes a second at which reading takes as long as computing, 0 without hits.
    """

    num_bytes: int
    hit_share: float
    reads: float
    writes: float
    saves: float
    min_bandwidth: float


def peak_rate(tokens: Iterable[tuple[float, float]], token_bytes: int) -> float:
    """Bytes a second in the busiest window of ten seconds, for (second, tokens) in the order of their time."""
    window = deque[tuple[float, float]]()
    in_window = peak = 0.0
    for at_s, number in tokens:
        window.append((at_s, number))
        in_window += number
        while window[0][0] <= at_s - WINDOW_S:
            in_window -= window.popleft()[1]
        peak = max(peak, in_window)
    return peak * token_bytes / WINDOW_S


def hand_off_rate(arrivals: Sequence[Arrival], token_bytes: int) -> float:
    """Bytes a second from P to D in the busiest ten seconds, if every prompt is handed off as a whole."""
    return peak_rate(((arrival.at_s, arrival.prompt_tokens) for arrival in arrivals), token_bytes)


def store_use(arrivals: Sequence[Arrival], num_bytes: int, times: MachineTimes, chunk: int) -> StoreUse:
    """The effect of a store of this size."""
    token_bytes, step = times.kv.token_bytes, times.step
    hits = list(_found_tokens(arrivals, num_bytes // (BLOCK_TOKENS * token_bytes)))
    saved_s = sum(
        prefill_seconds(step, arrival.prompt_tokens, chunk)
        - prefill_seconds(step, arrival.prompt_tokens, chunk, number)
        for arrival, number in zip(arrivals, hits, strict=True)
    )
    lasts_s = max(1.0, arrivals[-1].at_s)
    read = [(arrival.at_s, float(number)) for arrival, number in zip(arrivals, hits, strict=True)]
    written = [
        (arrival.at_s, float(arrival.prompt_tokens - number)) for arrival, number in zip(arrivals, hits, strict=True)
    ]
    return StoreUse(
        num_bytes=num_bytes,
        hit_share=sum(hits) / sum(arrival.prompt_tokens for arrival in arrivals),
        reads=peak_rate(read, token_bytes),
        writes=peak_rate(written, token_bytes),
        saves=saved_s / lasts_s,
        min_bandwidth=sum(hits) * token_bytes / saved_s if saved_s > 0 else 0.0,
    )


def store_uses(arrivals: Sequence[Arrival], times: MachineTimes, chunk: int) -> list[StoreUse]:
    """Stores of several sizes, the largest of which holds all blocks of the trace; none if no block is repeated."""
    ids = [block for arrival in arrivals for block in arrival.block_ids]
    num_blocks = len(set(ids))
    if num_blocks == len(ids):
        return []
    footprint = num_blocks * BLOCK_TOKENS * times.kv.token_bytes
    sizes = sorted({_power_of_two(max(BLOCK_TOKENS * times.kv.token_bytes, share * footprint)) for share in _SIZES})
    return [store_use(arrivals, size, times, chunk) for size in sizes]


def large_enough(uses: Sequence[StoreUse]) -> StoreUse:
    """The smallest store with nearly as many hits as the largest."""
    return next(use for use in uses if use.hit_share >= ENOUGH * uses[-1].hit_share)


def _found_tokens(arrivals: Sequence[Arrival], num_blocks: int) -> Iterator[int]:
    """The tokens at the beginning of each prompt that a store of `num_blocks` blocks has."""
    cache = PolicyCache(make_eviction_policy(STORE_POLICY, num_blocks), num_blocks, uses_finishes=False)
    for arrival in arrivals:
        before = cache.hits
        cache.request(
            TraceRequest(arrival.at_s * 1e3, arrival.prompt_tokens, arrival.answer_tokens, list(arrival.block_ids))
        )
        yield min(arrival.prompt_tokens, (cache.hits - before) * BLOCK_TOKENS)


def _power_of_two(number: float) -> int:
    return 1 << (max(1, int(number)) - 1).bit_length()


def to_size(num_bytes: int) -> str:
    """A size in the form of `memory:` URLs."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.4g}{unit}"
    return f"{num_bytes}B"


Way = Literal["nothing", "P2P", "a store", "P2P and a store"]


@dataclass(frozen=True)
class KVPlan:
    """The recommended transport and storage of a trace's KV.

    `hand_offs`: bytes a second from P to D in the busiest ten seconds, 0 for plain instances; `stores`: of several
    sizes; `caches`: a store as large as all prefix caches together, an upper bound of their hits; `store`: the
    recommended one, if any; `why`: in one sentence.
    """

    way: Way
    why: str
    hand_offs: float
    stores: list[StoreUse]
    caches: StoreUse | None = None
    store: StoreUse | None = None

    def bandwidths(self) -> Iterator[tuple[Way, float, float, float]]:
        """Bytes a second by P2P, read from and written to the store, for each way to hand off. Through a store alone, D
        reads all prompts from it."""
        store = self.store or (large_enough(self.stores) if self.stores else None)
        reads, writes = (store.reads, store.writes) if store is not None else (0.0, self.hand_offs)
        yield "P2P", self.hand_offs, 0.0, 0.0
        yield "a store", 0.0, reads + self.hand_offs, writes
        if store is not None:
            yield "P2P and a store", self.hand_offs, reads, writes


def plan_kv(arrivals: Sequence[Arrival], times: MachineTimes, chunk: int, num_caches: int, *, is_split: bool) -> KVPlan:
    """Choose transport and storage of a trace's KV. `num_caches`: instances that compute prompts."""
    hand_offs = hand_off_rate(arrivals, times.kv.token_bytes) if is_split else 0.0
    without: Way = "P2P" if is_split else "nothing"
    stores = store_uses(arrivals, times, chunk)
    if not stores:
        reason = "no prompt of the trace is known to begin like another, so a store would find nothing"
        return KVPlan(without, reason, hand_offs, stores)
    store = large_enough(stores)
    caches = store_use(arrivals, num_caches * times.kv.num_tokens * times.kv.token_bytes, times, chunk)
    reason = (
        f"a store would have {store.hit_share:.0%} of the prompts' tokens, and the prefix caches of {num_caches}"
        f" instances together {caches.hit_share:.0%} at most"
    )
    if store.hit_share < caches.hit_share + WORTH:
        return KVPlan(without, reason, hand_offs, stores, caches)
    if times.transfer.bandwidth < store.min_bandwidth:
        reason += ", but computing a prompt is faster than hand-offs were measured to be"
        return KVPlan(without, reason, hand_offs, stores, caches)
    return KVPlan("P2P and a store" if is_split else "a store", reason, hand_offs, stores, caches, store)
