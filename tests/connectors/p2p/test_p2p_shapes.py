"""The P2P connector between instances of different shape: ranks, block sizes, prefixes, and back for the next turn."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine, FakeRequest, consumed, produced
from hooked_fabric import with_reads
from kv_support import make_layout, sharded

from kvferry.connectors.api import Failed, Hit
from kvferry.connectors.p2p.plan import P2pPlan
from kvferry.connectors.p2p.worker import P2pWorkerSide
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.clock import ManualClock
from kvferry.core.errors import ChecksumMismatch, LayoutMismatch, LeaseEnded, PeerLost, ProtocolError
from kvferry.core.messages.hand_off import Consume, Produce, parse_hand_off
from kvferry.core.messages.ticket_seal import TicketSealer
from kvferry.testing import stepping
from kvferry.transport.fabric.base import FABRICS
from kvferry.transport.fabric.shm import MEMORY, ShmFabric
from kvferry.transport.fabric.tcp import TcpFabric
from kvferry.transport.memory import BlockMemory, Span, columns

MakeEngine = Callable[..., FakeEngine]
PROMPT = list(range(100, 119))
LONG_S = 60.0
"""A lease that does not end within a test: what ends, was ended."""

ONE = make_layout(2)
SHAPES: dict[str, tuple[KVLayout, KVLayout]] = {
    "block size 2 to 8": (make_layout(2, 2), make_layout(2, 8)),
    "block size 8 to 2": (make_layout(2, 8), make_layout(2, 2)),
    "2 ranks to 1": (sharded(ONE, 2), ONE),
    "1 rank to 2": (ONE, sharded(ONE, 2)),
    "2 ranks to 2": (sharded(ONE, 2), sharded(ONE, 2)),
    "4 ranks to 2, heads on two each": (sharded(ONE, 4), sharded(ONE, 2)),
    "1 rank to 4, heads on two each": (ONE, sharded(ONE, 4)),
    "4 ranks with all heads to 1": (sharded(ONE, 4, whole=True), ONE),
    "1 rank to 2 with all heads": (ONE, sharded(ONE, 2, whole=True)),
    "2 ranks of block size 8 to 1 of 4": (sharded(make_layout(2, 8), 2), make_layout(2, 4)),
    "1 rank of block size 2 to 2 of 4": (make_layout(2, 2), sharded(make_layout(2, 4), 2)),
}


def make_pair(make_engine: MakeEngine, shape: str, **options: object) -> tuple[FakeEngine, FakeEngine]:
    theirs, ours = SHAPES[shape]
    options = {"lease_s": LONG_S} | options
    return make_engine("P2pConnector", layout=theirs, **options), make_engine("P2pConnector", layout=ours, **options)


def resealed(ticket: dict[str, Any]) -> dict[str, Any]:
    """What an instance of the fleet might say that is mistaken about itself."""
    hand_off = parse_hand_off(ticket, "r")
    assert isinstance(hand_off, Consume)
    return TicketSealer("secret").seal(hand_off.ticket, 60.0).to_params()


def early_ticket(producer: FakeEngine, key: str = "t") -> dict[str, Any]:
    return stepping.early_ticket(key, producer.addresses, producer.scheduler).to_params()


def until_free(engine: FakeEngine) -> None:
    engine.run_until(lambda: not engine.held and not engine.scheduler.has_work())


# Shapes.


@pytest.mark.diagonal
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_then_decode(make_engine: MakeEngine, shape: str, transport: str) -> None:
    producer, consumer = make_pair(make_engine, shape, transport=transport)
    prefill = producer.run(produced(PROMPT))
    assert prefill.ticket is not None
    assert prefill.ticket["tp_size"] == producer.layout.tp_size
    decode = consumer.run(consumed(PROMPT, prefill.ticket))
    assert (decode.error, decode.num_computed_here) == (None, 0)
    until_free(producer)
    ends = [
        (worker.statistics().get("ended_taken", 0), worker.statistics().get("ended_released", 0))
        for worker in producer.workers
    ]
    assert all(sum(one) == 1 for one in ends), "each rank was rid of its blocks, by the consumer"


@pytest.mark.diagonal
@pytest.mark.parametrize("chunk", [3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_and_decode_at_the_same_time(make_engine: MakeEngine, shape: str, chunk: int) -> None:
    producer, consumer = make_pair(make_engine, shape, chunk=chunk)
    decode = consumer.add(consumed(PROMPT, early_ticket(producer)))
    consumer.step()
    assert decode.state == "loading"
    prefill = producer.run(produced(PROMPT))
    consumer.run_until(lambda: decode.state == "done")
    assert (decode.error, decode.num_computed_here) == (None, 0)
    assert decode.prefill_result == prefill.prefill_result
    until_free(producer)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_byte_crosses_once(make_engine: MakeEngine, shape: str) -> None:
    producer, consumer = make_pair(make_engine, shape)
    tokens = list(range(16))  # a whole number of blocks of any of these sizes
    consumer.run(consumed(tokens, producer.run(produced(tokens)).ticket))
    for worker in consumer.workers:
        layout = consumer.region.memory.layout
        num_bytes = sum(value for name, value in worker.statistics().items() if name.startswith("taken_bytes"))
        assert num_bytes == 16 // layout.block_size * layout.block_bytes


@pytest.mark.diagonal
@pytest.mark.parametrize("split", range(1, len(PROMPT)))
@pytest.mark.parametrize("shape", ["block size 2 to 8", "block size 8 to 2", "2 ranks to 2", "1 rank to 2"])
def test_a_prefix_is_fetched_and_the_rest_computed(make_engine: MakeEngine, shape: str, split: int) -> None:
    producer, consumer = make_pair(make_engine, shape)
    ticket = producer.run(produced(PROMPT[:split])).ticket
    if split % 2:
        decode = consumer.run(consumed(PROMPT, ticket))
    else:  # D learns only in the end how little P has
        ticket = {**early_ticket(producer), "tp_size": producer.layout.tp_size}
        decode = consumer.run(consumed(PROMPT, ticket))
    assert (decode.error, decode.num_computed_here) == (None, len(PROMPT) - split)
    assert decode.prefill_result is not None
    assert decode.prefill_result.first_token == sum(PROMPT) % 1000, "the producer's token was another position's"


@pytest.mark.diagonal
@pytest.mark.parametrize("num_cached", [1, 2])
@pytest.mark.parametrize("shape", ["block size 2 to 8", "block size 8 to 2", "2 ranks of block size 8 to 1 of 4"])
def test_what_the_decode_instance_has_is_not_fetched(make_engine: MakeEngine, shape: str, num_cached: int) -> None:
    producer, consumer = make_pair(make_engine, shape)
    ticket = producer.run(produced(PROMPT)).ticket
    decode = consumer.run(consumed(PROMPT, ticket, cached=[40, 20][:num_cached]))
    assert decode.error is None
    layout = consumer.layout
    statistics = consumer.worker.statistics()
    num_bytes = sum(value for name, value in statistics.items() if name.startswith("taken_bytes"))
    cell = min(layout.block_size, producer.layout.block_size)
    num_read = -(-len(PROMPT) // producer.layout.block_size) * producer.layout.block_size
    num_read = min(num_read, -(-len(PROMPT) // layout.block_size) * layout.block_size)
    num_read -= num_cached * layout.block_size
    assert num_read % cell == 0
    assert num_bytes == num_read * layout.block_bytes // layout.block_size


@pytest.mark.diagonal
@pytest.mark.parametrize("num_produced", [6, len(PROMPT)])
@pytest.mark.parametrize("early", [False, True])
def test_other_tokens_are_not_taken_for_a_prefix(make_engine: MakeEngine, num_produced: int, early: bool) -> None:
    """As when the two instances write a chat down differently."""
    producer, consumer = make_pair(make_engine, "2 ranks to 1")
    ticket = producer.run(produced([7, *PROMPT[: num_produced - 1]])).ticket
    decode = consumer.run(consumed(PROMPT, early_ticket(producer) if early else ticket))
    assert isinstance(decode.error, ProtocolError)
    assert decode.num_computed_here == len(PROMPT)
    until_free(producer)


def test_a_prefix_that_the_decode_instance_has_already(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine, "2 ranks to 2")
    ticket = producer.run(produced(PROMPT[:6])).ticket
    decode = consumer.run(consumed(PROMPT, ticket, cached=[40, 20, 10]))
    assert (decode.error, decode.num_computed_here) == (None, len(PROMPT) - 12)
    until_free(producer)


# What cannot be reconciled.


def test_sizes_that_do_not_divide_are_refused_by_name(make_engine: MakeEngine) -> None:
    producer = make_engine("P2pConnector", layout=make_layout(2, 4))
    consumer = make_engine("P2pConnector", layout=make_layout(2, 6))
    decode = consumer.run(consumed(PROMPT, producer.run(produced(PROMPT)).ticket))
    assert isinstance(decode.error, LayoutMismatch)
    assert decode.error.field == "block_size"
    until_free(producer)


@pytest.mark.parametrize("early", [False, True])
def test_another_models_ticket_is_released_at_once(make_engine: MakeEngine, early: bool) -> None:
    """The instance that refuses it is the only one that knows that nobody fetches it."""
    producer = make_engine("P2pConnector", layout=msgspec.structs.replace(make_layout(2, 4), model_fingerprint="new"))
    consumer = make_engine("P2pConnector", layout=make_layout(2, 4))
    ticket = producer.run(produced(PROMPT)).ticket
    decode = consumer.run(consumed(PROMPT, early_ticket(producer) if early else ticket))
    assert isinstance(decode.error, LayoutMismatch)
    assert decode.error.field == "model_fingerprint"
    until_free(producer)
    assert producer.worker.statistics()["ended_released"] == 1


def test_a_ticket_with_the_wrong_number_of_ranks(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine, "2 ranks to 1")
    ticket = producer.run(produced(PROMPT)).ticket
    assert ticket is not None
    decode = consumer.run(consumed(PROMPT, resealed(ticket | {"tp_size": 1, "remote_ranks": None})))
    assert isinstance(decode.error, LayoutMismatch)
    assert decode.error.field == "tp_size"
    producer.scheduler.release("t")  # it names no way to all ranks


def test_a_ticket_that_names_one_rank_twice(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine, "2 ranks to 1")
    ticket = producer.run(produced(PROMPT)).ticket
    assert ticket is not None
    decode = consumer.run(consumed(PROMPT, resealed(ticket | {"remote_ranks": [ticket["remote_ranks"][0]] * 2})))
    assert isinstance(decode.error, LayoutMismatch)
    assert decode.error.field == "tp_rank"
    producer.scheduler.release("t")  # it names no way to all ranks


# What goes wrong on one of several ranks.


class MuteableSide(P2pWorkerSide):
    """`on_start`: called in place of `start`, if not None."""

    on_start: Callable[[P2pPlan | None], None] | None = None

    def start(self, plan: P2pPlan | None) -> None:
        (self.on_start or super().start)(plan)


def second_rank(engine: FakeEngine) -> MuteableSide:
    side = engine.workers[1]
    assert isinstance(side, MuteableSide)
    return side


def test_a_lost_reader_is_bounded_by_the_lease(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine, "1 rank to 2", lease_s=0.15, build_worker=MuteableSide)
    ticket = producer.run(produced(PROMPT)).ticket
    second_rank(consumer).on_start = lambda plan: None
    decode = consumer.add(consumed(PROMPT, ticket))
    consumer.step()
    until_free(producer)
    assert producer.worker.statistics()["ended_expired"] == 1
    second_rank(consumer).on_start = None
    assert decode.state == "loading"
    consumer.abort(decode)
    until_free(consumer)


def test_one_of_two_ranks_is_lost(make_engine: MakeEngine) -> None:
    theirs, ours = SHAPES["2 ranks to 1"]
    consumer = make_engine("P2pConnector", layout=ours)
    with closing(FakeEngine("P2pConnector", theirs)) as producer:
        decode = consumer.add(consumed(PROMPT, early_ticket(producer)))
        consumer.step()
        producer.add(produced(PROMPT))
        producer.step()
        consumer.run_until(lambda: consumer.has_block(PROMPT, 1, decode.block_ids[1], 1))
        producer.workers[1].close()
        consumer.run_until(lambda: decode.state == "done")
        assert isinstance(decode.error, PeerLost)
        assert decode.num_computed_here == len(PROMPT)


def test_a_load_that_fails_on_one_rank_fails_when_no_other_writes(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine, "1 rank to 2", build_worker=MuteableSide)
    ticket = producer.run(produced(PROMPT)).ticket

    def refuse(plan: P2pPlan | None) -> None:
        for load in plan.loads.values() if plan else ():
            second_rank(consumer).reports.add(Failed(load.request_id, ProtocolError("of this rank alone")))

    second_rank(consumer).on_start = refuse
    decode = consumer.run(consumed(PROMPT, ticket))
    second_rank(consumer).on_start = None
    assert isinstance(decode.error, ProtocolError)
    assert decode.num_computed_here == len(PROMPT)
    producer.scheduler.release("t")


def test_a_decode_of_several_ranks_that_ends_before_it_loads(make_engine: MakeEngine) -> None:
    for shape in ("1 rank to 4, heads on two each", "4 ranks to 2, heads on two each"):
        producer, consumer = make_pair(make_engine, shape)
        decode = consumer.add(consumed(PROMPT, producer.run(produced(PROMPT)).ticket))
        consumer.abort(decode)
        consumer.step()
        until_free(producer)


# Leases.


def test_a_lease_lives_while_its_request_waits_in_the_queue(make_engine: MakeEngine) -> None:
    lease_s = 0.8  # much longer than a busy machine may stall
    producer, consumer = make_pair(make_engine, "2 ranks to 1", lease_s=lease_s)
    prefill = producer.run(produced(PROMPT))
    taken, consumer.free = consumer.free, []
    decode = consumer.add(consumed(PROMPT, prefill.ticket))
    end = time.monotonic() + 2 * lease_s
    consumer.run_until(lambda: time.monotonic() > end or bool(producer.step()))
    assert decode.state == "waiting"
    consumer.free = taken
    consumer.run_until(lambda: decode.state == "done")
    assert (decode.error, decode.num_computed_here) == (None, 0)
    until_free(producer)


def test_a_request_that_runs_without_its_hand_off_gives_it_up(make_engine: MakeEngine) -> None:
    """As when every prompt position's logits are wanted: then nothing may be loaded."""
    producer, consumer = make_pair(make_engine, "1 rank to 2")
    decode = consumed(PROMPT, producer.run(produced(PROMPT)).ticket)
    decode.asked_out = True
    consumer.run(decode)
    assert decode.num_computed_here == len(PROMPT)
    until_free(producer)
    assert producer.worker.statistics()["ended_released"] == 1


