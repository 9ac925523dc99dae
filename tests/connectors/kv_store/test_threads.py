"""The parts of the cache connector beside the engine's thread, one by one, on a store that the test holds up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from kv_support import BlockRegion, make_layout

from kvferry.connectors.api import Loaded, Released, failures
from kvferry.connectors.caching import StoreEvents
from kvferry.connectors.kv_store.blocks import HostBlocks
from kvferry.connectors.kv_store.keys import StoredKeys
from kvferry.connectors.kv_store.loader import StoreLoader
from kvferry.connectors.kv_store.markers import MARKER_S, Marker, Markers, heartbeat_name
from kvferry.connectors.kv_store.plan import LoadBlocks
from kvferry.connectors.kv_store.prober import Prober, StoreLookup
from kvferry.connectors.kv_store.writer import StoreWriter
from kvferry.connectors.reports import Reports
from kvferry.core.clock import SYSTEM_CLOCK, ManualClock
from kvferry.core.errors import StoreError, TransferTimeout
from kvferry.core.messages.hand_off import PrefillResult
from kvferry.store.arena import Arena
from kvferry.store.base import Block, KVStore, LayerStore, Put, Read, SharedStore, StoreOptions
from kvferry.store.block_run import BlockRun
from kvferry.store.machine import Machine
from kvferry.store.table import find_stores
from kvferry.store.tiers import TieredStore
from kvferry.transport.transfer_loop import TransferLoop
from support.waiting import until

pytestmark = pytest.mark.short_deadlines

LAYOUT = make_layout(num_layers=2)
MakeLoader = Callable[..., StoreLoader]


class HeldStore(SharedStore, LayerStore):
    """Answers when `gate` is open; fills blocks with 1. As a `TieredStore` with one tier."""

    def __init__(self) -> None:
        super().__init__("", StoreOptions(), LAYOUT)
        self.gate = threading.Event()
        self.asked = threading.Event()
        self.error: Exception | None = None
        self.puts: list[bytes] = []
        self.notes: dict[str, bytes] = {}
        self.put_before_note: list[bytes] = []

    async def _pass(self) -> None:
        self.asked.set()
        end = time.monotonic() + 20
        while not self.gate.is_set():
            assert time.monotonic() < end
            await asyncio.sleep(0.001)
        if self.error is not None:
            raise self.error

    async def match(self, hashes: Sequence[bytes]) -> int:
        await self._pass()
        return len(hashes)

    async def get(self, reads: Sequence[Read]) -> list[bool]:
        for read in reads:
            await self._pass()
            for view in read.into:
                view[:] = b"\x01" * len(view)
        return [True] * len(reads)

    async def get_layer(self, layer: int, reads: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        return await self.get([Read(name, [into]) for name, into in reads])

    async def put(self, blocks: Sequence[Block]) -> list[Put]:
        await self._pass()
        self.puts += [block.block_hash for block in blocks]
        return [Put.STORED] * len(blocks)

    async def pin(self, hashes: Sequence[bytes]) -> int:
        return 0

    async def unpin(self, hashes: Sequence[bytes]) -> int:
        return 0

    async def delete(self, hashes: Sequence[bytes]) -> int:
        return 0

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        self.put_before_note = list(self.puts)
        self.notes[name] = content

    async def runs(self, hashes: Sequence[bytes]) -> list[BlockRun]:
        return [BlockRun(0, await self.match(hashes))]

    async def prefetch(self, hashes: Sequence[bytes]) -> None:
        return

    def answers(self, shared: Collection[int]) -> bool:
        return True

    def takes(self) -> list[int]:
        return [0]

    async def read_note(self, name: str) -> bytes | None:
        return self.notes.get(name)

    async def remove_note(self, name: str) -> None:
        self.notes.pop(name, None)


@pytest.fixture
def loop() -> Iterator[TransferLoop]:
    loop = TransferLoop("kvferry-store-test")
    loop.start()
    yield loop
    loop.close()


def block(name: bytes, num_bytes: int = 100) -> Block:
    return Block(name, [memoryview(bytes(num_bytes))])


def marker_of(transfer_id: str) -> Marker:
    result = PrefillResult(first_token=1, seed=2)
    return Marker(
        transfer_id=transfer_id, layout=LAYOUT, num_tokens=3, digest="d", expires_s=MARKER_S, prefill_result=result
    )


# The writer.


def make_writer(store: KVStore, loop: TransferLoop, capacity: float = 1e6, **options: float) -> StoreWriter:
    return StoreWriter(store, loop, capacity, **options)


def test_markers_come_after_the_blocks_before_them(loop: TransferLoop) -> None:
    store = HeldStore()
    writer = make_writer(store, loop)
    writer.put(block(b"a"))
    writer.submit(partial(Markers("secret", ManualClock()).write, store, marker_of("t")))
    assert store.asked.wait(20)
    assert not store.notes
    store.gate.set()
    until(writer.is_empty)
    assert store.put_before_note == [b"a"]
    assert loop.submit(Markers("secret", ManualClock()).read(store, "t", 0)).result(20) == marker_of("t")
    writer.close()


@pytest.mark.parametrize("max_wait_s", [0.0, 0.02])
def test_a_full_queue_drops_without_waiting_for_each_block(loop: TransferLoop, max_wait_s: float) -> None:
    store = HeldStore()
    writer = make_writer(store, loop, 250, max_wait_s=max_wait_s)
    assert writer.put(block(b"a"))
    assert writer.put(block(b"b"))
    assert not writer.put(block(b"c"))
    for _ in range(100):
        assert not writer.put(block(b"d"))
    assert writer.statistics()["writer_dropped_blocks"] == 101
    store.gate.set()
    until(writer.is_empty)
    assert writer.put(block(b"e"))
    writer.close()
    assert store.puts == [b"a", b"b", b"e"]


def test_a_block_larger_than_the_bound_goes_alone(loop: TransferLoop) -> None:
    store = HeldStore()
    store.gate.set()
    writer = make_writer(store, loop, 10)
    assert writer.put(block(b"a", 100))
    writer.close()
    assert store.puts == [b"a"]


@pytest.mark.parametrize("error", [StoreError("full"), ZeroDivisionError("a bug")])
def test_a_store_that_fails_does_not_end_the_writer(loop: TransferLoop, error: Exception) -> None:
    store = HeldStore()
    store.error = error
    store.gate.set()
    writer = make_writer(store, loop)
    writer.watch()
    writer.put(block(b"a"))
    until(writer.is_empty)
    store.error = None
    writer.put(block(b"b"))
    writer.close()
    assert store.puts == [b"b"]
    assert writer.take_events() == StoreEvents(stored=[b"b"], dropped=[b"a"])
    assert not writer.take_events()


def test_every_block_is_stored_or_dropped(loop: TransferLoop) -> None:
    store = HeldStore()
    writer = make_writer(store, loop, 250)
    writer.put(block(b"before anybody asks"))
    writer.watch()
    writer.put(block(b"b"))
    assert not writer.put(block(b"c"))
    assert writer.take_events() == StoreEvents(dropped=[b"c"])
    store.gate.set()
    until(writer.is_empty)
    writer.close()
    assert writer.take_events().stored[-1] == b"b"


# The loader.


@pytest.fixture
def region() -> BlockRegion:
    region = BlockRegion(LAYOUT, 4)
    yield region
    region.close()


@pytest.fixture
def reports() -> Reports:
    return Reports(20, SYSTEM_CLOCK)


@pytest.fixture
def make_loader(region: BlockRegion, loop: TransferLoop, reports: Reports) -> MakeLoader:
    def make(store: KVStore, timeout_s: float = 20) -> StoreLoader:
        return StoreLoader(store, loop, HostBlocks(region.memory), LAYOUT.num_layers, timeout_s, reports)

    return make


def test_a_cancelled_load_writes_nothing_after_its_report(
    region: BlockRegion, make_loader: MakeLoader, reports: Reports
) -> None:
    store = HeldStore()
    loader = make_loader(store)
    loader.start(LoadBlocks("r", [b"a", b"b"], [0, 1], False))
    assert store.asked.wait(20)
    loader.cancel("r")
    store.gate.set()
    until(lambda: bool(reports))
    assert reports.take() == [Released("r")]
    assert region.block(0, 1) == bytes(LAYOUT.span_bytes(0)), "the second block was not read any more"
    assert loader.is_empty()
    loader.cancel("r")
    until(lambda: bool(reports))
    assert reports.take() == [Released("r")], "also when it had ended already"
    loader.close()


def test_the_deadline_ends_a_load(region: BlockRegion, make_loader: MakeLoader, reports: Reports) -> None:
    store = HeldStore()
    loader = make_loader(store, timeout_s=0.01)
    loader.start(LoadBlocks("r", [b"a", b"b"], [0, 1], False))
    until(lambda: bool(reports))
    assert isinstance(failures(reports.take())["r"], TransferTimeout)
    loader.close()


def test_a_mistake_in_a_store_is_heard_of(region: BlockRegion, make_loader: MakeLoader, reports: Reports) -> None:
    store = HeldStore()
    store.error = ZeroDivisionError("a bug")
    store.gate.set()
    loader = make_loader(store)
    loader.start(LoadBlocks("r", [b"a"], [0], False))
    step = loader.start_layerwise([LoadBlocks("s", [b"a"], [1], True)])
    assert step.failed() == {"s"}
    until(loader_is_done(loader))
    assert set(failures(reports.take())) == {"r", "s"}
    loader.close()


def loader_is_done(loader: StoreLoader) -> Callable[[], bool]:
    return lambda: loader.statistics()["num_loading"] == 0


def test_layers_are_waited_for_one_by_one(region: BlockRegion, make_loader: MakeLoader, reports: Reports) -> None:
    store = HeldStore()
    loader = make_loader(store)
    step = loader.start_layerwise([LoadBlocks("r", [b"a"], [2], True), LoadBlocks("s", [b"b"], [3], True)])
    passed = threading.Event()
    waiter = threading.Thread(target=lambda: (step.wait_layer(0), passed.set()))
    waiter.start()
    assert store.asked.wait(20)
    assert not passed.is_set()
    store.gate.set()
    assert passed.wait(20)
    waiter.join()
    assert region.block(0, 2) == region.block(0, 3) == b"\x01" * LAYOUT.span_bytes(0)
    assert step.failed() == set()
    assert reports.take() == [Loaded("r"), Loaded("s")]
    loader.close()


def test_a_read_that_never_ends_does_not_hold_the_engine(
    region: BlockRegion, make_loader: MakeLoader, reports: Reports
) -> None:
    """What comes of it afterwards is not written."""

    class Stubborn(HeldStore):
        async def _pass(self) -> None:
            passing = asyncio.ensure_future(super()._pass())
            while not passing.done():  # as one that waits for a thread: cancelling does not end it
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(passing)

    store = Stubborn()
    before = region.block(0, 2)
    loader = make_loader(store, timeout_s=0.05)
    step = loader.start_layerwise([LoadBlocks("r", [b"a"], [2], True)])
    step.wait_layer(0)
    assert step.failed() == {"r"}
    store.gate.set()
    until(lambda: not loader._tasks)
    assert region.block(0, 2) == before
    reports.take()
    loader.close()


# The prober.


def make_prober(store: KVStore, **options: float) -> Prober:
    return Prober(lambda: [store], Markers("secret", ManualClock()), StoredKeys("secret"), **options)


def test_a_slow_store_holds_up_nobody() -> None:
    store = HeldStore()
    prober, has_answer = make_prober(store), threading.Event()
    prober.wake = has_answer.set
    prober.start_lookup("r", StoreLookup([b"a", b"b"]))
    assert store.asked.wait(20)
    assert prober.result("r") is None
    assert not has_answer.is_set()
    store.gate.set()
    assert has_answer.wait(20)
    until(lambda: prober.result("r") is not None)
    answer = prober.result("r")
    assert answer is not None
    assert answer.num_present == 2
    prober.forget("r")
    assert prober.num_lookups() == 0
    prober.close()


def test_an_answer_nobody_waits_for_any_more_is_not_kept() -> None:
    store = HeldStore()
    prober = make_prober(store)
    prober.start_lookup("r", StoreLookup([b"a"]))
    assert store.asked.wait(20)
    prober.forget("r")
    store.gate.set()
    prober.start_lookup("s", StoreLookup([b"a"]))
    until(lambda: prober.result("s") is not None)
    assert prober.num_lookups() == 1
    prober.close()


@pytest.mark.parametrize("error", [StoreError("gone"), ZeroDivisionError("a bug")])
def test_a_store_that_fails_is_an_answer(error: Exception) -> None:
    store = HeldStore()
    store.error = error
    store.gate.set()
    prober = make_prober(store)
    prober.start_lookup("r", StoreLookup([b"a"]))
    until(lambda: prober.result("r") is not None)
    answer = prober.result("r")
    assert answer is not None
    assert isinstance(answer.error, StoreError)
    prober.close()


def test_many_markers_are_waited_for_at_once(loop: TransferLoop) -> None:
    store = HeldStore()
    store.gate.set()
    prober = make_prober(store)
    deadline = time.monotonic() + 20
    for index in range(20):
        prober.start_lookup(f"r{index}", StoreLookup([b"a"], f"t{index}", deadline))
    for index in reversed(range(20)):
        loop.submit(Markers("secret", ManualClock()).write(store, marker_of(f"t{index}"))).result(20)
    until(lambda: all(prober.result(f"r{index}") is not None for index in range(20)))
    answer = prober.result("r7")
    assert answer is not None
    assert answer.marker == marker_of("t7")
    prober.close()


def test_a_look_that_never_ends_is_an_answer() -> None:
    store = HeldStore()
    prober = make_prober(store, probe_s=0.05)
    prober.start_lookup("r", StoreLookup([b"a"]))
    until(lambda: prober.result("r") is not None)
    answer = prober.result("r")
    assert answer is not None
    assert isinstance(answer.error, TransferTimeout)
    prober.close()


def test_a_producer_is_waited_for_as_long_as_it_gives_signs(loop: TransferLoop) -> None:
    """Not for ever, though the question may be."""

    class Silent(HeldStore):
        num_looked = 0

        async def read_note(self, name: str) -> bytes | None:
            if name == heartbeat_name("p"):
                self.num_looked += 1
                return str(min(self.num_looked, 20)).encode()
            return await super().read_note(name)

    store = Silent()
    store.gate.set()
    prober = make_prober(store)
    begun = time.monotonic()
    prober.start_lookup("r", StoreLookup([b"a"], "t", begun + 3600, producer="p"))
    until(lambda: prober.result("r") is not None)
    answer = prober.result("r")
    assert answer is not None
    assert isinstance(answer.error, TransferTimeout)
    assert "p, writes nothing to the store" in str(answer.error)
    assert answer.num_present == 1, "what is there is of use"
    assert store.num_looked > 20
    assert answer.checked_at - begun > 20 * Prober.heartbeat_poll_s + Prober.heartbeat_timeout_s
    prober.close()


def test_stores_that_the_producer_does_not_have_are_not_waited_for() -> None:
    class Partly(HeldStore):
        def answers(self, shared: Collection[int]) -> bool:
            return 1 in shared

    store = Partly()
    store.gate.set()
    prober = make_prober(store)
    for name, stores in (("r", [0]), ("s", [])):
        prober.start_lookup(name, StoreLookup([b"a"], "t", time.monotonic() + 3600, stores=stores))
    prober.start_lookup("t", StoreLookup([b"a"], "t", time.monotonic() + 0.05, stores=[1]))
    until(lambda: all(prober.result(name) is not None for name in "rst"))
    errors = [type(prober.result(name).error) for name in "rst"]  # type: ignore[union-attr]
    assert errors == [StoreError, StoreError, TransferTimeout]
    prober.close()


def test_a_store_that_cannot_be_asked_is_not_waited_for() -> None:
    class Broken(HeldStore):
        async def read_note(self, name: str) -> bytes | None:
            raise StoreError("it is gone")

    store = Broken()
    store.gate.set()
    prober = make_prober(store)
    prober.start_lookup("r", StoreLookup([b"a"], "t", time.monotonic() + 3600))
    until(lambda: prober.result("r") is not None)
    answer = prober.result("r")
    assert answer is not None
    assert isinstance(answer.error, StoreError)
    prober.close()


def test_blocks_that_were_brought_near_are_told_to_be_near(tmp_path: Path) -> None:
    """What is decided while the request is queued is decided by where its blocks are then."""
    names = [bytes([index]) * 32 for index in range(3)]
    tiers = find_stores([f"memory:6MiB?name={tmp_path.name}", f"file:{tmp_path}"])

    async def fill() -> None:
        store = TieredStore(tiers[1:], LAYOUT)
        await store.open()
        layers = [memoryview(bytes(LAYOUT.span_bytes(layer))) for layer in range(LAYOUT.num_layers)]
        assert await store.put([Block(name, layers) for name in names]) == [Put.STORED] * 3
        await store.close()

    asyncio.run(fill())
    prober = Prober(lambda: [TieredStore(tiers, LAYOUT)], Markers("secret", ManualClock()), StoredKeys("secret"))
    prober.start_lookup("r", StoreLookup(names))

    def runs() -> tuple[BlockRun, ...] | None:
        answer = prober.result("r")
        return None if answer is None else answer.runs

    try:
        until(lambda: runs() is not None)
        assert runs() in ((BlockRun(0, 3),), (BlockRun(1, 3),)), "at once, or so soon"
        until(lambda: runs() == (BlockRun(0, 3),))
    finally:
        prober.close()


def test_what_is_brought_near_is_told_bit_by_bit_and_no_further_once_a_load_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the time of a load from memory would count as the disk's."""
    names = [bytes([index]) * 32 for index in range(40)]
    tiers = find_stores([f"memory:24MiB?name={tmp_path.name}", f"file:{tmp_path}"])

    async def fill() -> None:
        store = TieredStore(tiers[1:], LAYOUT)
        await store.open()
        layers = [memoryview(bytes(LAYOUT.span_bytes(layer))) for layer in range(LAYOUT.num_layers)]
        assert await store.put([Block(name, layers) for name in names]) == [Put.STORED] * 40
        await store.close()

    asyncio.run(fill())
    prober = Prober(lambda: [TieredStore(tiers, LAYOUT)], Markers("secret", ManualClock()), StoredKeys("secret"))
    parts: list[int] = []
    seen: list[tuple[BlockRun, ...]] = []
    prefetch = TieredStore.prefetch

    async def noted(store: TieredStore, hashes: Sequence[bytes]) -> None:
        parts.append(len(hashes))
        if len(parts) == 2:
            answer = prober.result("r")
            assert answer is not None
            seen.append(answer.runs)
            prober.forget("r")  # as the scheduler side does when a load begins
        await prefetch(store, hashes)

    monkeypatch.setattr(TieredStore, "prefetch", noted)
    prober.start_lookup("r", StoreLookup(names))
    try:
        until(lambda: len(parts) == 2 and not prober._prefetch_tasks)
        assert parts == [16, 16]
        assert seen == [(BlockRun(0, 16), BlockRun(1, 24))]
        assert prober.num_lookups() == 0
    finally:
        prober.close()


