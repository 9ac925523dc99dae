"""A store in memory keeps to its size, however small, and says what it needs."""

from __future__ import annotations

import asyncio
import re
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ConfigError
from kvferry.store.arena import Arena
from kvferry.store.base import PutResult
from kvferry.store.machine import MACHINE, Machine
from kvferry.store.media.memory import MemoryStore
from kvferry.store.media.memory_index import MemoryIndex
from kvferry.store.table import find_store
from kvferry.testing.stores import LAYOUT, block_of, fetch, names_of

LARGE = msgspec.structs.replace(LAYOUT, block_size=2048)
"""Its blocks take megabytes."""


class DeadArena(Arena):
    """The arena as a process attached to it that is gone."""

    @property
    def identity(self) -> tuple[int, int]:
        return 2**22 + 1, 7  # no process has this id


class ArenaMachine(Machine):
    """This machine. `names`: of the arenas that stores have attached to, with their sizes."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}

    def arena(self, name: str, num_bytes: int) -> Arena:
        self.names[name] = num_bytes
        return super().arena(name, num_bytes)


def store_of(size: str, folder: Path, layout: KVLayout = LAYOUT, machine: Machine = MACHINE) -> MemoryStore:
    store = find_store(f"memory:{size}?name={folder.name}").make(layout, machine)
    assert isinstance(store, MemoryStore)
    return store


@pytest.mark.parametrize("size", [200_000, 1 << 20, 2 << 20, 40_000_000])
def test_blocks_and_notes_fit_into_the_size(size: int, tmp_path: Path) -> None:
    async def use() -> None:
        machine = ArenaMachine()
        store = store_of(str(size), tmp_path, machine=machine)
        await store.open()
        try:
            [num_bytes] = machine.names.values()
            assert num_bytes <= size
            assert store.num_slots >= (size * 3 // 4 - 170_000) // 8000
            assert await store.put([block_of(0)]) == [PutResult.STORED]
            for number in range(8):
                await store.write_note(f"note {number}", bytes([number]) * 16_000, 60.0)
            assert [await store.read_note(f"note {number}") for number in range(8)] == [
                bytes([number]) * 16_000 for number in range(8)
            ]
            assert await store.match(names_of(1)) == 1
        finally:
            await store.close()

    asyncio.run(use())


@pytest.mark.parametrize("layout", [LAYOUT, LARGE], ids=["small", "large"])
def test_too_small_a_size_is_refused_with_one_that_is_not(layout: KVLayout, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"too small: one block of this model takes .*, and with index and notes"
    ) as error:
        store_of("100kB", tmp_path, layout)
    least = int(re.findall(r"at least (\d+) bytes", str(error.value))[0])
    assert store_of(str(least), tmp_path, layout).num_slots == 1
    with pytest.raises(ConfigError, match=f"at least {least} bytes"):
        store_of(str(least - 20_000), tmp_path, layout)


def test_slots_that_a_dead_process_was_writing_come_back_in_a_store_of_many(tmp_path: Path) -> None:
    """They are looked for now and then only, since a look takes long where there are many."""

    async def use() -> None:
        machine = ArenaMachine()
        store = find_store(f"memory:?num_blocks=200&name={tmp_path.name}").make(LAYOUT, machine)
        await store.open()
        try:
            [(name, num_bytes)] = machine.names.items()
            with closing(DeadArena(name, num_bytes)) as arena:
                index = MemoryIndex(arena, 200, "lru")
                with index.locked():
                    assert all(index.reserve() is not None for _ in range(5))
                index.release_memory()
            await store.put([block_of(number) for number in range(205)])
            await store.put([block_of(number) for number in range(205, 220)])
            assert sum(await fetch(store, range(220))) == 200
        finally:
            await store.close()

    asyncio.run(use())
