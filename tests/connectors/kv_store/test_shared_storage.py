"""The shared storage connector between engines without a model, in one process and in two."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fake_engine import FakeEngine, FakeRequest, ProducerEngine, consumed, lay_out, produced
from kv_support import make_layout

from kvferry.connectors.api import (
    ConnectorContext,
    Hit,
    Miss,
    Pending,
)
from kvferry.connectors.caching import StoreEvents
from kvferry.connectors.kv_store.markers import HEARTBEAT_BYTES
from kvferry.connectors.kv_store.scheduler import KVStoreSchedulerSide
from kvferry.connectors.kv_store.settings import StoreSettings
from kvferry.connectors.kv_store.worker import KVStoreWorkerSide
from kvferry.core.blocks.block_hash import extend_hashes, root_hash
from kvferry.core.errors import (
    ConfigError,
    LayoutMismatch,
    LeaseEnded,
    ProtocolError,
    StoreError,
    TransferTimeout,
)
from kvferry.core.messages.hand_off import Produce, Ticket
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.store.activity import Changes
from kvferry.store.base import BlockRead
from kvferry.store.disk import Disk
from kvferry.store.eviction.base import BlockKey
from kvferry.store.eviction.reuse import Reuse
from kvferry.store.machine import Machine
from kvferry.store.media.file import FileOptions, FileStore
from kvferry.transport.memory import BlockMemory
from support.troubled_stores import HeldUpDisk

NAME = "SharedStorageConnector"
MakeEngine = Callable[..., FakeEngine]
PROMPT = list(range(100, 119))
BLOCK = 4
LONG_S = 3600.0


@pytest.fixture(params=["async", "layerwise"])
def load(request: pytest.FixtureRequest) -> str:
    way: str = request.param
    return way


@pytest.fixture
def make(make_engine: MakeEngine, tmp_path: Path) -> MakeEngine:
    """Engines on one directory."""

    def make(role: str = "kv_both", **options: object) -> FakeEngine:
        return make_engine(NAME, role, **({"shared_storage_path": str(tmp_path)} | options))

    return make


def early_ticket(key: str = "t") -> dict[str, object]:
    return Ticket(transfer_id=key).to_params()


def settle(engine: FakeEngine) -> None:
    """Until all that was saved is on the disk."""
    engine.run_until(engine.worker.is_flushed)


def worker_on(disk: Disk) -> Callable[[ConnectorContext], KVStoreWorkerSide]:
    """Makes worker sides whose files are on this disk."""
    machine = Machine()
    machine.disk = disk
    return lambda context: KVStoreWorkerSide(replace(context, machine=machine))


def store_files(root: Path) -> list[Path]:
    return sorted(root.glob("*/??/*.kv"))


def markers(root: Path) -> list[Path]:
    """Without producers' signs, which are shorter."""
    found = []
    for path in (root / "notes").glob("*.note"):
        with suppress(FileNotFoundError):
            found += [path] if path.stat().st_size > 8 + HEARTBEAT_BYTES else []
    return found


def require_store_is_right(engine: FakeEngine, root: Path, tokens: list[int]) -> None:
    """Every block of `tokens` that the store has holds what the model computes for it."""
    request = FakeRequest("check", tokens)
    engine.add(request)
    engine.abort(request)
    store = FileStore(str(root), FileOptions(), engine.layout)
    for index, block_hash in enumerate(request.block_hashes):
        into = [memoryview(bytearray(engine.layout.span_bytes(layer))) for layer in range(engine.layout.num_layers)]
        if asyncio.run(store.get([BlockRead(block_hash, into)]))[0]:
            for layer, found in enumerate(into):
                expected, _ = lay_out(engine.layout, tokens, layer, index, 0, engine.layout.block_size)
                assert bytes(found) == expected.tobytes(), f"layer {layer} of block {index}"
    asyncio.run(store.close())


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 19])
def test_prefill_then_decode(make: MakeEngine, load: str, num_tokens: int, tmp_path: Path) -> None:
    producer, consumer = make("kv_producer", load=load), make("kv_consumer", load=load)
    tokens = PROMPT[:num_tokens]
    prefill = producer.run(produced(tokens))
    assert prefill.ticket is not None
    assert producer.held == {}
    decode = consumer.run(consumed(tokens, prefill.ticket))
    assert (decode.error, decode.num_computed_here) == (None, num_tokens % BLOCK)
    consumer.require_right(decode)
    assert decode.prefill_result == prefill.prefill_result
    assert len(store_files(tmp_path)) == num_tokens // BLOCK


