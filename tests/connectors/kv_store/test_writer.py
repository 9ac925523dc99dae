"""Blocks and markers on their way to a store, in order and within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from held_store import HeldStore, block, marker_of

from kvferry.connectors.caching import StoreEvents
from kvferry.connectors.kv_store.markers import Markers
from kvferry.connectors.kv_store.writer import StoreWriter
from kvferry.core.clock import ManualClock
from kvferry.core.errors import StoreError
from kvferry.store.base import KVStore
from kvferry.transport.transfer_loop import TransferLoop
from support.waiting import until

pytestmark = pytest.mark.short_deadlines


@pytest.fixture
def loop() -> Iterator[TransferLoop]:
    loop = TransferLoop("kvferry-store-test")
    loop.start()
    yield loop
    loop.close()


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


def test_a_marker_is_believed_only_under_its_name_and_token(loop: TransferLoop) -> None:
    store = HeldStore()
    loop.submit(Markers("secret", ManualClock()).write(store, marker_of("a"))).result(20)
    store.notes["b.0"] = store.notes["a.0"]
    for markers, name in ((Markers("secret", ManualClock()), "b"), (Markers("another"), "a")):
        with pytest.raises(StoreError, match="token"):
            loop.submit(markers.read(store, name, 0)).result(20)
    assert loop.submit(Markers("secret", ManualClock()).read(store, "a", 0)).result(20) == marker_of("a")
