"""The threads of the shared storage connector, one by one, on a store that the test holds up."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from kv_support import Region, make_layout

from kvferry.connectors.api import Loaded, Released, StoreEvents, failures
from kvferry.connectors.shared_storage.loader import StoreLoader
from kvferry.connectors.shared_storage.markers import Marker, MarkerFolder
from kvferry.connectors.shared_storage.plan import LoadBlocks
from kvferry.connectors.shared_storage.prober import Prober, Question
from kvferry.connectors.shared_storage.writer import StoreWriter
from kvferry.core.errors import StoreError, TransferTimeout
from kvferry.core.hand_off import PrefillResult
from kvferry.store.base import KVStore, LayerViews

LAYOUT = make_layout(num_layers=2)


class HeldStore(KVStore):
    """Answers when `gate` is open; fills blocks with 1."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked = threading.Event()
        self.error: Exception | None = None
        self.puts: list[bytes] = []

    def _pass(self) -> None:
        self.asked.set()
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error

    def match(self, hashes: Sequence[bytes]) -> int:
        self._pass()
        return len(hashes)

    def get(self, block_hash: bytes, into: LayerViews) -> bool:
        self._pass()
        for view in into:
            view[:] = b"\x01" * len(view)
        return True

    def get_layer(self, block_hash: bytes, layer: int, into: memoryview) -> bool:
        return self.get(block_hash, [into])

    def put(self, block_hash: bytes, layers: LayerViews) -> bool:
        self._pass()
        self.puts.append(block_hash)
        return True

    def delete(self, block_hash: bytes) -> bool:
        return False

    def statistics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def layers(num_bytes: int = 100) -> list[memoryview]:
    return [memoryview(bytes(num_bytes))]


def marker_of(transfer_id: str) -> Marker:
    result = PrefillResult(first_token=1, seed=2)
    return Marker(transfer_id=transfer_id, layout=LAYOUT, num_tokens=3, prefill_result=result)


# The writer.


def test_markers_come_after_the_blocks_before_them(tmp_path: Path) -> None:
    store, folder = HeldStore(), MarkerFolder(tmp_path)
    writer = StoreWriter(store, folder, 1e6)
    writer.put(b"a", layers())
    writer.mark(marker_of("t"))
    assert store.asked.wait(20)
    assert folder.read("t", 0) is None
    store.gate.set()
    until(writer.is_empty)
    assert store.puts == [b"a"]
    assert folder.read("t", 0) == marker_of("t")
    writer.close()


def test_a_full_queue_waits_and_then_drops_without_waiting(tmp_path: Path) -> None:
    store = HeldStore()
    writer = StoreWriter(store, MarkerFolder(tmp_path), 250, longest_wait_s=0.02)
    assert writer.put(b"a", layers())
    assert writer.put(b"b", layers())
    assert not writer.put(b"c", layers())
    begun = time.monotonic()
    for _ in range(100):
        assert not writer.put(b"d", layers())
    assert time.monotonic() - begun < 1.0, "it waits once, not for each block"
    assert writer.statistics()["writer_dropped_blocks"] == 101
    store.gate.set()
    until(writer.is_empty)
    assert writer.put(b"e", layers())
    writer.close()
    assert store.puts == [b"a", b"b", b"e"]


def test_a_block_larger_than_the_bound_goes_alone(tmp_path: Path) -> None:
    store = HeldStore()
    store.gate.set()
    writer = StoreWriter(store, MarkerFolder(tmp_path), 10)
    assert writer.put(b"a", layers(100))
    writer.close()
    assert store.puts == [b"a"]


def test_a_store_that_fails_does_not_end_the_writer(tmp_path: Path) -> None:
    store = HeldStore()
    store.error = StoreError("full")
    store.gate.set()
    writer = StoreWriter(store, MarkerFolder(tmp_path), 1e6)
    writer.box.open()
    writer.put(b"a", layers())
    until(writer.is_empty)
    store.error = None
    writer.put(b"b", layers())
    writer.close()
    assert store.puts == [b"b"]
    assert writer.box.take() == StoreEvents(stored=[b"b"], dropped=[b"a"])
    assert not writer.box.take()


def test_every_block_is_stored_or_dropped(tmp_path: Path) -> None:
    store = HeldStore()
    writer = StoreWriter(store, MarkerFolder(tmp_path), 250, longest_wait_s=0.0)
    writer.put(b"before anybody asks", layers())
    writer.box.open()
    writer.put(b"b", layers())
    assert not writer.put(b"c", layers())
    assert writer.box.take() == StoreEvents(dropped=[b"c"])
    store.gate.set()
    until(writer.is_empty)
    writer.close()
    assert writer.box.take().stored[-1] == b"b"


# The loader.


@pytest.fixture
def region() -> Region:
    region = Region(LAYOUT, 4)
    yield region
    region.close()


