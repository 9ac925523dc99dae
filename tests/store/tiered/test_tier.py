"""One tier: its deadlines, what is refused, and stores that hang, are too slow, or are wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from trouble import QUICK, TroubledMachine, is_true, run

from kvferry.core.errors import StoreError
from kvferry.store.base import Block, BlockRead, PutResult, SharedStore
from kvferry.store.media.file import FileStore
from kvferry.store.table import StoreSpec, find_store, find_stores
from kvferry.store.tiered.tiers import TieredStore
from kvferry.testing.stores import LAYOUT, block_of, fetch, names_of, read_of
from support.waiting import eventually

pytestmark = pytest.mark.short_deadlines


def test_a_tier_that_hangs_while_it_opens_is_waited_for_once(tmp_path: Path) -> None:
    """Only the first call is held up, and only one attempt hangs."""
    times = replace(QUICK, open_s=0.05)
    attempts = []

    async def main() -> None:
        may_open = asyncio.Event()
        specs = find_stores(["memory:?num_blocks=9", f"file:{tmp_path}?deadline_s=0.05"])
        store = TieredStore(specs, LAYOUT, times=times)
        tier = store.tiers[1]
        open_it = tier.store.open

        async def hang() -> None:
            attempts.append(1)
            await may_open.wait()
            await open_it()

        tier.store.open = hang  # type: ignore[method-assign]
        for _ in range(3):
            await store.open()
            assert await store.runs(names_of(2)) == []
            assert not tier.is_up
        assert tier.breaker.num_failures == 1, "asked once"
        may_open.set()
        await eventually(lambda: tier.is_up)
        assert await store.put([block_of(0)]) == [PutResult.STORED]
        assert await tier.store.match(names_of(1)) == 1
        await store.close()

    asyncio.run(main())
    assert attempts == [1], "the one that hangs is not begun again beside itself"


def test_a_tier_that_hangs_while_it_opens_lets_itself_be_closed(tmp_path: Path) -> None:
    async def main() -> None:
        store = TieredStore(find_stores([f"file:{tmp_path}?deadline_s=0.05"]), LAYOUT)
        given_up = asyncio.Event()

        async def hang() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                given_up.set()

        store.tiers[0].store.open = hang  # type: ignore[method-assign]
        await store.open()
        await store.close()
        assert given_up.is_set()

    asyncio.run(main())


def test_a_look_that_never_returns_is_left_at_the_deadline(tmp_path: Path) -> None:
    machine = TroubledMachine()

    async def use(store: TieredStore) -> None:
        first, second = store.tiers
        await second.store.put([block_of(0)])
        machine.files.folder = tmp_path / "a"
        machine.files.gate.clear()
        async with asyncio.timeout(30):
            for _ in range(6):  # more than it has threads
                assert await store.match(names_of(1)) == 1
        assert first.breaker.num_failures == 1
        machine.files.gate.set()
        await eventually(lambda: is_true(store.put([block_of(1)]), [PutResult.STORED]))

    run([f"file:{tmp_path}/a?deadline_s=0.05", f"file:{tmp_path}/b"], use, machine=machine)


def test_a_read_that_never_returns_is_left_at_the_deadline_and_writes_nothing_afterwards(tmp_path: Path) -> None:
    machine = TroubledMachine()

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        read = read_of(0)
        machine.files.gate.clear()
        before = [bytes(view) for view in read.into]
        assert await store.get([read]) == [False]
        assert store.tiers[0].num_late
        assert not store.tiers[0].is_up
        machine.files.gate.set()
        await eventually(lambda: is_true(fetch(store, [0]), [True]))
        assert [bytes(view) for view in read.into] == before

    run([f"file:{tmp_path}?deadline_s=0.05"], use, machine=machine)


def test_calls_that_wait_together_are_cut_off_together(tmp_path: Path) -> None:
    machine = TroubledMachine()

    async def use(store: TieredStore) -> None:
        [tier] = store.tiers
        machine.files.gate.clear()
        assert await asyncio.gather(*(store.match(names_of(1)) for _ in range(20))) == [0] * 20
        assert tier.breaker.num_failures == 1
        with pytest.raises(StoreError, match="no tier of the store can be asked now: 0"):
            await store.match(names_of(1))
        machine.files.gate.set()
        await eventually(lambda: tier.is_up)

    run([f"file:{tmp_path}?deadline_s=0.05"], use, machine=machine)


class TroubledFile(FileStore):
    """A store whose reads take `pause_s` longer, and whose methods in `failing` raise."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.pause_s = 0.0
        self.num_reads = 0
        self.failing: dict[str, Exception] = {}

    def _require_works(self, method: str) -> None:
        if error := self.failing.get(method):
            raise error

    async def match(self, hashes: Sequence[bytes]) -> int:
        self._require_works("match")
        return await super().match(hashes)

    async def get(self, reads: Sequence[BlockRead]) -> list[bool]:
        hits = await super().get(reads)
        await asyncio.sleep(self.pause_s)
        self.num_reads += 1
        return hits

    async def put(self, blocks: Sequence[Block]) -> list[PutResult]:
        self._require_works("put")
        return await super().put(blocks)


def troubled_file(url: str) -> StoreSpec:
    return replace(find_store(url), kind=TroubledFile)


def troubled_store(store: TieredStore) -> TroubledFile:
    """The first tier's store."""
    first = store.tiers[0].store
    assert isinstance(first, TroubledFile)
    return first


