from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.conversations import Conversations
from kvferry.core.errors import ConfigError
from kvferry.store.eviction.base import BlockKey
from kvferry.store.eviction.lru import Lru
from kvferry.store.eviction.table import POLICIES
from kvferry.store.trace.caches import NextUses, OptimalCache, PolicyCache
from kvferry.store.trace.comparison import Comparison, compare, compare_file
from kvferry.store.trace.records import TraceRequest, write_trace
from support.examples import examples

MILLION = 10**6
SIZES = [MILLION // 2, MILLION, 3 * MILLION, 15 * MILLION]


def of_blocks(prompts: list[list[int]]) -> list[TraceRequest]:
    return [TraceRequest(1000 * number, len(keys), 1, keys) for number, keys in enumerate(prompts)]


def ratios(found: Comparison, policy: str) -> dict[int, float]:
    return {row.capacity_tokens: row.hit_ratio for row in found.policies if row.policy == policy}


def test_counted_by_hand() -> None:
    requests = of_blocks([[1, 2, 3], [1, 2, 4], [5], [1, 2, 3]])
    found = compare(lambda: iter(requests), ["lru"], [4, 6], block_tokens=1)
    assert (found.requests, found.blocks, found.different_blocks) == (4, 10, 5)
    assert found.infinite_hit_ratio == 5 / 10
    assert found.optimal_hit_ratio == {4: 5 / 10, 6: 5 / 10}
    assert ratios(found, "lru") == {4: 4 / 10, 6: 5 / 10}


def test_only_prefixes_are_found() -> None:
    """Blocks behind one that is gone save no work."""
    requests = of_blocks([[1, 2, 3], [4], [1, 2, 3]])
    found = compare(lambda: iter(requests), ["fifo"], [3], block_tokens=1)
    assert ratios(found, "fifo") == {3: 0}


@pytest.mark.parametrize("prompts", [[[1, 2], [2]], [[2], [1, 2]], [[1, 2], [3, 2]], [[1, 2, 1]], [[1, 1]]])
def test_blocks_that_are_not_chained_are_refused(prompts: list[list[int]]) -> None:
    requests = of_blocks(prompts)
    with pytest.raises(ConfigError, match=r"not chained: block [12] (comes first|follows block [123]) in one request"):
        compare(lambda: iter(requests), ["lru"], [2], block_tokens=1)


chained = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=5)
"""Prompts as ways through a tree with two branches everywhere."""


@given(ways=chained, capacity=st.integers(1, 4))
@settings(max_examples=examples(150), deadline=None)
def test_the_optimum_is_what_the_best_of_all_ways_to_evict_finds(ways: list[list[int]], capacity: int) -> None:
    prompts = [[int("1" + "".join(map(str, way[: end + 1]))) for end in range(len(way))] for way in ways]
    requests = of_blocks(prompts)
    found = compare(lambda: iter(requests), list(POLICIES), [capacity], block_tokens=1)
    best = found.optimal_hit_ratio[capacity]
    assert best == pytest.approx(most_hits(prompts, capacity))
    assert max(row.hit_ratio for row in found.policies) <= best <= found.infinite_hit_ratio


def most_hits(prompts: list[list[int]], capacity: int) -> float:
    """The best of all ways to evict, tried out. Hits are of a prompt's beginning, as in any `Cache`."""
    states: dict[tuple[frozenset[int], bool], int] = {(frozenset(), True): 0}
    for prompt in prompts:
        for place, key in enumerate(prompt):
            after: dict[tuple[frozenset[int], bool], int] = {}
            for (kept, is_prefix), hits in states.items():
                found = key in kept and (is_prefix or place == 0)
                wanted = kept | {key}
                for choice in itertools.combinations(wanted, min(capacity, len(wanted))):
                    state = frozenset(choice), found
                    after[state] = max(after.get(state, 0), hits + found)
            states = after
    return max(states.values()) / sum(map(len, prompts))


class Counted(Lru):
    """LRU that knows how many blocks it was ever given at once."""

    most = 0

    def insert(self, key: BlockKey, now: float, parent: BlockKey | None = None) -> None:
        super().insert(key, now, parent)
        Counted.most = max(Counted.most, len(self))


def test_capacity_is_never_exceeded_even_by_one_prompt() -> None:
    cache = PolicyCache(Counted(3), 3)
    for request in of_blocks([list(range(10)), list(range(10)), [77, 78]]):
        cache.request(request)
    assert Counted.most == 3
    assert cache.evictions == 7 + 7 + 2


