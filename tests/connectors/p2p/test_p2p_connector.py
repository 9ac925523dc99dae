"""The P2P connector between engines without a model, in one process and in two."""

import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import pytest
from fake_engine import FakeEngine, FakeRequest, ProducerEngine, consumed, produced
from hooked_fabric import with_reads
from kv_support import BlockRegion, make_layout

from kvferry.connectors.api import ConnectorContext, Hit, Miss, Pending
from kvferry.connectors.p2p.plan import P2pPlan, Save
from kvferry.connectors.p2p.scheduler import P2pSchedulerSide
from kvferry.connectors.p2p.worker import P2pWorkerSide
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import (
    AuthenticationFailed,
    ConfigError,
    LayoutMismatch,
    LeaseEnded,
    PeerLost,
    ProtocolError,
    TransferTimeout,
)
from kvferry.core.messages.hand_off import Consume, Produce
from kvferry.core.messages.ticket_seal import TicketSealer
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.testing import stepping
from kvferry.transport.fabric.base import FABRICS
from kvferry.transport.fabric.shm import ShmFabric
from kvferry.transport.memory import BlockMemory
from support.eager_p2p import EagerWorkerSide
from support.waiting import eventually

MakeEngine = Callable[..., FakeEngine]
PROMPT = list(range(100, 119))
TOKEN = "secret"


@pytest.fixture(params=["shm", "tcp", "gloo"])
def pair(request: pytest.FixtureRequest, make_engine: MakeEngine) -> tuple[FakeEngine, FakeEngine]:
    """P and D."""
    extra = {"transport": request.param}
    return (
        make_engine("P2pConnector", "kv_producer", **extra),
        make_engine("P2pConnector", "kv_consumer", **extra),
    )


def make_pair(make_engine: MakeEngine, **options: object) -> tuple[FakeEngine, FakeEngine]:
    options = {"transport": "shm"} | options
    return make_engine("P2pConnector", "kv_producer", **options), make_engine("P2pConnector", "kv_consumer", **options)


def early_ticket(producer: FakeEngine, key: str = "t") -> dict[str, object]:
    """What a router knows before the prefill."""
    return stepping.early_ticket(key, producer.addresses, producer.scheduler).to_params()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 17])
def test_prefill_then_decode(pair: tuple[FakeEngine, FakeEngine], num_tokens: int) -> None:
    producer, consumer = pair
    prefill = producer.run(produced(PROMPT[:num_tokens]))
    assert prefill.ticket is not None
    assert json.loads(json.dumps(prefill.ticket)) == prefill.ticket
    assert prefill.ticket["remote_num_tokens"] == num_tokens
    decode = consumer.run(consumed(PROMPT[:num_tokens], prefill.ticket))
    assert (decode.state, decode.error, decode.num_computed_here) == ("done", None, 0)
    consumer.require_right(decode)
    producer.run_until(lambda: not producer.held)
    assert decode.prefill_result == prefill.prefill_result


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 100])
def test_prefill_and_decode_at_the_same_time(pair: tuple[FakeEngine, FakeEngine], chunk: int) -> None:
    producer, consumer = pair
    producer.chunk = chunk
    decode = consumer.add(consumed(PROMPT, early_ticket(producer)))
    consumer.step()
    assert decode.state == "loading"
    prefill = producer.run(produced(PROMPT))
    producer.step()
    consumer.run_until(lambda: decode.state == "done")
    consumer.require_right(decode)
    assert decode.prefill_result == prefill.prefill_result
    assert (decode.error, decode.num_computed_here) == (None, 0)


def test_layers_arrive_before_the_prefill_is_done(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine, build_worker=EagerWorkerSide)
    decode = consumer.add(consumed(PROMPT, early_ticket(producer)))
    consumer.step()
    prefill = producer.add(produced(PROMPT))
    producer.step()
    assert prefill.num_computed == 8

    def two_blocks_have_come() -> bool:
        return all(
            consumer.has_block(PROMPT, layer, decode.block_ids[index], index)
            for layer in range(2)
            for index in range(2)
        )

    consumer.run_until(two_blocks_have_come)
    assert decode.state == "loading"
    producer.run_until(lambda: prefill.state == "done")
    producer.step()
    consumer.run_until(lambda: decode.state == "done")
    consumer.require_right(decode)


