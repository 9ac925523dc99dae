"""Lookups in a store that the test holds up: slow, wrong, without an end, and of producers that give no signs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest
from held_store import LAYOUT, HeldStore, marker_of

from kvferry.connectors.kv_store.keys import StoredKeys
from kvferry.connectors.kv_store.markers import Markers, heartbeat_name
from kvferry.connectors.kv_store.prober import Prober, StoreLookup
from kvferry.core.clock import ManualClock
from kvferry.core.errors import StoreError, TransferTimeout
from kvferry.store.arena import Arena
from kvferry.store.base import Block, KVStore, PutResult
from kvferry.store.block_run import BlockRun
from kvferry.store.machine import Machine
from kvferry.store.table import find_stores
from kvferry.store.tiered.tiers import TieredStore
from kvferry.transport.transfer_loop import TransferLoop
from support.waiting import until

pytestmark = pytest.mark.short_deadlines


@pytest.fixture
def loop() -> Iterator[TransferLoop]:
    loop = TransferLoop("kvferry-store-test")
    loop.start()
    yield loop
    loop.close()


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
        assert await store.put([Block(name, layers) for name in names]) == [PutResult.STORED] * 3
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
        assert await store.put([Block(name, layers) for name in names]) == [PutResult.STORED] * 40
        await store.close()

    asyncio.run(fill())
    parts: list[int] = []
    seen: list[tuple[BlockRun, ...]] = []
    num_prefetched = 0

    class RecordingStore(TieredStore):
        async def prefetch(self, hashes: Sequence[bytes]) -> None:
            parts.append(len(hashes))
            if len(parts) == 2:
                answer = prober.result("r")
                assert answer is not None
                seen.append(answer.runs)
                prober.forget("r")  # as the scheduler side does when a load begins
            await super().prefetch(hashes)

        async def runs(self, hashes: Sequence[bytes]) -> list[BlockRun]:
            nonlocal num_prefetched
            runs = await super().runs(hashes)
            num_prefetched += len(parts) == 2
            return runs

    prober = Prober(lambda: [RecordingStore(tiers, LAYOUT)], Markers("secret", ManualClock()), StoredKeys("secret"))
    prober.start_lookup("r", StoreLookup(names))
    try:
        until(lambda: num_prefetched == 1)
        assert prober.num_lookups() == 0
    finally:
        prober.close()  # after the rest of the prefetch
    assert parts == [16, 16]
    assert seen == [(BlockRun(0, 16), BlockRun(1, 24))]


def test_a_result_that_comes_while_it_is_asked_for_is_not_looked_up_again() -> None:
    """The scheduler side has found no result, and it is there before it starts a lookup."""
    store = HeldStore()
    store.gate.set()
    prober = make_prober(store)
    prober.start_lookup("r", StoreLookup([b"a"]))
    until(lambda: prober.result("r") is not None)
    first = prober.result("r")
    prober.start_lookup("r", StoreLookup([b"a"]))
    assert prober.result("r") is first
    assert prober.num_lookups() == 1
    prober.forget("r")
    prober.close()


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