# Markers.


def test_a_marker_is_believed_only_under_its_name_and_token(loop: TransferLoop) -> None:
    store = HeldStore()
    loop.submit(Markers("secret", ManualClock()).write(store, marker_of("a"))).result(20)
    store.notes["b.0"] = store.notes["a.0"]
    for markers, name in ((Markers("secret", ManualClock()), "b"), (Markers("another"), "a")):
        with pytest.raises(StoreError, match="token"):
            loop.submit(markers.read(store, name, 0)).result(20)
    assert loop.submit(Markers("secret", ManualClock()).read(store, "a", 0)).result(20) == marker_of("a")


def test_questions_at_the_same_time_open_a_store_once() -> None:
    """A second opening would leave the first one's memory, descriptors and threads with nobody."""
    made: list[Arena] = []

    class CountingMachine(Machine):
        def arena(self, name: str, num_bytes: int) -> Arena:
            made.append(super().arena(name, num_bytes))
            return made[-1]

    prober = Prober(
        lambda: [TieredStore(find_stores("memory:6MiB?name=probed"), LAYOUT, machine=CountingMachine())],
        Markers("secret", ManualClock()),
        StoredKeys("secret"),
    )
    for index in range(8):
        prober.start_lookup(f"r{index}", StoreLookup([b"a" * 32]))
    until(lambda: all(prober.result(f"r{index}") is not None for index in range(8)))
    prober.close()
    assert [arena.is_closed for arena in made] == [True]