@pytest.mark.parametrize("lost", [False, True])
def test_the_first_token_comes_before_the_kv(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    go_on = threading.Event()

    async def read_late(read: Callable[[], Awaitable[None]], *_: object) -> None:
        await eventually(go_on.is_set, interval_s=0.001)
        if lost:
            raise PeerLost("gone")
        await read()

    monkeypatch.setitem(FABRICS.table, "shm", with_reads(ShmFabric, read_late))
    producer, consumer = make_pair(make_engine)
    decode = consumer.add(consumed(PROMPT, early_ticket(producer)))
    consumer.step()
    prefill = producer.run(produced(PROMPT))
    producer.step()
    consumer.run_until(lambda: decode.prefill_result is not None)
    assert decode.prefill_result == prefill.prefill_result
    assert decode.state == "loading"
    go_on.set()
    consumer.run_until(lambda: decode.state == "done")
    consumer.require_right(decode)
    assert decode.num_computed_here == (len(PROMPT) if lost else 0)
    if lost:
        producer.scheduler.release("t")


def test_the_token_of_another_prompt_is_not_given_out(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine)
    decode = consumer.add(consumed([*PROMPT[:-1], 999], early_ticket(producer)))
    consumer.step()
    prefill = producer.run(produced(PROMPT))
    producer.step()
    consumer.run_until(lambda: decode.state == "done")
    assert isinstance(decode.error, ProtocolError)
    assert decode.prefill_result != prefill.prefill_result
    assert not consumer.worker.statistics().get("taken"), "what is not used counts as failed only"


def test_many_hand_offs_in_any_order(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine)
    prompts = {f"t{index}": [index * 7 + offset for offset in range(3 + index)] for index in range(10)}
    decodes = [consumer.add(consumed(prompts[key], early_ticket(producer, key), key)) for key in reversed(prompts)]
    consumer.step()
    prefills = [producer.add(produced(tokens, key)) for key, tokens in prompts.items()]
    producer.run_until(lambda: all(prefill.state == "done" for prefill in prefills))
    producer.step()
    consumer.run_until(lambda: all(decode.state == "done" for decode in decodes))
    for decode in decodes:
        assert decode.error is None
        consumer.require_right(decode)


def test_the_decode_instance_s_own_prefix_is_not_fetched(pair: tuple[FakeEngine, FakeEngine]) -> None:
    producer, consumer = pair
    prefill = producer.run(produced(PROMPT))
    decode = consumer.run(consumed(PROMPT, prefill.ticket, cached=[40, 20]))
    consumer.require_right(decode)
    statistics = consumer.worker.statistics()
    num_bytes = sum(value for name, value in statistics.items() if name.startswith("taken_bytes"))
    assert num_bytes == 3 * consumer.layout.block_bytes


def test_all_of_the_prompt_is_cached_on_the_decode_instance(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine)
    prefill = producer.run(produced(PROMPT[:8]))
    decode = consumer.run(consumed(PROMPT[:8], prefill.ticket, cached=[40, 20]))
    assert (decode.error, decode.num_computed_here) == (None, 0)
    producer.run_until(lambda: not producer.held)


def test_the_prefill_instance_s_own_prefix_is_handed_off_too(pair: tuple[FakeEngine, FakeEngine]) -> None:
    producer, consumer = pair
    request = produced(PROMPT)
    request.cached = [30, 31, 50]
    prefill = producer.run(request)
    assert prefill.num_computed_here == len(PROMPT) - 12
    decode = consumer.run(consumed(PROMPT, prefill.ticket))
    consumer.require_right(decode)


def test_a_preempted_prefill_is_handed_off_from_its_new_blocks(pair: tuple[FakeEngine, FakeEngine]) -> None:
    producer, consumer = pair
    decode = consumer.add(consumed(PROMPT, early_ticket(producer)))
    consumer.step()
    prefill = producer.add(produced(PROMPT))
    producer.step()
    producer.step()
    producer.preempt(prefill)
    producer.free.reverse()
    producer.run_until(lambda: prefill.state == "done")
    producer.step()
    consumer.run_until(lambda: decode.state == "done")
    assert (decode.error, decode.num_computed_here) == (None, 0)
    consumer.require_right(decode)


@pytest.mark.parametrize("chunk", [4, 100])
def test_blocks_that_another_request_of_the_step_computes(make_engine: MakeEngine, chunk: int) -> None:
    """They count as cached, and are not there yet. (The engine looks at all that is announced.)"""
    producer, consumer = make_pair(make_engine, chunk=chunk, build_worker=EagerWorkerSide)
    decode = consumer.add(consumed(PROMPT, early_ticket(producer)))
    consumer.step()
    first = producer.add(FakeRequest("first", PROMPT))
    sharing = FakeRequest("second", PROMPT, Produce("t"), shares=(first, min(chunk, 16) // 4))
    producer.add(sharing)
    producer.run_until(lambda: sharing.state == "done")
    producer.step()
    consumer.run_until(lambda: decode.state == "done")
    consumer.require_right(decode)
    assert (decode.error, decode.num_computed_here) == (None, 0)


@pytest.mark.parametrize("whose", ["its own", "another's"])
def test_blocks_that_are_computed_again(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    """After a load that failed: what was announced of them was worth nothing, and the consumer has read it."""
    num_reads = 0

    async def count(read: Callable[[], Awaitable[None]], *_: object) -> None:
        nonlocal num_reads
        await read()
        num_reads += 1

    monkeypatch.setitem(FABRICS.table, "shm", with_reads(ShmFabric, count))
    producer, consumer = make_pair(make_engine, build_worker=EagerWorkerSide)
    decode = consumer.add(consumed(PROMPT, early_ticket(producer)))
    consumer.step()
    first = producer.add(FakeRequest("first", PROMPT))
    second = producer.add(FakeRequest("second", PROMPT, Produce("t"), shares=(first, 2)))
    producer.lose(**({"first": 0, "second": 8} if whose == "its own" else {"first": 0}))
    assert producer.wrongly_announced
    producer.wrongly_announced.clear()
    consumer.run_until(lambda: num_reads > 0)
    producer.run_until(lambda: (first.state, second.state) == ("done", "done"))
    consumer.run_until(lambda: decode.state == "done")
    consumer.require_right(decode)
    assert (decode.error, decode.num_computed_here) == (None, 0)


def test_a_prefill_aborted_half_way(pair: tuple[FakeEngine, FakeEngine]) -> None:
    producer, consumer = pair
    decode = consumer.add(consumed(PROMPT, early_ticket(producer)))
    consumer.step()
    prefill = producer.add(produced(PROMPT))
    producer.step()
    producer.abort(prefill)
    assert prefill.ticket is None
    producer.run_until(lambda: not producer.held)
    consumer.run_until(lambda: decode.state == "done")
    assert isinstance(decode.error, LeaseEnded)
    assert decode.num_computed_here == len(PROMPT)


@pytest.mark.parametrize("order", ["asked before", "asked after"])
@pytest.mark.parametrize("end", ["aborted", "released"])
def test_a_prefill_that_ends_before_it_began_is_heard_of(
    pair: tuple[FakeEngine, FakeEngine], end: str, order: str
) -> None:
    """Whoever waits for it need not wait until its time is over."""
    producer, consumer = pair
    decode = consumer.add(consumed(PROMPT, early_ticket(producer)))
    if order == "asked before":
        consumer.step()
        assert decode.state == "loading"
    if end == "aborted":
        producer.abort(producer.add(produced(PROMPT)))
    else:
        assert not producer.scheduler.release("t")
    producer.step()
    assert producer.held == {}
    consumer.run_until(lambda: decode.state == "done")
    assert isinstance(decode.error, LeaseEnded)
    assert decode.num_computed_here == len(PROMPT)


def test_a_release_that_overtakes_its_prefill(pair: tuple[FakeEngine, FakeEngine]) -> None:
    producer, _ = pair
    assert not producer.scheduler.release("t")
    producer.run(produced(PROMPT))
    producer.run_until(lambda: not producer.held)


def test_a_prefill_that_never_began_ends_no_other_of_its_name(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine)
    first = producer.run(produced(PROMPT))
    other = producer.add(FakeRequest("other", PROMPT, Produce("t")))
    producer.abort(other)
    producer.step()
    decode = consumer.run(consumed(PROMPT, first.ticket))
    assert decode.error is None
    producer.run_until(lambda: not producer.held)


def test_a_decode_aborted_while_it_loads(pair: tuple[FakeEngine, FakeEngine]) -> None:
    producer, consumer = pair
    decode = consumer.add(consumed(PROMPT, early_ticket(producer)))
    consumer.step()
    consumer.abort(decode)
    assert consumer.held, "it is still written to"
    prefill = producer.run(produced(PROMPT))
    consumer.run_until(lambda: not consumer.held)
    producer.run_until(lambda: not producer.held)
    assert prefill.ticket is not None


def test_a_decode_that_ends_before_it_loads_releases_the_lease(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine)
    prefill = producer.run(produced(PROMPT))
    decode = consumer.add(consumed(PROMPT, prefill.ticket))
    consumer.abort(decode)
    consumer.step()
    producer.run_until(lambda: not producer.held)
    assert producer.worker.statistics()["ended_released"] == 1


def test_a_load_and_its_cancel_in_one_step(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine)
    prefill = producer.run(produced(PROMPT))
    decode = consumer.add(consumed(PROMPT, prefill.ticket))
    consumer.admit(decode)
    assert decode.state == "loading"
    consumer.abort(decode)
    assert not consumer.held, "it was never begun, so nothing is written"
    consumer.step()
    producer.run_until(lambda: not producer.held)


def test_a_lease_ends_by_time(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine, lease_s=0.05)
    prefill = producer.run(produced(PROMPT))
    producer.run_until(lambda: not producer.held)
    assert producer.worker.statistics()["ended_expired"] == 1
    decode = consumer.run(consumed(PROMPT, prefill.ticket))
    assert isinstance(decode.error, LeaseEnded)
    assert decode.num_computed_here == len(PROMPT)
    consumer.require_right(decode)


def test_a_lease_ends_by_release(make_engine: MakeEngine) -> None:
    producer, _ = make_pair(make_engine)
    producer.run(produced(PROMPT))
    assert not producer.scheduler.release("another")
    assert producer.scheduler.release("t")
    producer.run_until(lambda: not producer.held)


def test_a_release_while_the_prefill_runs(make_engine: MakeEngine) -> None:
    producer, _ = make_pair(make_engine)
    prefill = producer.add(produced(PROMPT))
    producer.step()
    assert producer.scheduler.release("t")
    producer.run_until(lambda: prefill.state == "done")
    producer.run_until(lambda: not producer.held)


def test_nobody_prefills(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine, timeout_s=0.05)
    decode = consumer.run(consumed(PROMPT, early_ticket(producer)))
    assert isinstance(decode.error, TransferTimeout)
    consumer.require_right(decode)


@pytest.mark.parametrize(("policy", "kept"), [("recompute", False), ("fail", True)])
def test_after_a_failed_load_the_lease_is_kept_only_for_another_try(
    make_engine: MakeEngine, policy: str, kept: bool
) -> None:
    producer = make_engine("P2pConnector", "kv_producer", transport="shm")
    consumer = make_engine("P2pConnector", "kv_consumer", transport="tcp", policy=policy)
    prefill = producer.run(produced(PROMPT))
    decode = consumer.run(consumed(PROMPT, prefill.ticket))
    assert isinstance(decode.error, ConfigError)
    if kept:
        other = make_engine("P2pConnector", "kv_consumer")
        assert other.run(consumed(PROMPT, prefill.ticket)).error is None
    else:
        assert isinstance(decode.error, ConfigError)
        producer.scheduler.release("t")
    producer.run_until(lambda: not producer.held)


def test_prefills_wait_while_too_much_is_held(make_engine: MakeEngine) -> None:
    layout = make_layout(num_layers=2)
    producer, consumer = make_pair(make_engine, buffer_size=12.0 * layout.block_bytes)
    first, second, third = (producer.add(produced(PROMPT, f"t{index}")) for index in range(3))
    producer.run_until(lambda: first.state == second.state == "done")
    producer.step()
    assert third.state == "waiting"
    assert isinstance(producer.scheduler.match(third, 0), Pending)
    consumer.run(consumed(PROMPT, first.ticket, "t0"))
    producer.run_until(lambda: third.state == "done" and not producer.scheduler.has_work())
    for key, request in (("t1", second), ("t2", third)):
        consumer.run(consumed(PROMPT, request.ticket, key))


def test_one_prefill_larger_than_the_bound_is_served_alone(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine, buffer_size=1.0)
    prefill = producer.run(produced(PROMPT))
    assert consumer.run(consumed(PROMPT, prefill.ticket)).error is None


def test_two_prefills_with_one_transfer_id(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine)
    prefill = producer.run(produced(PROMPT))
    again = producer.run(FakeRequest("again", PROMPT, Produce("t")))
    assert isinstance(again.error, ProtocolError)
    assert again.ticket is None
    assert consumer.run(consumed(PROMPT, prefill.ticket)).error is None


def test_a_transfer_id_may_be_used_again_after_its_end(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine)
    for tokens in (PROMPT, PROMPT[3:]):
        prefill = producer.run(produced(tokens))
        decode = consumer.run(consumed(tokens, prefill.ticket))
        assert decode.error is None
        consumer.require_right(decode)
        producer.run_until(lambda: not producer.held)


def test_the_role_is_kept(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine)
    match = consumer.scheduler.match(produced(PROMPT), 0)
    assert isinstance(match, Miss)
    assert isinstance(match.error, ConfigError)
    assert consumer.run(produced(PROMPT)).ticket is None
    match = producer.scheduler.match(consumed(PROMPT, early_ticket(producer)), 0)
    assert isinstance(match, Miss)
    assert isinstance(match.error, ConfigError)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"remote_host": ""}, ProtocolError),
        ({"remote_port": 0}, ProtocolError),
        ({"tp_size": 2}, ProtocolError),
        ({"tp_size": 2, "remote_ranks": [["h", 5], ["h", 0]]}, ProtocolError),
        ({"tp_size": 2, "remote_ranks": [["h", 5], ["h", 6], ["h", 7]]}, ProtocolError),
        ({"remote_num_tokens": len(PROMPT) + 1}, ProtocolError),
    ],
)
def test_a_ticket_that_cannot_be_used(make_engine: MakeEngine, changes: dict[str, object], error: type) -> None:
    producer, consumer = make_pair(make_engine)
    request = consumed(PROMPT, early_ticket(producer) | changes)
    assert isinstance(request.hand_off, Consume)
    ticket = request.hand_off.ticket
    ticket.remote_address_seal = TicketSealer(TOKEN).address_seal(ticket)
    match = consumer.scheduler.match(request, 0)
    assert isinstance(match, Miss)
    assert isinstance(match.error, error)


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_host": "127.0.0.2"},
        {"remote_host": "localhost"},
        {"remote_port": 9},
        {"remote_engine_id": "another"},
        {"tp_size": 2, "remote_ranks": [["127.0.0.1", 5], ["127.0.0.1", 6]]},
        {"remote_address_seal": ""},
        {"remote_address_seal": "é"},
        {"prefill_result": {"first_token": 5}},
        {"prefill_result": {"first_token": 5}, "remote_seal": "99999999999.00"},
        {"prefill_result": {"first_token": 5}, "remote_seal": "٣.00"},
    ],
)
def test_nobody_is_connected_to_whom_the_fleet_does_not_vouch_for(
    make_engine: MakeEngine, changes: dict[str, object]
) -> None:
    producer, consumer = make_pair(make_engine)
    decode = consumer.run(consumed(PROMPT, early_ticket(producer) | changes))
    assert isinstance(decode.error, AuthenticationFailed)
    assert consumer.worker.statistics()["num_loading"] == 0
    consumer.require_right(decode)
    assert producer.worker.statistics()["open_connections"] == 0