@pytest.mark.parametrize("num_tokens", [3, 8, 19])
def test_prefill_and_decode_at_the_same_time(make: MakeEngine, load: str, num_tokens: int, tmp_path: Path) -> None:
    producer, consumer = make("kv_producer", load=load), make("kv_consumer", load=load)
    tokens = PROMPT[:num_tokens]
    decode = consumer.add(consumed(tokens, early_ticket()))
    consumer.step()
    consumer.step()
    assert decode.state == "waiting"
    prefill = producer.run(produced(tokens))
    consumer.run_until(lambda: decode.state == "done" and not consumer.scheduler.has_work())
    assert decode.error is None
    assert decode.prefill_result == prefill.prefill_result
    consumer.require_right(decode)
    settle(consumer)
    assert markers(tmp_path) == [], "used, so removed"


def test_prompts_that_begin_alike_share_blocks(make: MakeEngine, load: str) -> None:
    first, second = make(load=load), make(load=load)
    first.run(FakeRequest("a", PROMPT))
    settle(first)
    longer = [*PROMPT, 7, 8, 9, 10]
    request = second.run(FakeRequest("b", longer))
    assert (request.error, request.num_computed_here) == (None, len(longer) - 16)
    second.require_right(request)


def test_one_token_is_left_to_compute(make: MakeEngine, load: str) -> None:
    engine = make(load=load)
    engine.run(FakeRequest("a", PROMPT[:8]))
    settle(engine)
    request = engine.run(FakeRequest("b", PROMPT[:8]))
    assert request.num_computed_here == 4, "the second block is there, but its last token's logits are wanted"
    engine.require_right(request)


def test_the_scheduler_side_never_looks_itself(make: MakeEngine) -> None:
    engine = make()
    request = FakeRequest("a", PROMPT)
    engine.add(request)
    assert isinstance(engine.scheduler.match(request, 0), Pending)
    engine.run_until(lambda: request.state == "done")


def test_a_hit_is_counted_from_the_own_prefix(make: MakeEngine) -> None:
    engine = make()
    engine.run(FakeRequest("a", PROMPT))
    settle(engine)
    request = engine.add(FakeRequest("b", PROMPT))
    while isinstance(engine.scheduler.match(request, 0), Pending):
        pass
    assert engine.scheduler.match(request, 0) == Hit(16)
    assert engine.scheduler.match(request, 8) == Hit(8)
    assert engine.scheduler.match(request, 16) == Miss()
    engine.abort(request)


def test_own_blocks_are_not_overwritten_nor_saved_twice(make: MakeEngine, tmp_path: Path) -> None:
    engine = make()
    request = FakeRequest("a", PROMPT, cached=[30, 31])
    engine.run(request)
    settle(engine)
    assert len(store_files(tmp_path)) == 4, "also those that the own prefix cache had"
    again = FakeRequest("b", PROMPT, cached=[10, 11])
    engine.run(again)
    engine.require_right(again)
    assert engine.worker.statistics()["stored_blocks"] == 4
    assert engine.worker.statistics()["loaded_blocks"] == 2


def test_a_prompt_that_is_all_in_the_own_prefix_cache_is_not_copied_again(make: MakeEngine, tmp_path: Path) -> None:
    engine = make()
    engine.run(FakeRequest("a", PROMPT, cached=[30, 31, 32, 33]))
    settle(engine)
    assert store_files(tmp_path) == []
    handed_off = produced(PROMPT)
    handed_off.cached = [40, 41, 42, 43]
    engine.run(handed_off)
    settle(engine)
    assert len(store_files(tmp_path)) == 4, "another instance counts on these"