# The next turn.


@pytest.mark.parametrize("shape", SHAPES)
def test_the_decode_instance_keeps_its_blocks_for_the_next_prefill(make_engine: MakeEngine, shape: str) -> None:
    prefiller, decoder = make_pair(make_engine, shape)
    ticket = prefiller.run(produced(PROMPT)).ticket
    assert ticket is not None
    first = decoder.run(consumed(PROMPT, {**ticket, "keep_for_next_turn": True}))
    until_free(prefiller)
    assert decoder.held
    assert first.ticket is not None
    assert first.ticket["do_remote_decode"]

    followed = [*PROMPT, *range(7)]
    hand_off = parse_hand_off({**first.ticket, "transfer_id": "t2"}, "x")
    assert isinstance(hand_off, Produce)
    second = prefiller.run(FakeRequest("second", followed, hand_off))
    assert (second.error, second.num_computed_here) == (None, 7)
    until_free(decoder)
    last = decoder.run(consumed(followed, second.ticket, "t2"))
    assert (last.error, last.num_computed_here) == (None, 0)
    until_free(prefiller)


@pytest.mark.parametrize("num_common", [0, 1, 3, 10, 18, 19])
def test_a_next_turn_fetches_only_what_is_the_same(make_engine: MakeEngine, num_common: int) -> None:
    prefiller, decoder = make_pair(make_engine, "block size 8 to 2")
    ticket = prefiller.run(produced(PROMPT)).ticket
    assert ticket is not None
    kept = decoder.run(consumed(PROMPT, {**ticket, "keep_for_next_turn": True})).ticket
    until_free(prefiller)
    followed = [*PROMPT[:num_common], *range(30)]
    hand_off = parse_hand_off({**(kept or {}), "transfer_id": "t2"}, "x")
    second = prefiller.run(FakeRequest("second", followed, hand_off))
    assert second.error is None
    assert len(followed) - num_common <= second.num_computed_here <= len(followed) - num_common + 1 + len(PROMPT) // 16
    until_free(decoder)
    prefiller.scheduler.release("t2")


