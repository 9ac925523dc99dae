"""`reuse` beside LRU while popularity drifts."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from benchmarks.conversations import Conversations
from kvferry.store.eviction.base import EvictionPolicy
from kvferry.store.eviction.leaf_lru import LeafLru
from kvferry.store.eviction.learned import LearnedPolicy
from kvferry.store.eviction.reuse import Reuse
from kvferry.store.trace.caches import PolicyCache
from kvferry.store.trace.records import TraceRequest
from support.drifting import DRIFTS, drifting

MAX_LOST = {10_000: 0.004, 40_000: 0.003}
"""Of all blocks, by how many there are: a change of order costs the more, the shorter the traffic."""


def hit_ratio(policy: EvictionPolicy, requests: list[TraceRequest]) -> float:
    cache = PolicyCache(policy, policy.capacity)
    for request in requests:
        cache.request(request)
    return cache.hits / cache.operations


def release_order_hit_ratio(requests: list[TraceRequest], capacity: int) -> float:
    """LRU where every prompt is released from its last block to its first, as by the engine's block pool."""
    kept, hits = OrderedDict[int, None](), 0
    for request in requests:
        hits += next((place for place, key in enumerate(request.hash_ids) if key not in kept), len(request.hash_ids))
        for key in reversed(request.hash_ids):
            kept.pop(key, None)
            kept[key] = None
        while len(kept) > capacity:
            kept.popitem(last=False)
    return hits / sum(len(request.hash_ids) for request in requests)


LONG = [pytest.param(seed, 40_000, marks=pytest.mark.full) for seed in (101, 102)]
"""Nothing of the policy was chosen by these."""


@pytest.mark.parametrize("drift", DRIFTS)
@pytest.mark.parametrize(("seed", "num_blocks"), [(0, 10_000), (1, 10_000), *LONG])
def test_however_popularity_drifts_little_is_lost_against_lru(drift: str, seed: int, num_blocks: int) -> None:
    requests = drifting(drift, num_blocks, seed)
    capacity = len({key for request in requests for key in request.hash_ids}) // 20
    lru = max(hit_ratio(LeafLru(capacity), requests), release_order_hit_ratio(requests, capacity))
    assert hit_ratio(Reuse(capacity), requests) >= lru - MAX_LOST[num_blocks]


@pytest.mark.parametrize("seed", [2, 5])
def test_a_bad_start_does_not_last(seed: int) -> None:
    """In these conversations, LRU leads while nothing is learned yet."""
    requests, capacity = list(Conversations().requests(seed)), 5_859
    learned = hit_ratio(LearnedPolicy(capacity), requests)
    assert hit_ratio(Reuse(capacity), requests) >= learned - 0.005


def test_leaf_lru_is_the_order_of_the_engine_s_block_pool() -> None:
    requests = drifting("mix", 4_000, 0)
    assert hit_ratio(LeafLru(150), requests) == release_order_hit_ratio(requests, 150)


def test_leaf_lru_keeps_a_prompt_s_beginning_if_it_came_in_parts() -> None:
    policy = LeafLru(8)
    for now, (key, parent) in enumerate([("a0", None), ("a1", "a0"), ("b0", None), ("a2", "a1"), ("a3", "a2")]):
        policy.insert(key, now, parent)
    assert [policy.evict(9.0) for _ in range(5)] == ["a3", "a2", "b0", "a1", "a0"]
