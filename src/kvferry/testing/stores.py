"""The contract of `KVStore`. For one of your own:

class TestMyStore(StoreContract):
    url = "my_package.my_store:MyStore?size=1"

`url` may have `{folder}` in it, an empty directory. Coroutines are run by `asyncio.run`, so no plugin is needed.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.store.base import Block, BlockRead, KVStore, LayerStore, PutResult, SharedStore
from kvferry.store.table import find_stores
from kvferry.store.tiered.tiers import TieredStore

LAYOUT = KVLayout(
    model_fingerprint="contract",
    dtype="bfloat16",
    block_size=4,
    layers=(LayerLayout(2, 64, 64), LayerLayout(1, 32, 64), LayerLayout(2, 64, 64)),
)


def name_of(index: int) -> BlockHash:
    """A block's hash, from its number."""
    return hashlib.sha256(f"block {index}".encode()).digest()


def names_of(count: int) -> list[BlockHash]:
    """The hashes of blocks 0, 1, …"""
    return [name_of(index) for index in range(count)]


def block_of(index: int, layout: KVLayout = LAYOUT) -> Block:
    """A block whose bytes follow from its number and cannot be compressed."""
    sizes = [layout.span_bytes(layer) for layer in range(layout.num_layers)]
    layers = [
        memoryview(hashlib.shake_128(f"{index} {layer}".encode()).digest(size)) for layer, size in enumerate(sizes)
    ]
    return Block(name_of(index), layers, name_of(index - 1) if index else None)


def read_of(index: int, layout: KVLayout = LAYOUT) -> BlockRead:
    """A read of a block into a buffer with other content."""
    sizes = [layout.span_bytes(layer) for layer in range(layout.num_layers)]
    return BlockRead(name_of(index), [memoryview(bytearray(b"?" * size)) for size in sizes])


def is_block(read: BlockRead, index: int, layout: KVLayout = LAYOUT) -> bool:
    """True if the block was read to the bit."""
    return all(actual == expected for actual, expected in zip(read.into, block_of(index, layout).layers, strict=True))


async def fetch(store: KVStore, indices: Sequence[int], layout: KVLayout = LAYOUT) -> list[bool]:
    """Read blocks; returns for each whether it is present. Fails if a present block has the wrong content."""
    reads = [read_of(index, layout) for index in indices]
    present = await store.get(reads)
    for index, read, is_present in zip(indices, reads, present, strict=True):
        assert not is_present or is_block(read, index, layout), f"block {index} is not what was put"
    return present