def test_who_may_have_no_ticket_gets_none(make_engine: MakeEngine) -> None:
    prefiller, decoder = make_pair(make_engine, "2 ranks to 2", bidirectional_kv_xfer=True)
    ticket = prefiller.run(produced(PROMPT)).ticket
    decode = decoder.run(consumed(PROMPT, {**ticket, "keep_for_next_turn": False}))
    assert decode.ticket is None
    assert not decoder.held


def test_nothing_is_kept_of_an_answer_that_broke_off(make_engine: MakeEngine) -> None:
    prefiller, decoder = make_pair(make_engine, "2 ranks to 2", bidirectional_kv_xfer=True)
    ticket = prefiller.run(produced(PROMPT)).ticket
    decode = decoder.add(consumed([*PROMPT, 1, 2, 3], ticket))
    decoder.run_until(lambda: decode.state == "running")
    decoder.abort(decode)
    assert not decoder.held
    assert decode.ticket is None


def test_kept_blocks_are_bounded_and_end_by_time(make_engine: MakeEngine) -> None:
    layout = make_layout(2)
    bound = 8.0 * layout.block_bytes
    clock = ManualClock()
    options: dict[str, Any] = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": LONG_S, "lease_s": 2 * LONG_S}
    prefiller = make_engine("P2pConnector", clock=clock, **options)
    decoder = make_engine("P2pConnector", buffer_size=bound, clock=clock, **options)
    kept = []
    for key in ("a", "b"):
        ticket = prefiller.run(produced(PROMPT, key)).ticket
        kept.append(decoder.run(consumed(PROMPT, ticket, key)).ticket)
    assert kept[0] is not None
    assert kept[1] is None, "there was no room for it"
    clock.advance(LONG_S)
    until_free(decoder)
    assert decoder.worker.statistics()["ended_expired"] == 1
    hand_off = parse_hand_off({**kept[0], "transfer_id": "late"}, "x")
    late = prefiller.run(FakeRequest("late", [*PROMPT, 5], hand_off))
    assert isinstance(late.error, LeaseEnded)
    assert late.num_computed_here == len(PROMPT) + 1
    prefiller.scheduler.release("late")


