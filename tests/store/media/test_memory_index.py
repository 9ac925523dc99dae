"""The index of shared memory: its lock, and slots of writers that fail or are killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from killed_writers import NUM_KILLS, kill_writers
from trouble import TroubledMachine, is_true, run

from kvferry.core.errors import StoreError
from kvferry.store.base import Put
from kvferry.store.table import find_stores
from kvferry.store.tiered.tiers import TieredStore
from kvferry.testing.stores import LAYOUT, block_of, fetch, names_of
from support.waiting import eventually

pytestmark = pytest.mark.short_deadlines


@pytest.mark.processes
@pytest.mark.parametrize("num_kills", [6, pytest.param(NUM_KILLS or 500, marks=pytest.mark.full)])
@pytest.mark.timeout(3000)
def test_writers_of_shared_memory_killed_at_random_instants(tmp_path: Path, num_kills: int) -> None:
    """One who stays keeps the memory there. It is far too small, so that slots are reused all the time."""
    url = f"memory:?num_blocks=60&name={tmp_path.name}"
    store = find_stores(url)[0].make(LAYOUT)

    def look() -> None:
        async def use() -> None:
            await fetch(store, range(200))
            assert await store.put([block_of(index) for index in range(150)]) != [Put.DROPPED] * 150
            found = await fetch(store, range(150))
            assert sum(found) >= 30, "room is not lost with those who were about to write to it"
            assert store.statistics().get("corrupt_blocks", 0) == 0

        asyncio.run(use())

    asyncio.run(store.open())
    try:
        kill_writers(url, num_kills, 8, look)
    finally:
        asyncio.run(store.close())


def test_a_process_that_stops_with_the_lock_is_not_waited_for_without_end(tmp_path: Path) -> None:
    machine = TroubledMachine()
    url = f"memory:?num_blocks=8&name={tmp_path.name}"

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        other = TroubledMachine()
        second = find_stores(url)[0].make(LAYOUT, other)
        await second.open()
        with other.arenas[0].locked():
            assert await store.match(names_of(1)) == 0
            assert not store.tiers[0].is_up
        await eventually(lambda: is_true(store.match(names_of(1)), 1))
        await second.close()

    run([url], use, machine=machine)


def test_the_lock_of_shared_memory_looks_no_policy_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find one takes longer than all else that is done under the lock."""

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        made = []
        monkeypatch.setattr("kvferry.store.media.memory_index.make_eviction_policy", lambda *named: made.append(named))
        await store.put([block_of(1)])
        assert await fetch(store, [0, 1]) == [True, True]
        assert made == []

    run([f"memory:8MiB?name={tmp_path.name}"], use)


def test_slots_of_a_put_that_fails_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(store: TieredStore) -> None:
        memory = store.tiers[0].store
        fill, take = memory._fill, memory._index.reserve  # type: ignore[attr-defined]
        takes = iter(range(100))

        def no_fill(*arguments: object) -> None:
            raise StoreError("the lock could not be had")

        def no_take() -> object:
            if next(takes) % 4 == 3:
                raise ZeroDivisionError("a policy with a bug")
            return take()

        for name, broken, right in (("_fill", no_fill, fill), ("reserve", no_take, take)):
            owner = memory if name == "_fill" else memory._index  # type: ignore[attr-defined]
            for _ in range(4):
                setattr(owner, name, broken)
                with pytest.raises((StoreError, ZeroDivisionError)):
                    await memory.put([block_of(index) for index in range(4)])
            setattr(owner, name, right)
            assert await memory.put([block_of(index) for index in range(4)]) == [Put.STORED] * 4
            assert await memory.put([block_of(index) for index in range(4, 8)]) == [Put.STORED] * 4
            assert await fetch(memory, range(8)) == [True] * 8
            await memory.delete(names_of(8))

    run([f"memory:?num_blocks=8&name={tmp_path.name}"], use)