class StoreContract:
    """The suite. Set `url` in a subclass; a tuple of URLs is a list of tiers."""

    url: ClassVar[str | tuple[str, ...]]
    bounded_url: ClassVar[str | None] = None
    """A store that lets fewer than 48 blocks be pinned, if it limits pins."""
    outlives_instances: ClassVar[bool] = True
    """True if blocks outlive the instance that put them, as long as another one is running."""

    @asynccontextmanager
    async def opened(self, folder: Path, layout: KVLayout = LAYOUT, *, bounded: bool = False) -> AsyncIterator[KVStore]:
        """A store, which may contain blocks of a previous one."""
        url = self.bounded_url if bounded and self.bounded_url is not None else self.url
        urls = [url] if isinstance(url, str) else url
        specs = find_stores([url.replace("{folder}", str(folder)) for url in urls])
        store = specs[0].make(layout) if len(specs) == 1 else TieredStore(specs, layout)
        await store.open()
        try:
            yield store
        finally:
            await store.close()

    def run(self, folder: Path, use: Callable[[KVStore], Awaitable[None]]) -> None:
        """Call `use` with an empty store."""

        async def main() -> None:
            async with self.opened(folder) as store:
                await store.delete(names_of(64))
                await use(store)
                await store.delete(names_of(64))

        asyncio.run(main())

    def test_what_is_put_is_got(self, tmp_path: Path) -> None:
        async def use(store: KVStore) -> None:
            assert await store.put([block_of(index) for index in range(5)]) == [PutResult.STORED] * 5
            assert await fetch(store, range(5)) == [True] * 5
            assert await fetch(store, [7, 3, 9, 3]) == [False, True, False, True]
            assert await store.get([]) == []
            assert await store.put([]) == []

        self.run(tmp_path, use)

    def test_a_block_is_kept_once(self, tmp_path: Path) -> None:
        async def use(store: KVStore) -> None:
            await store.put([block_of(0)])
            assert await store.put([block_of(0), block_of(1)]) == [PutResult.PRESENT, PutResult.STORED]
            assert await fetch(store, [0, 1]) == [True, True]
            await store.put([block_of(2), block_of(2)])
            assert await fetch(store, [2]) == [True]

        self.run(tmp_path, use)

    def test_match_is_the_longest_prefix(self, tmp_path: Path) -> None:
        async def use(store: KVStore) -> None:
            assert await store.match(names_of(4)) == 0
            assert await store.match([]) == 0
            await store.put([block_of(index) for index in (0, 1, 3)])
            assert await store.match(names_of(4)) == 2
            assert await store.match([name_of(3), name_of(1)]) == 2
            assert await store.match([name_of(2), name_of(1)]) == 0

        self.run(tmp_path, use)

    def test_delete(self, tmp_path: Path) -> None:
        async def use(store: KVStore) -> None:
            await store.put([block_of(0), block_of(1)])
            assert await store.delete([name_of(0), name_of(7)]) == 1
            assert await fetch(store, [0, 1]) == [False, True]
            assert await store.put([block_of(0)]) == [PutResult.STORED]
            assert await fetch(store, [0]) == [True]

        self.run(tmp_path, use)

    def test_pins_are_flags_of_blocks_that_are_there(self, tmp_path: Path) -> None:
        async def use(store: KVStore) -> None:
            await store.put([block_of(0)])
            assert await store.pin([name_of(0), name_of(5)]) == 1
            assert await store.pin([name_of(0)]) == 1
            assert await store.unpin([name_of(0)]) == 1
            assert await store.delete([name_of(0)]) == 1

        self.run(tmp_path, use)

    def test_pins_leave_space_for_others(self, tmp_path: Path) -> None:
        async def use() -> None:
            async with self.opened(tmp_path, bounded=True) as store:
                await store.delete(names_of(64))
                pinned = []
                for index in range(48):
                    await store.put([block_of(index)])
                    pinned += [index] * await store.pin([name_of(index)])
                assert 0 < len(pinned) < 48
                assert await store.put([block_of(50)]) == [PutResult.STORED]
                assert await fetch(store, [50, *pinned]) == [True] * (1 + len(pinned))
                assert await store.pin([name_of(index) for index in pinned]) == len(pinned)
                await store.unpin(names_of(64))
                await store.put([block_of(50)])
                assert await store.pin([name_of(50)]) == 1
                await store.delete(names_of(64))

        if self.bounded_url is not None:
            asyncio.run(use())

    def test_layers_one_by_one(self, tmp_path: Path) -> None:
        async def use(store: KVStore) -> None:
            if not isinstance(store, LayerStore):
                return
            await store.put([block_of(index) for index in range(3)])
            for layer in range(LAYOUT.num_layers):
                into = [memoryview(bytearray(LAYOUT.span_bytes(layer))) for _ in range(4)]
                reads = list(zip(names_of(4), into, strict=True))
                assert await store.get_layer(layer, reads) == [True, True, True, False]
                for index in range(3):
                    assert into[index] == block_of(index).layers[layer]

        self.run(tmp_path, use)

    def test_another_layout_s_blocks_are_not_found(self, tmp_path: Path) -> None:
        other = KVLayout(model_fingerprint="other", dtype="bfloat16", block_size=4, layers=LAYOUT.layers)

        async def use(store: KVStore) -> None:
            await store.put([block_of(0)])
            async with self.opened(tmp_path, other) as stranger:
                await stranger.delete(names_of(8))
                assert await stranger.match([name_of(0)]) == 0
                assert await fetch(stranger, [0], other) == [False]
            assert await fetch(store, [0]) == [True]

        self.run(tmp_path, use)

    def test_notes(self, tmp_path: Path) -> None:
        async def use(store: KVStore) -> None:
            if not isinstance(store, SharedStore):
                return
            async with self.opened(tmp_path) as second:
                assert isinstance(second, SharedStore)
                await store.remove_note("../a")
                assert await second.read_note("../a") is None
                await store.write_note("../a", b"one", 60.0)
                await store.write_note("../a", b"two \x00", 60.0)
                await store.write_note("b", b"another", 60.0)
                assert await second.read_note("../a") == b"two \x00"
                await second.remove_note("../a")
                assert await store.read_note("../a") is None
                await second.remove_note("../a")
                await store.remove_note("b")

        self.run(tmp_path, use)

    def test_blocks_outlive_the_instance_that_put_them(self, tmp_path: Path) -> None:
        async def use(store: KVStore) -> None:
            if not (isinstance(store, SharedStore) and self.outlives_instances):
                return
            async with self.opened(tmp_path) as second:
                await second.put([block_of(0), block_of(1)])
            assert await store.match(names_of(3)) == 2
            assert await fetch(store, [0, 1]) == [True, True]

        self.run(tmp_path, use)

    def test_what_happened_is_counted(self, tmp_path: Path) -> None:
        async def use(store: KVStore) -> None:
            before = store.statistics()
            await store.put([block_of(0), block_of(1)])
            await fetch(store, [0, 5])
            after = store.statistics()
            for name, min_count in {"stored_blocks": 2, "loaded_blocks": 1, "missing_blocks": 1}.items():
                assert after[name] - before.get(name, 0.0) >= min_count, name

        self.run(tmp_path, use)

    def test_changes_are_reported(self, tmp_path: Path) -> None:
        async def use(store: KVStore) -> None:
            store.activity.watch()
            await store.put([block_of(0), block_of(1)])
            stored = [set(changes.stored) for changes in store.activity.take_changes()]
            assert stored
            assert all(names == {name_of(0), name_of(1)} for names in stored)
            await store.delete([name_of(0)])
            assert {name for changes in store.activity.take_changes() for name in changes.removed} == {name_of(0)}
            assert store.activity.take_changes() == []

        self.run(tmp_path, use)

    def test_to_open_it_twice_is_to_open_it_once(self, tmp_path: Path) -> None:
        async def use(store: KVStore) -> None:
            await store.put([block_of(0)])
            await asyncio.gather(store.open(), store.open())
            assert await fetch(store, [0]) == [True]

        self.run(tmp_path, use)

    def test_two_at_a_time(self, tmp_path: Path) -> None:
        async def use(store: KVStore) -> None:
            async with self.opened(tmp_path) as second:
                first_blocks, second_blocks = (
                    [block_of(index) for index in range(24)],
                    [block_of(index) for index in range(12, 36)],
                )
                await asyncio.gather(
                    *(store.put([block]) for block in first_blocks), *(second.put([block]) for block in second_blocks)
                )
                if isinstance(store, SharedStore):
                    assert await fetch(store, range(36)) == [True] * 36

        self.run(tmp_path, use)

    def test_a_cancelled_read_writes_nothing_later(self, tmp_path: Path) -> None:
        async def use(store: KVStore) -> None:
            await store.put([block_of(index) for index in range(8)])
            reads = [read_of(index) for index in range(8)]
            task = asyncio.create_task(store.get(reads))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            seen = [bytes(view) for read in reads for view in read.into]
            assert await fetch(store, range(8)) == [True] * 8
            assert [bytes(view) for read in reads for view in read.into] == seen

        self.run(tmp_path, use)