def test_a_ticket_that_was_changed_is_not_believed(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine)
    ticket = producer.run(produced(PROMPT)).ticket
    assert ticket is not None
    for change in (
        {"transfer_id": "another"},
        {"remote_num_tokens": 3},
        {"prefill_result": {**ticket["prefill_result"], "first_token": 7}},
        {"prefill_result": {**ticket["prefill_result"], "seed": 7}},
        {"remote_seal": ticket["remote_seal"][:-1]},
    ):
        refusal = consumer.scheduler.refusal(consumed(PROMPT, ticket | change))
        assert isinstance(refusal, AuthenticationFailed), change
    assert consumer.scheduler.refusal(consumed(PROMPT, ticket)) is None
    stamped = {**ticket["prefill_result"], "timeline": {"arrived": 5.0}}
    assert consumer.scheduler.refusal(consumed(PROMPT, ticket | {"prefill_result": stamped})) is None
    assert consumer.run(consumed(PROMPT, ticket)).error is None


class SetClock:
    """The machine's time, whose wall clock somebody sets."""

    def __init__(self) -> None:
        self.set_by_s = self.passed_s = 0.0

    def monotonic(self) -> float:
        return SYSTEM_CLOCK.monotonic() + self.passed_s

    def wall(self) -> float:
        return SYSTEM_CLOCK.wall() + self.set_by_s