def test_a_store_that_moves_blocks_too_slowly_is_left_alone_until_it_is_faster(tmp_path: Path) -> None:
    """It answers what moves no block: only blocks tell whether it is fast again."""

    async def use(store: TieredStore) -> None:
        [tier] = store.tiers
        await store.put([block_of(0)])
        slow = troubled_store(store)
        slow.pause_s = 0.2
        assert await store.get([read_of(0)]) == [False]
        await eventually(lambda: slow.num_reads > 0)
        assert not tier.is_up
        slow.pause_s = 0.0
        await eventually(lambda: tier.is_up)
        assert await fetch(store, [0]) == [True]

    run([troubled_file(f"file:{tmp_path}?deadline_s=0.05")], use)


def test_a_store_that_hangs_within_a_long_put_is_not_given_all_of_its_time(tmp_path: Path) -> None:
    machine = TroubledMachine()

    async def use(store: TieredStore) -> None:
        [tier] = store.tiers
        tier.deadline_s = 0.1
        machine.files.gate.clear()
        async with asyncio.timeout(2.5):
            assert await store.put([block_of(0)]) == [PutResult.DROPPED]
        assert not tier.is_up
        machine.files.gate.set()
        await eventually(lambda: tier.is_up)

    run([f"file:{tmp_path}"], use, machine=machine)


class Endless(SharedStore):
    """Does what it is told to, or else never returns, and holds up the whole loop that it is called on."""

    stuck = ""
    gates: ClassVar[list[threading.Event]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.blocks: dict[bytes, list[bytes]] = {}
        self.gate = threading.Event()
        self.gates.append(self.gate)

    def _pass(self, name: str) -> None:
        if self.stuck == name:
            assert self.gate.wait(60)

    async def open(self) -> None:
        self._pass("open")

    async def match(self, hashes: Sequence[bytes]) -> int:
        self._pass("match")
        return next((index for index, name in enumerate(hashes) if name not in self.blocks), len(hashes))

    async def get(self, reads: Sequence[BlockRead]) -> list[bool]:
        self._pass("get")
        for read in reads:
            for view, content in zip(read.into, self.blocks.get(read.block_hash, []), strict=False):
                view[:] = content
        return [read.block_hash in self.blocks for read in reads]

    async def put(self, blocks: Sequence[Block]) -> list[PutResult]:
        self._pass("put")
        self.blocks |= {block.block_hash: [bytes(view) for view in block.layers] for block in blocks}
        return [PutResult.STORED] * len(blocks)

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        self._pass("write_note")

    async def read_note(self, name: str) -> bytes | None:
        self._pass("read_note")
        return b"there"

    async def remove_note(self, name: str) -> None:
        self._pass("remove_note")

    async def pin(self, hashes: Sequence[bytes]) -> int:
        return 0

    async def unpin(self, hashes: Sequence[bytes]) -> int:
        return 0

    async def delete(self, hashes: Sequence[bytes]) -> int:
        return 0

    async def close(self) -> None:
        self._pass("close")


class EndlessFromOpen(Endless):
    stuck = "open"


@pytest.mark.parametrize("stuck", ["open", "match", "get", "put", "write_note", "read_note", "close"])
def test_a_store_of_another_package_that_never_returns(stuck: str, tmp_path: Path) -> None:
    """It does not even let others have its loop."""
    times = replace(QUICK, put_s=0.1, open_s=0.1, close_s=0.1, loop_close_s=0.1)

    async def use(store: TieredStore) -> None:
        first = store.tiers[0].store
        assert isinstance(first, Endless)
        if stuck != "open":
            assert await store.put([block_of(0)]) == [PutResult.STORED]
            assert await fetch(store, [0]) == [True]
        first.stuck = stuck
        read = read_of(0)
        before = [bytes(view) for view in read.into]
        async with asyncio.timeout(20):
            await store.match(names_of(1))
            await store.write_note("n", b"there", 60)
            assert await store.read_note("n") == b"there"
            assert await store.put([block_of(0)]) != [PutResult.DROPPED], "the other tier has it"
            assert await store.get([read]) == [True]
            if stuck != "close":
                assert not store.tiers[0].is_up
                first.gate.set()
                await eventually(lambda: store.tiers[0].is_up)
        assert [bytes(view) for view in read.into] != before

    kind = "EndlessFromOpen" if stuck == "open" else "Endless"
    try:
        run([f"{__name__}:{kind}?deadline_s=0.1", f"file:{tmp_path}"], use, times=times)
    finally:
        for gate in Endless.gates:
            gate.set()
        for thread in threading.enumerate():
            if thread.name == "kvferry-store-separate":
                thread.join(20)


def test_a_store_that_takes_nothing_is_still_read(tmp_path: Path) -> None:
    async def use(store: TieredStore) -> None:
        [tier] = store.tiers
        await store.put([block_of(0)])
        troubled_store(store).failing["put"] = StoreError("it is read-only")
        assert await store.put([block_of(1)]) == [PutResult.DROPPED]
        assert (tier.is_up, tier.accepts_writes) == (True, False)
        assert await fetch(store, [0, 1]) == [True, False]

    run([troubled_file(f"file:{tmp_path}")], use)


def test_what_comes_to_a_closed_store_is_dropped_without_a_warning_that_it_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        store = TieredStore(find_stores([f"memory:?num_blocks=64&name={tmp_path.name}", f"file:{tmp_path}"]), LAYOUT)
        await store.open()
        await store.close()
        for tier in store.tiers:
            assert await tier.put([block_of(0)]) == [PutResult.DROPPED]
            assert not await tier.write_note("a note", b"x", 1.0)

    asyncio.run(main())
    assert not caplog.messages


def test_a_mistake_in_one_tier_s_code_is_that_tier_s_failure(tmp_path: Path) -> None:
    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        troubled_store(store).failing["match"] = ZeroDivisionError("a bug")
        assert await store.match(names_of(1)) == 1
        assert not store.tiers[0].is_up

    run([troubled_file(f"file:{tmp_path}/first"), f"file:{tmp_path}/second"], use)
