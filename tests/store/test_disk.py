"""Files of a store on a disk whose directory, permissions or writers are lost: a file is there completely, or not at
all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from killed_writers import NUM_KILLS, kill_writers
from trouble import TroubledMachine, is_true, run

from kvferry.store.base import PutResult
from kvferry.store.tiered.tiers import TieredStore
from kvferry.store.upkeep import verify
from kvferry.testing.stores import block_of, fetch, name_of
from support.waiting import eventually

pytestmark = pytest.mark.short_deadlines


@pytest.mark.processes
@pytest.mark.parametrize("num_kills", [6, pytest.param(NUM_KILLS or 500, marks=pytest.mark.full)])
@pytest.mark.timeout(3000)
def test_writers_of_files_killed_at_random_instants(tmp_path: Path, num_kills: int) -> None:
    def look() -> None:
        async def use(store: TieredStore) -> None:
            await fetch(store, range(200))
            assert store.statistics().get("corrupt_blocks", 0) == 0

        run([f"file:{tmp_path}"], use)
        found = verify(tmp_path)
        assert found.num_blocks > 0
        assert found.removed == {}
        assert not list(tmp_path.rglob("*.tmp"))

    kill_writers(f"file:{tmp_path}?max_bytes=1MiB", num_kills, 7, look)


def test_a_directory_that_is_lost_and_comes_back(tmp_path: Path) -> None:
    root = tmp_path / "kv"

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        shutil.rmtree(root)
        root.write_text("something else is there now")
        assert await store.put([block_of(1)]) == [PutResult.DROPPED]
        assert store.tiers[0].accepts_writes is False
        root.unlink()
        await eventually(lambda: is_true(store.put([block_of(2)]), [PutResult.STORED]))
        assert store.tiers[0].accepts_writes
        assert await fetch(store, [0, 2]) == [False, True]

    run([f"file:{root}"], use)


def test_a_file_that_cannot_be_read_is_a_miss_of_that_block_only(tmp_path: Path) -> None:
    machine = TroubledMachine()

    async def use(store: TieredStore) -> None:
        await store.put([block_of(index) for index in range(3)])
        machine.files.refuses = lambda path: name_of(1).hex() in path
        assert await fetch(store, range(3)) == [True, False, True]
        assert store.tiers[0].breaker.num_failures == 0

    run([f"file:{tmp_path}"], use, machine=machine)


def test_permissions_that_are_lost_and_come_back(tmp_path: Path) -> None:
    machine = TroubledMachine()

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        machine.files.refuses = lambda path: True
        assert await store.put([block_of(1)]) == [PutResult.DROPPED]
        assert store.tiers[0].accepts_writes is False
        await eventually(lambda: is_true(fetch(store, [0]), [False]))
        machine.files.refuses = lambda path: False
        await eventually(lambda: is_true(store.put([block_of(1)]), [PutResult.STORED]))
        assert store.tiers[0].accepts_writes
        assert await fetch(store, [0, 1]) == [True, True], "what could not be read was not taken for damaged"

    run([f"file:{tmp_path}"], use, machine=machine)