@pytest.mark.parametrize("set_by_s", [-3600.0, -40.0, 40.0, 3600.0])
@pytest.mark.parametrize("whose", ["P", "D", "both"])
def test_clocks_that_are_set_while_a_ticket_is_handed_over(
    make_engine: MakeEngine, whose: str, set_by_s: float
) -> None:
    """A ticket that seems too old is refused, and its prompt computed; nothing else depends on the time of day. When
    both clocks are right again, so are hand-offs. "both": the clock of one machine, between P's seal and D's look."""
    clocks = {"P": SetClock(), "D": SetClock()}
    producer = make_engine("P2pConnector", "kv_producer", transport="shm", clock=clocks["P"])
    consumer = make_engine("P2pConnector", "kv_consumer", transport="shm", clock=clocks["D"])
    if whose == "P":
        clocks["P"].set_by_s = set_by_s
    prefill = producer.run(produced(PROMPT))
    for name in clocks if whose == "both" else {"D"} & {whose}:
        clocks[name].set_by_s = set_by_s
    decode = consumer.run(consumed(PROMPT, prefill.ticket))
    seems_late_by_s = -set_by_s if whose == "P" else set_by_s
    if seems_late_by_s > 1000:
        assert isinstance(decode.error, LeaseEnded)
        assert decode.num_computed_here > 0
        assert producer.held
        clocks["P"].passed_s = 3600.0  # its lease ends, whatever the time of day
    else:
        assert (decode.error, decode.num_computed_here) == (None, 0)
    producer.run_until(lambda: not producer.held)
    consumer.require_right(decode)
    for one in clocks.values():
        one.set_by_s = 0.0
    later = producer.run(produced(PROMPT, "later"))
    decode = consumer.run(consumed(PROMPT, later.ticket, "later"))
    assert (decode.error, decode.num_computed_here) == (None, 0)
    consumer.require_right(decode)


