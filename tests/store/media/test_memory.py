"""A store in memory keeps to its size, however small, and says what it needs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import pytest

from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ConfigError
from kvferry.store.base import Put
from kvferry.store.media.memory import MemoryStore
from kvferry.store.table import find_store
from kvferry.testing.stores import LAYOUT, block_of, names_of

LARGE = msgspec.structs.replace(LAYOUT, block_size=2048)
"""Its blocks take megabytes."""


def store_of(size: str, folder: Path, layout: KVLayout = LAYOUT) -> MemoryStore:
    store = find_store(f"memory:{size}?name={folder.name}").make(layout)
    assert isinstance(store, MemoryStore)
    return store


@pytest.mark.parametrize("size", [200_000, 1 << 20, 2 << 20, 40_000_000])
def test_blocks_and_notes_fit_into_the_size(size: int, tmp_path: Path) -> None:
    async def use() -> None:
        store = store_of(str(size), tmp_path)
        await store.open()
        try:
            assert store._arena is not None
            assert len(store._arena.buffer) <= size
            assert store.num_slots >= (size * 3 // 4 - 170_000) // 8000
            assert await store.put([block_of(0)]) == [Put.STORED]
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
        store = find_store(f"memory:?num_blocks=200&name={tmp_path.name}").make(LAYOUT)
        assert isinstance(store, MemoryStore)
        await store.open()
        try:
            index = store._index
            index._identity, identity = (2**22 + 1, 7), index._identity  # no process has this id
            with index.locked():
                assert all(index.reserve() is not None for _ in range(5))
            index._identity = identity
            await store.put([block_of(number) for number in range(205)])
            await store.put([block_of(number) for number in range(205, 220)])
            assert index.num_kept() == 200
        finally:
            await store.close()

    asyncio.run(use())