def test_a_producer_saves_what_its_prefix_cache_had_but_the_store_has_lost(make: MakeEngine, tmp_path: Path) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    producer.run(produced(PROMPT, "t0"))
    settle(producer)
    for path in store_files(tmp_path):
        path.unlink()
    request = produced(PROMPT)
    request.cached = [30, 31, 32]
    prefill = producer.run(request)
    decode = consumer.run(consumed(PROMPT, prefill.ticket))
    assert (decode.error, decode.num_computed_here) == (None, 3)


def test_a_damaged_block_is_computed_again_and_kept_again(make: MakeEngine, load: str, tmp_path: Path) -> None:
    engine = make(load=load)
    engine.run(FakeRequest("a", PROMPT))
    settle(engine)
    damaged = store_files(tmp_path)[1]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    request = engine.run(FakeRequest("b", PROMPT))
    assert isinstance(request.error, StoreError)
    assert request.num_computed_here == len(PROMPT)
    engine.require_right(request)
    settle(engine)
    assert engine.worker.statistics()["corrupt_blocks"] == 1
    assert len(store_files(tmp_path)) == 4
    require_store_is_right(engine, tmp_path, PROMPT)


def test_what_was_computed_on_a_lost_prefix_is_never_kept(make: MakeEngine, tmp_path: Path) -> None:
    """In a layerwise load the model runs before the damage shows; nothing of that step may reach the store."""
    engine = make(load="layerwise", chunk=100)
    engine.run(FakeRequest("a", PROMPT[:9]))
    settle(engine)
    assert len(store_files(tmp_path)) == 2
    for path in store_files(tmp_path):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    request = engine.add(FakeRequest("b", PROMPT))
    engine.run_until(lambda: request.num_computed > 0 or request.error is not None)
    assert request.error is not None
    settle(engine)
    after_the_failed_step = len(store_files(tmp_path))
    engine.run_until(lambda: request.state == "done")
    engine.require_right(request)
    settle(engine)
    assert after_the_failed_step < len(store_files(tmp_path)) == 4
    require_store_is_right(engine, tmp_path, PROMPT)


def test_what_another_request_computed_on_a_lost_prefix_is_never_kept(make: MakeEngine, tmp_path: Path) -> None:
    """It shares the blocks of the one whose load failed, and hears of nothing."""
    engine = make(load="layerwise", chunk=100)
    engine.run(FakeRequest("a", PROMPT[:9]))
    settle(engine)
    damaged = store_files(tmp_path)
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    loads = engine.add(FakeRequest("b", PROMPT[:17]))
    shares = engine.add(FakeRequest("c", [*PROMPT[:8], *range(11)], shares=(loads, 2)))
    engine.run_until(lambda: loads.error is not None)
    settle(engine)
    assert set(store_files(tmp_path)) < set(damaged)
    engine.run_until(lambda: shares.state == "done")


def test_each_layer_is_there_when_the_model_reads_it(make: MakeEngine) -> None:
    engine = make(load="layerwise")
    engine.run(FakeRequest("a", PROMPT))
    settle(engine)
    request = engine.run(FakeRequest("b", PROMPT))
    assert request.error is None
    assert engine.seen == [{"b": True}, {"b": True}]


def test_blocks_evicted_between_the_look_and_the_load(make: MakeEngine, load: str, tmp_path: Path) -> None:
    engine = make(load=load)
    engine.run(FakeRequest("a", PROMPT))
    settle(engine)
    request = engine.add(FakeRequest("b", PROMPT))
    while isinstance(engine.scheduler.match(request, 0), Pending):
        pass
    for path in store_files(tmp_path):
        path.unlink()
    engine.run_until(lambda: request.state == "done")
    assert isinstance(request.error, StoreError)
    engine.require_right(request)