def test_a_request_that_has_no_part_in_hand_offs(make_engine: MakeEngine) -> None:
    engine = make_engine("P2pConnector")
    request = engine.run(FakeRequest("r", PROMPT))
    assert (request.ticket, request.error) == (None, None)


def test_one_instance_may_do_both(make_engine: MakeEngine) -> None:
    engine = make_engine("P2pConnector")
    prefill = engine.run(produced(PROMPT))
    decode = engine.run(consumed(PROMPT, prefill.ticket))
    assert decode.error is None
    engine.require_right(decode)


def test_a_promised_prefix_is_counted_from_the_own_one(make_engine: MakeEngine) -> None:
    producer, consumer = make_pair(make_engine)
    request = consumed(PROMPT, early_ticket(producer))
    assert consumer.scheduler.match(request, 0) == Hit(len(PROMPT))
    assert consumer.scheduler.match(request, 8) == Hit(len(PROMPT) - 8)


def test_other_layouts_and_other_prompts_are_refused(make_engine: MakeEngine) -> None:
    producer = make_engine("P2pConnector", "kv_producer")
    prefill = producer.run(produced(PROMPT))
    other = make_engine("P2pConnector", "kv_consumer", layout=make_layout(num_layers=2, model_fingerprint="other"))
    decode = other.run(consumed(PROMPT, prefill.ticket))
    assert isinstance(decode.error, LayoutMismatch)
    assert decode.error.field == "model_fingerprint"
    consumer = make_engine("P2pConnector", "kv_consumer")
    unread = make_engine("P2pConnector", "kv_producer")  # the first hand-off was released by who could not read it
    unread.run(produced(PROMPT))
    shorter = consumer.run(consumed(PROMPT[:9], early_ticket(unread)))
    assert isinstance(shorter.error, ProtocolError)
    producer.run_until(lambda: not producer.held)
    unread.run_until(lambda: not unread.held)