def test_memory_of_the_optimum_is_bounded() -> None:
    requests = of_blocks([[number % 50] for number in range(20_000)])
    uses = NextUses()
    for request in requests:
        uses.request(request)
    optimum = OptimalCache(10, uses)
    tracemalloc.start()
    try:
        for request in requests:
            optimum.request(request)
        assert tracemalloc.get_traced_memory()[1] < 200_000, "a use of each hit would take 400 kB"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "shape",
    [
        Conversations(duration_s=400),
        pytest.param(
            Conversations(duration_s=900, shorter_if_continued=4, system_blocks=6, gap_median_s=30, gap_p90_s=300),
            marks=pytest.mark.full,
        ),
        Conversations(
            duration_s=200, continued_share=0.6, mean_turns=8, gap_median_s=10, gap_p90_s=25, requests_per_s=6
        ),
        pytest.param(
            Conversations(duration_s=900, continued_share=0.05, mean_turns=12, turn_blocks=6, first_spread=1.4),
            marks=pytest.mark.full,
        ),
    ],
    ids=["usual", "told by answers", "quick turns", "long sessions"],
)
def test_learnt_reuse_is_never_below_lru(shape: Conversations) -> None:
    requests = shape.requests(seed=11)
    found = compare(lambda: iter(requests), ["lru", "reuse"], SIZES)
    lru, reuse = ratios(found, "lru"), ratios(found, "reuse")
    assert all(reuse[size] >= lru[size] - 0.001 for size in SIZES), (lru, reuse)


@pytest.mark.parametrize(
    "sizes",
    [[3 * MILLION], pytest.param([MILLION, 3 * MILLION], marks=pytest.mark.full)],
    ids=["one size", "two sizes"],
)
def test_learnt_reuse_is_far_above_lru_where_most_prompts_come_once(sizes: list[int]) -> None:
    requests = Conversations(duration_s=1800).requests(seed=5)
    found = compare(lambda: iter(requests), ["lru", "s3fifo", "reuse"], sizes)
    lru, s3fifo, reuse = (ratios(found, name) for name in ("lru", "s3fifo", "reuse"))
    for size in sizes:
        assert reuse[size] > 1.3 * lru[size]
        assert reuse[size] > 1.1 * s3fifo[size]
    deaf = compare(lambda: iter(requests), ["reuse"], [3 * MILLION], uses_finishes=False)
    assert ratios(deaf, "reuse")[3 * MILLION] > 1.2 * lru[3 * MILLION]


def test_the_made_up_traffic_has_its_shape() -> None:
    requests = Conversations().requests(seed=2)
    uses: dict[int, list[float]] = {}
    for request in requests:
        for key in request.hash_ids:
            uses.setdefault(key, []).append(request.arrived_s)
    assert all(request.hash_ids[0] == 0 for request in requests)
    assert 0.7 < sum(len(times) == 1 for times in uses.values()) / len(uses) < 0.87
    gaps = sorted(b - a for key, times in uses.items() if key for a, b in itertools.pairwise(times))
    assert 110 < gaps[len(gaps) // 2] < 170
    assert 400 < gaps[len(gaps) * 9 // 10] < 600
    assert Conversations().requests(seed=2) == requests


def test_a_file_is_read_twice_and_a_pipe_refused(tmp_path: Path) -> None:
    requests = of_blocks([[1], [1]])
    write_trace(tmp_path / "trace.jsonl", iter(requests))
    heard: list[int] = []
    found = compare_file(tmp_path / "trace.jsonl", ["lru"], [512], on_read=heard.append)
    assert found.infinite_hit_ratio == 0.5
    assert sum(heard) == 2 * (tmp_path / "trace.jsonl").stat().st_size
    with pytest.raises(ConfigError, match="read twice"):
        compare_file(Path("/dev/stdin"), ["lru"], [512])
    with pytest.raises(ConfigError, match=r"there is no trace .*/other\.jsonl"):
        compare_file(tmp_path / "other.jsonl", ["lru"], [512])
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="no blocks"):
        compare_file(tmp_path / "empty", ["lru"], [512])
    with pytest.raises(ConfigError, match="cannot hold a block"):
        compare_file(tmp_path / "trace.jsonl", ["lru"], [511])