def test_a_bounded_store(make: MakeEngine, tmp_path: Path) -> None:
    layout = make_layout(num_layers=2)
    engine = make(max_bytes=6 * layout.block_bytes)
    for index in range(8):
        engine.run(FakeRequest(f"r{index}", [index * 50 + offset for offset in range(19)]))
    settle(engine)
    assert sum(path.stat().st_size for path in store_files(tmp_path)) <= 6 * layout.block_bytes


def test_a_preempted_prefill(make: MakeEngine) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    prefill = producer.add(produced(PROMPT))
    producer.run_until(lambda: prefill.num_computed > 0)
    producer.preempt(prefill)
    producer.run_until(lambda: prefill.state == "done" and not producer.scheduler.has_work())
    decode = consumer.run(consumed(PROMPT, prefill.ticket))
    assert decode.error is None
    consumer.require_right(decode)


def test_a_prefill_that_finds_its_prefix_still_hands_off(make: MakeEngine, load: str) -> None:
    producer, consumer = make("kv_producer", load=load, chunk=100), make("kv_consumer", load=load)
    producer.run(produced(PROMPT[:17], "t0"))
    settle(producer)
    prefill = producer.run(produced(PROMPT))
    assert prefill.num_computed_here == 3
    assert prefill.ticket is not None
    decode = consumer.run(consumed(PROMPT, prefill.ticket))
    assert decode.error is None
    consumer.require_right(decode)


def test_what_became_of_each_block(make: MakeEngine, tmp_path: Path) -> None:
    engine = make(load="layerwise", chunk=100)
    engine.worker.watch_store()
    engine.run(FakeRequest("a", PROMPT))
    settle(engine)
    hashes = block_hashes(PROMPT)
    assert engine.worker.store_events() == StoreEvents(stored=hashes, changes=[Changes("STORAGE", hashes, [])])
    assert not engine.worker.store_events()
    for path in store_files(tmp_path):
        path.write_bytes(b"damaged")
    request = engine.add(FakeRequest("b", PROMPT))
    engine.run_until(lambda: request.num_computed > 0 or request.error is not None)
    events = engine.worker.store_events()
    [changes] = events.changes
    assert set(changes.removed) == set(hashes), "each was found to be damaged"
    assert events.dropped == [], "nothing was to be kept in that step"
    engine.run_until(lambda: request.state == "done")
    settle(engine)
    assert engine.worker.store_events().stored == hashes


def block_hashes(tokens: list[int]) -> list[bytes]:
    """The names of the full blocks, as the engine makes them."""
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash("m"), tokens, BLOCK)
    return hashes


# Hand-offs that do not come about.


def test_nobody_prefills(make: MakeEngine) -> None:
    consumer = make("kv_consumer", timeout_s=0.05)
    decode = consumer.run(consumed(PROMPT, early_ticket()))
    assert isinstance(decode.error, TransferTimeout)
    consumer.require_right(decode)


def test_a_prefill_that_is_aborted_is_not_waited_for(make: MakeEngine) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    decode = consumer.add(consumed(PROMPT, early_ticket()))
    consumer.step()
    prefill = producer.add(produced(PROMPT))
    producer.run_until(lambda: prefill.num_computed > 0)
    producer.abort(prefill)
    producer.step()
    assert prefill.ticket is None
    consumer.run_until(lambda: decode.state == "done")
    assert isinstance(decode.error, LeaseEnded)


def test_a_prefill_aborted_while_it_loads_is_not_waited_for(make: MakeEngine) -> None:
    before = make("kv_producer")
    before.run(produced(PROMPT, "before"))
    settle(before)
    disk = HeldUpDisk()
    producer = make("kv_producer", build_worker=worker_on(disk))
    consumer = make("kv_consumer")
    decode = consumer.add(consumed(PROMPT, early_ticket()))
    consumer.step()
    disk.set(LONG_S)  # the load is still under way
    prefill = producer.add(produced(PROMPT))
    producer.run_until(lambda: prefill.state == "loading")
    producer.step()
    producer.abort(prefill)
    producer.run_until(lambda: not producer.held)
    disk.set(0.0)
    consumer.run_until(lambda: decode.state == "done")
    assert isinstance(decode.error, LeaseEnded)