# Two processes.


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_hand_offs_between_processes(make_engine: MakeEngine, transport: str) -> None:
    producer = ProducerEngine("P2pConnector", transport=transport)
    consumer = make_engine("P2pConnector", "kv_consumer")
    for index in range(3):
        tokens = PROMPT[index:]
        decode = consumer.run(consumed(tokens, producer.ask(f"t{index}", *tokens), f"t{index}"))
        assert decode.error is None
        consumer.require_right(decode)
    assert producer.end() == 0, "its own check found something left"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_prefill_instance_killed_in_the_middle(make_engine: MakeEngine, transport: str) -> None:
    producer = ProducerEngine("P2pConnector", transport=transport)
    consumer = make_engine("P2pConnector", "kv_consumer")
    ticket = stepping.early_ticket("t", [producer.address], consumer.scheduler)
    ticket.remote_address_seal = TicketSealer(TOKEN).address_seal(ticket)
    decode = consumer.add(consumed(PROMPT, ticket.to_params()))
    consumer.step()
    producer.ask("hang", "t", *PROMPT)
    consumer.run_until(lambda: consumer.has_block(PROMPT, 1, decode.block_ids[1], 1))
    assert decode.state == "loading"
    producer.kill()
    consumer.run_until(lambda: decode.state == "done")
    assert isinstance(decode.error, PeerLost)
    consumer.require_right(decode)


