"""The cache connector on the memory of a GPU, for which host memory stands whose copies are as late as they may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fake_engine import FakeEngine, FakeRequest, consumed, produced
from host_copies import HostCopies
from kv_support import make_layout

from kvferry.connectors.api import ConnectorContext
from kvferry.connectors.kv_store.blocks import DeviceBlocks
from kvferry.connectors.kv_store.worker import KVStoreWorkerSide
from kvferry.core.messages.hand_off import Ticket
from kvferry.testing.kv import BlockRegion
from kvferry.transport.cuda.copies import CopyLimits
from kvferry.transport.memory import BlockMemory

PROMPT = list(range(100, 119))
BLOCK = 4


class Waits:
    """Stands for the wait until the model has run."""

    number = 0

    def __call__(self) -> None:
        self.number += 1


@pytest.fixture(params=["layers are announced when written", "the model runs behind"])
def make(
    request: pytest.FixtureRequest, make_engine: Callable[..., FakeEngine], tmp_path: Path
) -> Callable[..., FakeEngine]:
    wait = Waits() if request.param == "the model runs behind" else None

    def blocks(memory: BlockMemory, saves_are_complete: bool) -> DeviceBlocks:
        return DeviceBlocks(memory, wait, HostCopies, lambda num_bytes: memoryview(bytearray(num_bytes)))

    def build(context: ConnectorContext) -> KVStoreWorkerSide:
        return KVStoreWorkerSide(replace(context, saves_are_complete=wait is None), blocks)

    def make(role: str, **options: object) -> FakeEngine:
        return make_engine(
            "SharedStorageConnector", role, shared_storage_path=str(tmp_path), build_worker=build, **options
        )

    return make


@pytest.mark.parametrize("load", ["async", "layerwise"])
@pytest.mark.parametrize("num_tokens", [3, 8, 19])
def test_prefill_then_decode(make: Callable[..., FakeEngine], load: str, num_tokens: int) -> None:
    producer, consumer = make("kv_producer", load=load), make("kv_consumer", load=load)
    prefill = producer.run(produced(PROMPT[:num_tokens]))
    decode = consumer.run(consumed(PROMPT[:num_tokens], prefill.ticket))
    assert (decode.error, decode.num_computed_here) == (None, num_tokens % BLOCK)
    consumer.require_right(decode)


@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_prefill_and_decode_at_the_same_time(make: Callable[..., FakeEngine], load: str) -> None:
    producer, consumer = make("kv_producer", load=load), make("kv_consumer", load=load)
    decode = consumer.add(consumed(PROMPT, Ticket(transfer_id="t").to_params()))
    consumer.step()
    producer.run(produced(PROMPT))
    consumer.run_until(lambda: decode.state == "done" and not consumer.scheduler.has_work())
    assert decode.error is None
    consumer.require_right(decode)


@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_several_requests_at_once(make: Callable[..., FakeEngine], load: str) -> None:
    first, second = make("kv_both", load=load), make("kv_both", load=load)
    prompts = [[number, 7, *PROMPT] for number in range(5)]
    for engine in (first, second):
        requests = [engine.add(FakeRequest(f"{number}", tokens)) for number, tokens in enumerate(prompts)]
        engine.run_until(lambda requests=requests: all(r.state == "done" for r in requests))
        engine.run_until(engine.worker.is_flushed)
    assert [request.num_computed_here for request in requests] == [1] * 5


def test_a_step_that_failed_keeps_nothing(make: Callable[..., FakeEngine]) -> None:
    engine = make("kv_both")
    request = engine.add(FakeRequest("r", PROMPT))
    engine.step()
    engine.worker.discard()
    engine.worker.check()
    engine.run_until(lambda: request.state == "done")


def test_blocks_for_which_there_is_no_pinned_memory_are_neither_saved_nor_loaded(
    make_engine: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    left = [3]

    def allocate(num_bytes: int) -> memoryview:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("no more")
        return memoryview(bytearray(num_bytes))

    def build(context: ConnectorContext) -> KVStoreWorkerSide:
        return KVStoreWorkerSide(context, lambda memory, _: DeviceBlocks(memory, None, HostCopies, allocate))

    extra = {"shared_storage_path": str(tmp_path), "build_worker": build}
    first, second = (make_engine("SharedStorageConnector", "kv_both", chunk=4, **extra) for _ in range(2))
    assert first.run(FakeRequest("r", PROMPT)).error is None
    first.run_until(first.worker.is_flushed)
    left[0] = 2
    loaded = second.run(FakeRequest("r", PROMPT))
    assert (loaded.state, loaded.num_computed_here) == ("done", len(PROMPT))
    assert loaded.error is not None
    left[0] = 3
    assert second.run(FakeRequest("s", PROMPT)).num_computed_here == len(PROMPT) - 3 * BLOCK


def test_many_pieces_and_large_ones() -> None:
    """They are divided, and begun in parts."""
    make_copies = partial(HostCopies, limits=CopyLimits(max_pieces=7, piece_bytes=48))
    region = BlockRegion(make_layout(), 64, seed=3)
    blocks = DeviceBlocks(region.memory, None, make_copies, lambda num_bytes: memoryview(bytearray(num_bytes)))
    block_ids = [9, 3, 60, 4, 5]
    copying = blocks.begin_copy(block_ids)
    copying.layer(1)
    found = copying.end()
    expected = region.blocks(block_ids)
    assert [[bytes(view) for view in views] for views in found] == [list(each) for each in zip(*expected, strict=True)]
    landing = blocks.staging_buffer([2, 0], [10, 11])
    for views in landing.views:
        for number, view in enumerate(views):
            view[:] = bytes([number + 1]) * len(view)
    before = region.blocks([10, 11])
    assert region.blocks([10, 11]) == before
    landing.commit()
    after = region.blocks([10, 11])
    assert after[1] == before[1]
    assert [{value for block in after[layer] for value in block} for layer in (2, 0)] == [{1}, {2}]
    blocks.close()
    region.close()
