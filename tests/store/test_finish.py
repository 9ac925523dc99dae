"""Stores tell their policies of the ends of requests: one that learns from them evicts as when it is replayed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvferry.store.eviction.learned import UNKNOWN_OUTPUT, Learned
from kvferry.store.eviction.reuse import Reuse
from kvferry.store.media.memory_index import MAX_ANSWER_TOKENS
from kvferry.store.table import find_store, find_stores
from kvferry.store.tiers import TieredStore
from kvferry.testing.stores import LAYOUT, block_of, fetch, name_of, names_of

NUM_BLOCKS = 6


def outputs(policy: Any) -> list[int]:
    """What is known of the answers of blocks 0, 1, …; by name, or by a path with the name in it."""
    policy = policy.policy
    assert isinstance(policy, Reuse)
    learned = policy.learned.policy
    assert isinstance(learned, Learned)
    known = {(Path(key).stem if isinstance(key, str) else key.hex()): group for key, group in learned._kept.items()}
    return [known[name_of(index).hex()].run.output for index in range(NUM_BLOCKS)]


def memory(name: str, eviction: str = "reuse") -> Any:
    return find_store(f"memory:?num_blocks=32&name={name}&eviction={eviction}").make(LAYOUT)


@pytest.mark.parametrize("num_output_tokens", [0, 1, 300, MAX_ANSWER_TOKENS, 2**40])
def test_all_who_share_an_arena_hear_of_it(tmp_path: Path, num_output_tokens: int) -> None:
    async def use() -> None:
        first, second = memory(tmp_path.name), memory(tmp_path.name)
        await asyncio.gather(first.open(), second.open())
        await first.put([block_of(index) for index in range(NUM_BLOCKS)])
        assert await second.match(names_of(NUM_BLOCKS)) == NUM_BLOCKS
        assert set(outputs(second._index._policy)) == {UNKNOWN_OUTPUT}
        await first.finish([*names_of(NUM_BLOCKS), name_of(40)], num_output_tokens)
        assert await fetch(second, [0]) == [True]
        told = outputs(first._index._policy)
        assert told == outputs(second._index._policy)
        assert UNKNOWN_OUTPUT not in told
        await first.close()
        await second.close()

    asyncio.run(use())


def test_a_policy_that_learns_nothing_of_it_is_not_told(tmp_path: Path) -> None:
    async def use() -> None:
        await store.open()
        await store.put([block_of(0)])
        before = int(lru._index._counters[1])
        await store.finish(names_of(1), 10)
        assert int(lru._index._counters[1]) == before
        await lru.finish(names_of(1), 10)  # but may be
        assert await fetch(store, [0]) == [True]
        await store.close()

    urls = [f"memory:?num_blocks=32&name={tmp_path.name}", f"file:{tmp_path}/kv?max_bytes=1MiB&eviction=reuse"]
    store = TieredStore(find_stores(urls), LAYOUT)
    lru: Any = store.tiers[0].store
    assert [spec.uses_finishes for spec in find_stores(urls)] == [False, True]
    asyncio.run(use())


def test_a_directory_s_policy_hears_of_it(tmp_path: Path) -> None:
    async def use() -> None:
        store: Any = find_store(f"file:{tmp_path}/kv?max_bytes=1MiB&eviction=reuse").make(LAYOUT)
        await store.open()
        await store.put([block_of(index) for index in range(NUM_BLOCKS)])
        await store.finish([*names_of(NUM_BLOCKS), name_of(40)], 20)
        assert UNKNOWN_OUTPUT not in outputs(store._room._policy)
        await store.close()

    asyncio.run(use())