def make_loader(store: KVStore, region: Region, timeout_s: float = 20) -> StoreLoader:
    memory, view = region.memory, region.memory.view((0, region.memory.num_bytes))

    def block_view(layer: int, block_id: int) -> memoryview:
        [(offset, length)] = memory.spans(layer, [block_id])
        return view[offset : offset + length]

    return StoreLoader(store, block_view, LAYOUT.num_layers, timeout_s)


def test_a_cancelled_load_writes_nothing_after_its_report(region: Region) -> None:
    store = HeldStore()
    loader = make_loader(store, region)
    loader.start(LoadBlocks("r", [b"a", b"b"], [0, 1], False))
    assert store.asked.wait(20)
    loader.cancel("r")
    assert not loader.box, "the read under way may still write"
    store.gate.set()
    until(lambda: bool(loader.box))
    assert loader.box.take() == [Released("r")]
    assert region.block(0, 1) == bytes(LAYOUT.span_bytes(0)), "the second block was not read any more"
    assert loader.is_empty()
    loader.cancel("r")
    assert loader.box.take() == [Released("r")], "also when it had ended already"
    loader.close()


def test_the_deadline_ends_a_load(region: Region) -> None:
    store = HeldStore()
    loader = make_loader(store, region, timeout_s=0.01)
    loader.start(LoadBlocks("r", [b"a", b"b"], [0, 1], False))
    assert store.asked.wait(20)
    time.sleep(0.02)  # past the deadline, which is on the real clock
    store.gate.set()
    until(lambda: bool(loader.box))
    assert isinstance(failures(loader.box.take())["r"], TransferTimeout)
    loader.close()


def test_a_mistake_in_a_store_is_heard_of(region: Region) -> None:
    store = HeldStore()
    store.error = ZeroDivisionError("a bug")
    store.gate.set()
    loader = make_loader(store, region)
    loader.start(LoadBlocks("r", [b"a"], [0], False))
    step = loader.start_layerwise([LoadBlocks("s", [b"a"], [1], True)])
    assert step.failed() == {"s"}
    until(loader_is_done(loader))
    assert set(failures(loader.box.take())) == {"r", "s"}
    loader.close()


def loader_is_done(loader: StoreLoader) -> Callable[[], bool]:
    return lambda: loader.statistics()["num_loading"] == 0


def test_layers_are_waited_for_one_by_one(region: Region) -> None:
    store = HeldStore()
    loader = make_loader(store, region)
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
    assert loader.box.take() == [Loaded("r"), Loaded("s")]
    loader.close()


# The prober.


def test_a_slow_store_holds_up_nobody(tmp_path: Path) -> None:
    store = HeldStore()
    prober = Prober([store], MarkerFolder(tmp_path))
    prober.ask("r", Question([b"a", b"b"]))
    assert store.asked.wait(20)
    assert prober.answer("r") is None
    store.gate.set()
    until(lambda: prober.answer("r") is not None)
    answer = prober.answer("r")
    assert answer is not None
    assert answer.num_present == 2
    prober.forget("r")
    assert prober.num_kept() == 0
    prober.close()


def test_an_answer_nobody_waits_for_any_more_is_not_kept(tmp_path: Path) -> None:
    store = HeldStore()
    prober = Prober([store], MarkerFolder(tmp_path))
    prober.ask("r", Question([b"a"]))
    assert store.asked.wait(20)
    prober.forget("r")
    store.gate.set()
    prober.ask("s", Question([b"a"]))
    until(lambda: prober.answer("s") is not None)
    assert prober.num_kept() == 1
    prober.close()


def test_many_markers_are_waited_for_at_once(tmp_path: Path) -> None:
    store, folder = HeldStore(), MarkerFolder(tmp_path)
    store.gate.set()
    prober = Prober([store], folder)
    deadline = time.monotonic() + 20
    for index in range(20):
        prober.ask(f"r{index}", Question([b"a"], f"t{index}", deadline))
    for index in reversed(range(20)):
        folder.write(marker_of(f"t{index}"))
    until(lambda: all(prober.answer(f"r{index}") is not None for index in range(20)))
    answer = prober.answer("r7")
    assert answer is not None
    assert answer.marker == marker_of("t7")
    prober.close()


# Markers.


def test_markers_are_swept_by_age(tmp_path: Path) -> None:
    folder = MarkerFolder(tmp_path)
    folder.write(marker_of("old"))
    [path] = (tmp_path / "transfers").iterdir()
    os.utime(path, (1, 1))
    folder.write(marker_of("new"))
    folder.sweep()
    assert folder.read("old", 0) is None
    assert folder.read("new", 0) == marker_of("new")
    folder.remove("new", 0)
    folder.remove("new", 0)
    assert folder.read("new", 0) is None


def test_a_marker_of_another_hand_off_is_not_believed(tmp_path: Path) -> None:
    folder = MarkerFolder(tmp_path)
    folder.write(marker_of("a"))
    [path] = (tmp_path / "transfers").iterdir()
    folder.write(marker_of("b"))
    path.rename(next(other for other in (tmp_path / "transfers").iterdir() if other != path))
    with pytest.raises(StoreError, match="another"):
        folder.read("b", 0)
