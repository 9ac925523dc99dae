"""Loads from a store that the test holds up: cancelled, late, wrong, layer by layer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest
from held_store import LAYOUT, HeldStore
from kv_support import BlockRegion

from kvferry.connectors.api import Loaded, Released, failures
from kvferry.connectors.kv_store.blocks import HostBlocks
from kvferry.connectors.kv_store.loader import StoreLoader
from kvferry.connectors.kv_store.plan import LoadBlocks
from kvferry.connectors.reports import Reports
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import TransferTimeout
from kvferry.store.base import KVStore
from kvferry.transport.transfer_loop import TransferLoop
from support.waiting import until

pytestmark = pytest.mark.short_deadlines


MakeLoader = Callable[..., StoreLoader]


@pytest.fixture
def loop() -> Iterator[TransferLoop]:
    loop = TransferLoop("kvferry-store-test")
    loop.start()
    yield loop
    loop.close()


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
        async def wait_for_gate(self) -> None:
            passing = asyncio.ensure_future(super().wait_for_gate())
            while not passing.done():  # as one that waits for a thread: cancelling does not end it
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(passing)

        async def get_layer(self, layer: int, reads: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
            try:
                return await super().get_layer(layer, reads)
            finally:
                asyncio.get_running_loop().call_soon(has_ended.set)

    has_ended = threading.Event()
    store = Stubborn()
    before = region.block(0, 2)
    loader = make_loader(store, timeout_s=0.05)
    step = loader.start_layerwise([LoadBlocks("r", [b"a"], [2], True)])
    step.wait_layer(0)
    assert step.failed() == {"r"}
    store.gate.set()
    assert has_ended.wait(20)
    assert region.block(0, 2) == before
    reports.take()
    loader.close()