# What a user may get wrong.


def context(**extra: object) -> ConnectorContext:
    config = KVTransferConfig(kv_connector="P2pConnector", kv_connector_extra_config=extra)
    return ConnectorContext(config, make_layout())


@pytest.mark.parametrize("complete", [False, True])
def test_a_device_is_waited_for_unless_the_engine_has_done_so(*, complete: bool) -> None:
    """With host memory in place of a device's."""
    waits: list[str] = []

    class DeviceSide(P2pWorkerSide):
        def device_wait(self, device: str) -> Callable[[], None]:
            return lambda: waits.append(device)

    side = DeviceSide(replace(context(), saves_are_complete=complete))
    region = BlockRegion(make_layout(), 4, seed=1)
    try:
        side.register(region.memory)
        side.start(P2pPlan(saves=[Save("t", True, 0, [1])]))
        for layer in range(make_layout().num_layers):
            side.save_layer(layer)
        side.flush()
        assert waits == ([] if complete else ["cpu"])
        side.table.drop("t")
    finally:
        side.close()
        region.close()


def test_device_memory_needs_a_transport_for_it() -> None:
    side = P2pWorkerSide(context())
    memory = BlockMemory.dense(make_layout(), 4, 0, device="cuda")
    with pytest.raises(
        ConfigError, match=r"no transport can move KV in cuda memory on this machine: cuda_ipc: .*nixl: "
    ):
        side.register(memory)
    side.close()


@pytest.mark.parametrize("extra", [{"lease_s": 0}, {"lease_s": 1e12}, {"timeout_s": -1}, {"lease_s": "soon"}])
def test_times_must_be_times(extra: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(extra))):
        P2pWorkerSide(context(**extra))


def test_unknown_settings_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'transport'"):
        P2pSchedulerSide(context(transprot="tcp"))


def test_an_unknown_transport_is_refused_and_nothing_is_left(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="unknown transport"):
        make_engine("P2pConnector", transport="carrier pigeon")


def test_a_token_is_needed_beyond_loopback() -> None:
    config = msgspec.structs.replace(context().config, kv_ip="0.0.0.0")
    side = P2pWorkerSide(ConnectorContext(config, make_layout()))
    memory = BlockMemory.dense(make_layout(), 1, 0)
    with pytest.raises(ConfigError, match="token"):
        side.register(memory)


def test_the_scheduler_side_needs_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; import kvferry.connectors.p2p.scheduler"
    subprocess.run([sys.executable, "-c", script], check=True)