def test_a_prefill_that_is_aborted_while_it_fetches(make_engine: MakeEngine) -> None:
    prefiller, decoder = make_pair(make_engine, "1 rank to 2")
    ticket = prefiller.run(produced(PROMPT)).ticket
    assert ticket is not None
    kept = decoder.run(consumed(PROMPT, {**ticket, "keep_for_next_turn": True})).ticket
    hand_off = parse_hand_off({**(kept or {}), "transfer_id": "t2"}, "x")
    request = prefiller.add(FakeRequest("second", [*PROMPT, 5], hand_off))
    assert prefiller.scheduler.match(request, 0) == Hit(len(PROMPT))
    prefiller.step()
    prefiller.abort(request)
    until_free(prefiller)
    until_free(decoder)


# Checksums.


@pytest.fixture
def flipped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Transports that change a bit of whatever they read, the first `flipped[0]` times."""
    left = [10**9]

    async def read_wrongly(read: Callable[[], Awaitable[None]], memory: BlockMemory, local: Sequence[Span]) -> None:
        await read()
        if left[0] > 0:
            left[0] -= 1
            [address] = memory.map.locate(*columns(local[:1]))
            MEMORY[address] ^= 4
        await asyncio.sleep(0)

    for name, kind in {"shm": ShmFabric, "tcp": TcpFabric}.items():
        monkeypatch.setitem(FABRICS.table, name, with_reads(kind, read_wrongly))
    return left


@pytest.mark.parametrize("extra", [{"transport": "shm", "checksum": True}, {"transport": "tcp"}], ids=["asked", "tcp"])
@pytest.mark.parametrize("shape", ["block size 8 to 2", "2 ranks to 1", "1 rank to 2", "2 ranks to 2"])
def test_a_bit_that_flips_on_the_way_is_noticed(
    make_engine: MakeEngine, shape: str, extra: dict[str, Any], flipped: list[int]
) -> None:
    producer, consumer = make_pair(make_engine, shape, **extra)
    decode = consumer.run(consumed(PROMPT, producer.run(produced(PROMPT)).ticket))
    assert isinstance(decode.error, ChecksumMismatch)
    assert decode.num_computed_here == len(PROMPT)
    assert sum(worker.statistics().get("mismatches", 0) for worker in consumer.workers) > 0
    until_free(producer)
    flipped[0] = 0
    again = consumer.run(consumed(PROMPT, producer.run(produced(PROMPT, "u")).ticket, "u"))
    assert again.error is None


@pytest.mark.parametrize("extra", [{"transport": "shm"}, {"transport": "tcp", "checksum": False}], ids=["shm", "off"])
def test_without_checksums_it_is_not(make_engine: MakeEngine, extra: dict[str, Any], flipped: list[int]) -> None:
    theirs, ours = SHAPES["2 ranks to 1"]
    producer = make_engine("P2pConnector", layout=theirs, lease_s=LONG_S, **extra)
    with (
        closing(FakeEngine("P2pConnector", ours, **extra)) as consumer,
        pytest.raises(AssertionError, match="is wrong"),
    ):
        consumer.run(consumed(PROMPT, producer.run(produced(PROMPT)).ticket))


# x prefill and y decode instances.


def test_any_prefill_instance_to_any_decode_instance_that_come_and_go(make_engine: MakeEngine) -> None:
    layouts = [ONE, sharded(ONE, 2), make_layout(2, 8)]
    prefillers = [make_engine("P2pConnector", layout=layout, lease_s=LONG_S) for layout in layouts]
    decoders = [make_engine("P2pConnector", layout=layout) for layout in reversed(layouts)]

    def serve(prefiller: FakeEngine, decoder: FakeEngine, key: str) -> FakeRequest:
        ticket = prefiller.run(produced([*PROMPT, len(key)], key)).ticket
        return decoder.run(consumed([*PROMPT, len(key)], ticket, key))

    for round_number in range(2):
        for p, prefiller in enumerate(prefillers):
            for d, decoder in enumerate(decoders):
                assert serve(prefiller, decoder, f"{round_number}-{p}-{d}").error is None
    with closing(FakeEngine("P2pConnector", ONE)) as leaving:
        ticket = leaving.run(produced(PROMPT, "gone")).ticket
    left = decoders[0].run(consumed(PROMPT, ticket, "gone"))
    assert isinstance(left.error, PeerLost)
    newcomer = make_engine("P2pConnector", layout=sharded(ONE, 2))
    for d, decoder in enumerate(decoders):
        assert serve(newcomer, decoder, f"new-{d}").error is None
        assert serve(prefillers[1], decoder, f"old-{d}").error is None
