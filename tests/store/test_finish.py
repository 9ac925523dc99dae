"""Stores tell their policies of the ends of requests: one that learns from them evicts as when it is replayed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from told_policy import ToldPolicy

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.store.media.memory_index import MemoryIndex
from kvferry.store.table import find_store, find_stores
from kvferry.store.tiered.tiers import TieredStore
from kvferry.testing.stores import LAYOUT, block_of, fetch, name_of, names_of

NUM_BLOCKS = 6
TOLD = "told_policy:ToldPolicy"


@pytest.fixture(autouse=True)
def _none_yet() -> None:
    ToldPolicy.made.clear()


def told(num_output_tokens: int) -> dict[str, int]:
    """What a policy is told of blocks 0, 1, … if it is told all."""
    return {name_of(index).hex(): num_output_tokens for index in range(NUM_BLOCKS)}


@pytest.mark.parametrize("num_output_tokens", [0, 1, 300, MemoryIndex.max_answer_tokens, 2**40])
def test_all_who_share_an_arena_hear_of_it(tmp_path: Path, num_output_tokens: int) -> None:
    async def use() -> None:
        url = f"memory:?num_blocks=32&name={tmp_path.name}&eviction={TOLD}"
        first, second = find_store(url).make(LAYOUT), find_store(url).make(LAYOUT)
        await asyncio.gather(first.open(), second.open())
        await first.put([block_of(index) for index in range(NUM_BLOCKS)])
        assert await second.match(names_of(NUM_BLOCKS)) == NUM_BLOCKS
        assert not any(policy.told for policy in ToldPolicy.made)
        await first.finish([*names_of(NUM_BLOCKS), name_of(40)], num_output_tokens)
        assert await fetch(second, [0]) == [True]
        heard = [policy.told for policy in ToldPolicy.made if policy.told]
        assert heard == [told(min(num_output_tokens, MemoryIndex.max_answer_tokens))] * 2, "that of each store"
        await first.close()
        await second.close()

    asyncio.run(use())


def test_a_policy_that_learns_nothing_of_it_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Sequence[BlockHash]] = []

    async def hear(hashes: Sequence[BlockHash], num_output_tokens: int) -> None:
        heard.append(hashes)

    async def use() -> None:
        await store.open()
        await store.put([block_of(0)])
        with monkeypatch.context() as patched:
            patched.setattr(lru, "finish", hear)
            await store.finish(names_of(1), 10)
        assert heard == []
        await lru.finish(names_of(1), 10)  # but may be
        assert await fetch(store, [0]) == [True]
        await store.close()

    urls = [f"memory:?num_blocks=32&name={tmp_path.name}", f"file:{tmp_path}/kv?max_bytes=1MiB&eviction=reuse"]
    store = TieredStore(find_stores(urls), LAYOUT)
    lru = store.tiers[0].store
    assert [spec.uses_finishes for spec in find_stores(urls)] == [False, True]
    asyncio.run(use())


def test_a_directory_s_policy_hears_of_it(tmp_path: Path) -> None:
    async def use() -> None:
        store = find_store(f"file:{tmp_path}/kv?max_bytes=1MiB&eviction={TOLD}").make(LAYOUT)
        await store.open()
        await store.put([block_of(index) for index in range(NUM_BLOCKS)])
        await store.finish([*names_of(NUM_BLOCKS), name_of(40)], 20)
        [policy] = ToldPolicy.made
        assert told(20).items() <= policy.told.items()
        await store.close()

    asyncio.run(use())
