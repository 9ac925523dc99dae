"""The index of shared memory: its lock, and slots of writers that fail or are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from killed_writers import NUM_KILLS, kill_writers
from trouble import TroubledMachine, is_true, run

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.errors import StoreError
from kvferry.store.base import PutResult
from kvferry.store.eviction.fifo import Fifo
from kvferry.store.media.memory import MemoryStore
from kvferry.store.media.memory_index import MemoryIndex
from kvferry.store.table import find_store, find_stores
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
            assert await store.put([block_of(index) for index in range(150)]) != [PutResult.DROPPED] * 150
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


class CountedFifo(Fifo):
    """`num_made`: number of policies made."""

    num_made = 0

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        CountedFifo.num_made += 1


def test_the_lock_of_shared_memory_looks_no_policy_up_again(tmp_path: Path) -> None:
    """To find one takes longer than all else that is done under the lock."""

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        before = CountedFifo.num_made
        assert before > 0
        await store.put([block_of(1)])
        assert await fetch(store, [0, 1]) == [True, True]
        assert CountedFifo.num_made == before

    run([f"memory:8MiB?name={tmp_path.name}&eviction={__name__}:CountedFifo"], use)


class FaultyIndex(MemoryIndex):
    """An index with faults: "lock" fails each second time that the lock is taken, "reserve" at each fourth slot."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fault = ""
        self._num_calls = 0

    def _fails(self, fault: str, every: int) -> bool:
        self._num_calls += self.fault == fault
        return self.fault == fault and self._num_calls % every == 0

    @contextmanager
    def locked(self) -> Iterator[None]:
        if self._fails("lock", 2):
            raise StoreError("the lock could not be had")
        with super().locked():
            yield

    def reserve(self) -> tuple[int, BlockHash | None] | None:
        if self._fails("reserve", 4):
            raise ZeroDivisionError("a bug")
        return super().reserve()


class FaultyStore(MemoryStore):
    """A store with a faulty index: `index`."""

    index: FaultyIndex

    def index_type(self, *arguments: Any) -> FaultyIndex:  # type: ignore[override]
        self.index = FaultyIndex(*arguments)
        return self.index


def test_slots_of_a_put_that_fails_are_not_lost(tmp_path: Path) -> None:
    async def use(store: TieredStore) -> None:
        memory = store.tiers[0].store
        assert isinstance(memory, FaultyStore)
        for fault in ("lock", "reserve"):
            for _ in range(4):
                memory.index.fault = fault
                with pytest.raises((StoreError, ZeroDivisionError)):
                    await memory.put([block_of(index) for index in range(4)])
            memory.index.fault = ""
            assert await memory.put([block_of(index) for index in range(4)]) == [PutResult.STORED] * 4
            assert await memory.put([block_of(index) for index in range(4, 8)]) == [PutResult.STORED] * 4
            assert await fetch(memory, range(8)) == [True] * 8
            await memory.delete(names_of(8))

    run([replace(find_store(f"memory:?num_blocks=8&name={tmp_path.name}"), kind=FaultyStore)], use)