def test_another_prompt_or_layout_behind_the_ticket(make: MakeEngine, make_engine: MakeEngine, tmp_path: Path) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    producer.run(produced(PROMPT))
    assert isinstance(consumer.run(consumed(PROMPT[:9], early_ticket())).error, ProtocolError)
    other_layout = make_layout(num_layers=2, model_fingerprint="other")
    other = make_engine(NAME, "kv_consumer", layout=other_layout, shared_storage_path=str(tmp_path))
    error = other.run(consumed(PROMPT, early_ticket())).error
    assert isinstance(error, LayoutMismatch)
    assert error.field == "model_fingerprint"


def test_a_damaged_marker(make: MakeEngine, tmp_path: Path) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    producer.run(produced(PROMPT))
    settle(producer)
    [marker] = markers(tmp_path)
    marker.write_bytes(marker.read_bytes()[:8] + b"\x80\x04K\x01.")
    assert isinstance(consumer.run(consumed(PROMPT, early_ticket())).error, StoreError)


def test_release_removes_the_marker(make: MakeEngine, tmp_path: Path) -> None:
    producer = make("kv_producer")
    producer.run(produced(PROMPT))
    settle(producer)
    assert len(markers(tmp_path)) == 1
    assert not producer.scheduler.release("another")
    assert producer.scheduler.release("t")
    assert not producer.scheduler.release("t")
    producer.step()
    settle(producer)
    assert markers(tmp_path) == []


def test_a_transfer_id_names_no_path(make: MakeEngine, tmp_path: Path) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    key = "../../../../etc/passwd"
    prefill = producer.run(produced(PROMPT, key))
    settle(producer)
    assert len(markers(tmp_path)) == 1
    assert consumer.run(consumed(PROMPT, prefill.ticket, key)).error is None


def test_a_decode_aborted_while_it_waits(make: MakeEngine) -> None:
    consumer = make("kv_consumer")
    decode = consumer.add(consumed(PROMPT, early_ticket()))
    consumer.step()
    consumer.abort(decode)
    assert consumer.held == {}


def test_a_decode_aborted_while_it_loads(make: MakeEngine) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    prefill = producer.run(produced(PROMPT))
    decode = consumer.add(consumed(PROMPT, prefill.ticket))
    consumer.run_until(lambda: decode.state in ("loading", "done"))
    if decode.state == "loading":
        consumer.abort(decode)
        assert consumer.held
    consumer.run_until(lambda: not consumer.held)


def test_a_load_and_its_end_in_one_step(make: MakeEngine) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    prefill = producer.run(produced(PROMPT))
    decode = consumer.add(consumed(PROMPT, prefill.ticket))
    while decode.state == "waiting":
        consumer.admit(decode)
    consumer.abort(decode)
    assert consumer.held == {}


def test_the_role_is_kept(make: MakeEngine) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    assert isinstance(consumer.run(produced(PROMPT)).error, ConfigError)
    assert isinstance(producer.run(consumed(PROMPT, early_ticket())).error, ConfigError)


@pytest.mark.parametrize("way", ["async", "layerwise"])
def test_hand_offs_between_processes(make: MakeEngine, way: str, tmp_path: Path) -> None:
    producer = ProducerEngine(NAME, shared_storage_path=str(tmp_path))
    consumer = make("kv_consumer", load=way)
    for index in range(3):
        tokens = [index, *PROMPT]
        decode = consumer.run(consumed(tokens, producer.ask(f"t{index}", *tokens), f"t{index}"))
        assert decode.error is None
        consumer.require_right(decode)
    assert producer.end() == 0, "its own check found something left"


