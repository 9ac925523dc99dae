"""Several tiers as one store: blocks that go up and down, notes, and what may not be mixed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from trouble import is_true, run

from kvferry.core.errors import StoreError
from kvferry.store.table import find_stores
from kvferry.store.tiered.tiers import TieredStore
from kvferry.testing.stores import LAYOUT, block_of, fetch, is_block, name_of, names_of, read_of
from support.waiting import eventually

pytestmark = pytest.mark.short_deadlines


@pytest.mark.diagonal
@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "arc", "lfu", "fifo"])
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_store_far_too_small_is_right_and_keeps_what_is_pinned(tmp_path: Path, kind: str, eviction: str) -> None:
    size = 9000
    urls = {
        "memory": f"memory:?num_blocks=10&name={tmp_path.name}&eviction={eviction}",
        "file": f"file:{tmp_path}?max_bytes={10 * size}&eviction={eviction}",
    }

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        assert await store.pin([name_of(0)]) == 1
        draw = random.Random(3)
        for _ in range(60):
            await store.put([block_of(index) for index in draw.sample(range(1, 60), 4)])
            await fetch(store, draw.sample(range(60), 6))
        assert await fetch(store, [0]) == [True]
        figures = store.statistics()
        assert figures["evicted_blocks"] > 20
        assert figures["kept_bytes"] <= 11 * size
        await store.unpin([name_of(0)])
        for index in range(100, 160):
            await store.put([block_of(index)])
        assert store.statistics()["pinned_blocks"] == 0

    run([urls[kind]], use)


def test_what_a_lower_tier_has_comes_up(tmp_path: Path) -> None:
    urls = [f"memory:?num_blocks=64&name={tmp_path.name}", f"file:{tmp_path}"]

    async def use(store: TieredStore) -> None:
        first, second = (tier.store for tier in store.tiers)
        await second.put([block_of(index) for index in range(8)])
        assert await store.match(names_of(9)) == 8
        assert await fetch(store, range(4)) == [True] * 4
        await eventually(lambda: is_true(first.match(names_of(9)), 4))
        await store.prefetch(names_of(9))
        assert await first.match(names_of(9)) == 8
        await second.delete(names_of(9))
        await first.delete([name_of(2)])
        assert await store.match(names_of(9)) == 2
        await second.put([block_of(2)])
        assert await store.match(names_of(9)) == 8, "blocks of one prompt may be in several tiers"
        assert await fetch(store, range(9)) == [*[True] * 8, False]

    run(urls, use)


def test_write_back_reaches_the_lower_tier_later(tmp_path: Path) -> None:
    urls = [f"memory:?num_blocks=64&name={tmp_path.name}", f"file:{tmp_path}"]

    async def use(store: TieredStore) -> None:
        await store.put([block_of(index) for index in range(40)])
        assert store.statistics()["dirty_blocks"] > 0
        await eventually(lambda: is_true(store.tiers[1].store.match(names_of(40)), 40))
        await store.put([block_of(41)])

    run(urls, use, write="back")

    async def look(store: TieredStore) -> None:
        assert await store.match([name_of(41)]) == 1, "what waited was written before the end"
        assert await fetch(store, range(40)) == [True] * 40

    run(urls[1:], look)


def test_a_read_is_what_was_put(tmp_path: Path) -> None:
    """The suite's own eyes: a block that is not the one that was put is seen."""
    read = read_of(1)
    assert not is_block(read, 1)


def test_lossy_kv_is_never_taken_for_exact_in_any_tier(tmp_path: Path) -> None:
    """It moves up, and what is computed on it is kept everywhere; who named no lossy codec finds none of it."""
    memory = f"memory:?num_blocks=64&name={tmp_path.name}"
    lossy = [memory, f"file:{tmp_path}/low?codec=int4", f"file:{tmp_path}/high"]

    async def use(store: TieredStore) -> None:
        await store.put([block_of(index) for index in range(4)])
        await store.tiers[0].store.delete(names_of(4))
        assert await store.get([read_of(0)]) == [True]
        await eventually(lambda: is_true(store.tiers[0].store.match(names_of(1)), 1))
        for urls in ([memory], [f"file:{tmp_path}/low"], [f"file:{tmp_path}/high"], [memory, f"file:{tmp_path}/low"]):
            exact = TieredStore(find_stores(urls), LAYOUT)
            await exact.open()
            assert await fetch(exact, range(4)) == [False] * 4
            await exact.close()
        alike = TieredStore(find_stores(lossy[1]), LAYOUT)
        await alike.open()
        assert await alike.match(names_of(4)) == 4, "who names the same codec shares it"
        await alike.close()

    run(lossy, use)


def test_what_a_tier_does_not_pin_is_told_with_the_reason(tmp_path: Path) -> None:
    async def use(store: TieredStore) -> None:
        await store.put([block_of(index) for index in range(10)])
        memory, file = await store.shares(names_of(10), pin=True)
        assert (memory.num_present, memory.num_pinned) == (10, 6)
        assert memory.refusal is not None
        assert "did not pin all of it" in memory.refusal
        assert "pinned_share" in memory.refusal
        assert (file.num_pinned, file.refusal) == (10, None)
        memory, file = await store.shares(names_of(10), pin=False)
        assert memory.refusal is file.refusal is None
        assert store.statistics()["pinned_blocks"] == 0

    run([f"memory:?num_blocks=12&name={tmp_path.name}", f"file:{tmp_path}"], use)


def test_a_note_comes_after_the_blocks_written_back_before_it(tmp_path: Path) -> None:
    """Also those that the first tier could not take."""
    urls = [f"memory:?num_blocks=64&name={tmp_path.name}", f"file:{tmp_path}/a", f"file:{tmp_path}/b"]

    async def use(store: TieredStore) -> None:
        await store.put([block_of(index) for index in range(20)])
        await store.write_note("all there", b"yes", 60)
        assert await store.tiers[2].store.match(names_of(20)) == 20
        store.tiers[0].store.put = store.tiers[0].store.get = broken  # type: ignore[method-assign]
        await store.put([block_of(20)])
        await store.write_note("this too", b"yes", 60)
        assert await store.tiers[2].store.match([name_of(20)]) == 1

    async def broken(*arguments: object) -> list[Any]:
        raise StoreError("away")

    run(urls, use, write="back")