def test_what_a_killed_producer_had_saved_is_of_use(make: MakeEngine, tmp_path: Path) -> None:
    producer = ProducerEngine(NAME, shared_storage_path=str(tmp_path))
    producer.ask("t", *PROMPT)
    consumer = make("kv_consumer")
    consumer.run_until(lambda: len(markers(tmp_path)) == 1)
    producer.kill()
    decode = consumer.run(consumed(PROMPT, early_ticket()))
    assert (decode.error, decode.num_computed_here) == (None, 3)


# What a user may get wrong.


def context(**extra: object) -> ConnectorContext:
    return ConnectorContext(KVTransferConfig(kv_connector=NAME, kv_connector_extra_config=extra), make_layout())


@pytest.mark.parametrize("side", [KVStoreSchedulerSide, KVStoreWorkerSide])
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "needs kv_connector_extra_config.shared_storage_path"),
        ({"shared_storage_path": "x", "load": "layerwize"}, "did you mean 'layerwise'"),
        ({"shared_storage_path": "x", "max_bytes": -1}, "max_bytes"),
        ({"shared_storage_path": "x", "timeout_s": 0}, "timeout_s"),
        ({"shared_storage_path": "x", "shared_storage_pth": "y"}, "did you mean 'shared_storage_path'"),
    ],
)
def test_settings_are_checked(side: type, extra: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        side(context(**extra))


def test_memory_of_other_devices_is_refused(tmp_path: Path) -> None:
    side = KVStoreWorkerSide(context(shared_storage_path=str(tmp_path)))
    memory = BlockMemory.dense(make_layout(), 4, 0, device="xpu:0")
    with pytest.raises(ConfigError, match="--device cpu"):
        side.register(memory)
    side.close()


def test_the_scheduler_side_needs_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; import kvferry.connectors.kv_store.scheduler"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(("access", "beyond"), [("owner", 0o077), ("group", 0o007)])
def test_nobody_else_may_read_what_prompts_said(
    make_engine: MakeEngine, tmp_path: Path, access: str, beyond: int
) -> None:
    root = tmp_path / "above" / "store"
    umask = os.umask(0)
    try:
        producer = make_engine(NAME, "kv_producer", shared_storage_path=str(root), access=access)
        assert producer.run(FakeRequest("p", list(range(20)), Produce("t"))).ticket is not None
        producer.run_until(lambda: bool(markers(root)))
    finally:
        os.umask(umask)
    found = [root.parent, root, *root.rglob("*")]
    assert {path.suffix for path in found} >= {".kv", ".note"}
    assert not [path for path in found if path.stat().st_mode & beyond]


@pytest.mark.parametrize("name", ["a b", "100%", "what?", "%20", "a#b", "ä"])
def test_a_directory_may_have_any_name(tmp_path: Path, name: str) -> None:
    settings = StoreSettings(shared_storage_path=str(tmp_path / name))
    [spec] = settings.specs()
    store: Any = spec.make(make_layout())
    assert store.root == tmp_path / name


class RecordingReuse(Reuse):
    """`num_output_tokens`: of the answers whose ends were reported."""

    num_output_tokens: ClassVar[set[int]] = set()

    def finish(self, keys: Iterable[BlockKey], num_output_tokens: int, now: float) -> None:
        self.num_output_tokens.add(num_output_tokens)
        super().finish(keys, num_output_tokens, now)


def test_the_store_hears_how_long_answers_were(make_engine: MakeEngine, tmp_path: Path) -> None:
    RecordingReuse.num_output_tokens.clear()
    url = f"memory:?num_blocks=64&eviction={__name__}:RecordingReuse&name={tmp_path.name}"
    engine = make_engine("KVStoreConnector", store=url)
    engine.run(FakeRequest("a", PROMPT))
    assert not engine.scheduler.has_work(), "no step is made for a hint"
    assert RecordingReuse.num_output_tokens == set()
    engine.run(FakeRequest("b", [5, *PROMPT]))
    settle(engine)
    assert RecordingReuse.num_output_tokens == {0}, "of the first; the hint of the second waits for a step"
