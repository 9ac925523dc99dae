"""Several scheduler sides as one: which loads, which hands off, and which is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeRequest
from kv_support import make_layout
from several import HAND_OFF, PROMPT, MakeEngine, consumed, memory, settle, storage

from kvferry.connectors.api import Hit, Miss, Pending, ServesPeers
from kvferry.connectors.registry import find_connector
from kvferry.core.errors import ConnectorLost, StoreError
from kvferry.core.messages.hand_off import Produce, Ticket
from kvferry.core.messages.instance_facts import TicketKinds
from kvferry.core.settings.transfer_config import KVTransferConfig


@pytest.fixture
def make(make_engine: MakeEngine) -> MakeEngine:
    def make(role: str, *children: dict[str, Any], **options: Any) -> FakeEngine:
        return make_engine("MultiConnector", role, connectors=list(children), **options)

    return make


@pytest.mark.parametrize("order", [0, 1])
def test_a_hand_off_and_a_cache_in_both_roles(make: MakeEngine, order: int) -> None:
    children = [HAND_OFF, memory("both")]
    children = children[::-1] if order else children
    producer, consumer = make("kv_producer", *children), make("kv_consumer", *children)
    prefill = producer.run(FakeRequest("p", PROMPT, Produce("t")))
    decode = consumer.run(consumed(PROMPT, prefill.ticket))
    assert (decode.error, decode.num_computed_here) == (None, 0)
    producer.run_until(lambda: not producer.held)
    settle(producer, 1 - order)
    again = producer.run(FakeRequest("p2", [*PROMPT, 7, 8], Produce("t2")))
    assert again.num_computed_here == len(PROMPT) + 2 - 16, "the rest came from host memory"
    decode = consumer.run(consumed([*PROMPT, 7, 8], again.ticket, "d2"))
    assert decode.error is None
    consumer.require_right(decode)
    producer.run_until(lambda: not producer.held)


def test_what_stores_take_of_a_hand_off_is_told_to_the_one_that_hands_off(
    make: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other has fewer stores."""
    tiers = {"store": [f"file:{tmp_path}/a", f"file:{tmp_path}/b"]}
    children = [{"kv_connector": "KVStoreConnector", "kv_connector_extra_config": tiers}, memory("told")]
    producer, consumer = make("kv_producer", *children), make("kv_consumer", *children)
    for name in ("a", "b"):
        prefill = producer.run(FakeRequest(name, PROMPT, Produce(name)))
        assert consumer.run(consumed(PROMPT, prefill.ticket, name)).error is None
        producer.run_until(producer.worker.children[0].is_flushed)
    producer.run_until(lambda: producer.scheduler.stores_take_kv() and not producer.held)
    again = producer.run(FakeRequest("c", PROMPT, Produce("c")))
    assert again.ticket is not None
    assert len(again.ticket["remote_stores"]) == 2
    assert "failed" not in caplog.text


def test_prefills_that_a_cache_loads_wait_while_too_much_is_held(make: MakeEngine, tmp_path: Path) -> None:
    prompts = [[number, *PROMPT] for number in range(4)]
    filler = make("kv_both", storage(tmp_path))
    for number, prompt in enumerate(prompts):
        filler.run(FakeRequest(f"f{number}", prompt))
    settle(filler, 0)
    bound = 6.0 * filler.layout.block_bytes  # one prompt has five blocks
    producer = make("kv_producer", HAND_OFF, storage(tmp_path), buffer_size=bound)
    consumer = make("kv_consumer", HAND_OFF)
    requests = [producer.add(FakeRequest(f"p{n}", prompt, Produce(f"t{n}"))) for n, prompt in enumerate(prompts)]
    for number, request in enumerate(requests):

        def is_done(request: FakeRequest = request) -> bool:
            admitted = [other for other in requests if other.state in ("loading", "running")]
            assert len(admitted) + len(producer.held) <= 1
            return request.state == "done" and not producer.scheduler.has_work()

        producer.run_until(is_done)
        assert request.num_computed_here < len(request.prompt_token_ids), "the cache had the rest"
        decode = consumer.run(consumed(prompts[number], request.ticket, f"d{number}"))
        assert (decode.error, decode.num_computed_here) == (None, 0)
        producer.run_until(lambda: not producer.held)
    assert producer.worker.statistics().get("0_ended_full", 0) == 0


def test_both_sides_agree_on_the_one_that_hands_off(make: MakeEngine, tmp_path: Path) -> None:
    for children, chosen in (
        ([storage(tmp_path), HAND_OFF], 1),
        ([HAND_OFF, HAND_OFF], 0),
        ([storage(tmp_path)] * 2, None),
    ):
        engine = make("kv_both", *children)
        child = engine.worker.children[chosen or 0]
        address = child.address() if isinstance(child, ServesPeers) else None
        assert engine.worker.address() == (None if chosen is None else address)
        assert engine.scheduler.tickets().writes == engine.scheduler.children[chosen or 0].tickets().writes
        ticket = engine.run(FakeRequest("a", PROMPT, Produce("t"))).ticket
        assert ticket is not None
        if address is not None:
            assert ticket["remote_port"] == address["port"]
            engine.scheduler.release("t")
            while engine.held:
                engine.step()


def test_the_tickets_that_it_writes_are_of_one_and_those_that_it_reads_of_all(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))

    def kinds(*children: dict[str, Any]) -> TicketKinds:
        return make("kv_both", *children).scheduler.tickets()

    store = storage(tmp_path)
    kept = kinds(store).writes
    assert kept is not None
    assert kept[0].startswith("store: ")
    alone = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": "dict_store:DictStore"}}
    assert kinds(HAND_OFF) == TicketKinds(writes=("p2p",), reads=("p2p",))
    assert kinds(store, HAND_OFF) == TicketKinds(writes=("p2p",), reads=("p2p", *kept))
    assert kinds(store, store) == TicketKinds(writes=kept, reads=kept)
    # The first hands nothing off, but D finds what the other has kept.
    assert kinds(alone, store) == TicketKinds(writes=None, reads=kept)
    folder = {
        "kv_connector": "folder_connector:FolderConnector",
        "kv_connector_extra_config": {"folder": str(tmp_path)},
    }
    assert kinds(store, folder) == TicketKinds(writes=("folder",), reads=("folder", *kept))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("num_tokens", [len(PROMPT), 3])
def test_a_ticket_of_a_store_goes_to_the_store(
    make: MakeEngine, tmp_path: Path, order: int, num_tokens: int, early: bool
) -> None:
    """Even of a prompt without a full block; and the marker is removed when something was loaded."""
    children = [HAND_OFF, storage(tmp_path)][::order]
    producer = make("kv_producer", storage(tmp_path))
    consumer = make("kv_consumer", *children, policy="fail")
    ticket = producer.run(FakeRequest("p", PROMPT[:num_tokens], Produce("t"))).ticket
    settle(producer, 0)
    assert ticket is not None
    decode = consumer.run(consumed(PROMPT[:num_tokens], Ticket(transfer_id="t").to_params() if early else ticket))
    assert (decode.error, decode.num_computed_here) == (None, num_tokens % 4)
    assert decode.prefill_result is not None
    if early or num_tokens > 3:
        consumer.run_until(lambda: not [*(tmp_path / "notes").glob("*.note")])
    own = make("kv_producer", *children)
    beside = own.run(FakeRequest("q", PROMPT, Produce("u")))
    assert consumer.run(consumed(PROMPT, beside.ticket, "e")).error is None
    own.run_until(lambda: not own.held)


def test_the_one_that_has_the_most_loads(make: MakeEngine, tmp_path: Path) -> None:
    short = make("kv_both", storage(tmp_path / "a"))
    short.run(FakeRequest("a", PROMPT[:9]))
    settle(short, 0)
    long = make("kv_both", storage(tmp_path / "b"))
    long.run(FakeRequest("b", PROMPT))
    settle(long, 0)
    both = make("kv_both", storage(tmp_path / "a"), storage(tmp_path / "b"))
    request = both.run(FakeRequest("c", PROMPT))
    assert (request.error, request.num_computed_here) == (None, 3)
    both.require_right(request)
    assert both.worker.statistics()["1_loads"] == 1
    settle(both, 0)
    assert len(list((tmp_path / "a").rglob("*.kv"))) == 4, "it saves to all"


def test_one_that_is_lost_takes_no_request_along(make: MakeEngine, tmp_path: Path) -> None:
    engine = make("kv_both", storage(tmp_path / "a"), storage(tmp_path / "b"))
    engine.run(FakeRequest("a", PROMPT))
    settle(engine, 0)
    settle(engine, 1)
    lost = engine.worker.children[0]

    def poll() -> list[Any]:
        raise ConnectorLost("gone")

    lost.poll = poll
    request = engine.run(FakeRequest("b", PROMPT))
    engine.require_right(request)
    request = engine.run(FakeRequest("c", PROMPT))
    engine.require_right(request)
    assert engine.worker.lost == {0}


def test_one_that_is_lost_is_not_asked_any_more(make: MakeEngine, tmp_path: Path) -> None:
    engine = make("kv_both", storage(tmp_path / "a"), storage(tmp_path / "b"))
    engine.run(FakeRequest("a", PROMPT))
    settle(engine, 0)
    settle(engine, 1)

    def poll() -> list[Any]:
        raise StoreError("gone")

    engine.worker.children[0].poll = poll
    engine.require_right(engine.run(FakeRequest("b", PROMPT)))

    def asked(*arguments: Any) -> None:
        raise AssertionError("it is lost")

    engine.scheduler.children[0].match = engine.scheduler.children[0].arrived = asked
    request = engine.run(FakeRequest("c", PROMPT))
    assert (request.error, request.num_computed_here) == (None, 3), "the other had it"
    engine.require_right(request)


@pytest.mark.parametrize("stumbles", ["poll", "start", "flush"])
def test_an_instance_whose_hand_offs_are_lost_ends(tmp_path: Path, stumbles: str) -> None:
    """Whatever it stumbled over: its tickets would lead nowhere."""
    engine = FakeEngine("MultiConnector", make_layout(num_layers=2), connectors=[storage(tmp_path), HAND_OFF])

    def stumble(*arguments: Any) -> Any:
        raise ConnectorLost("gone") if stumbles == "poll" else StoreError("a mistake")

    setattr(engine.worker.children[1], stumbles, stumble)
    engine.add(FakeRequest("p", PROMPT, Produce("t")))
    with pytest.raises(ConnectorLost):
        engine.run_until(lambda: False)
    engine.close()


def test_one_that_stumbles_in_the_scheduler_is_left_out(make: MakeEngine, tmp_path: Path) -> None:
    engine = make("kv_both", storage(tmp_path / "a"), storage(tmp_path / "b"))
    engine.run(FakeRequest("a", PROMPT))
    settle(engine, 1)

    def match(*arguments: Any) -> Miss:
        raise StoreError("broken")

    engine.scheduler.children[0].match = match
    request = engine.run(FakeRequest("b", PROMPT))
    assert (request.error, request.num_computed_here) == (None, 3), "the other had it"
    engine.require_right(request)


def test_one_that_is_slow_is_not_waited_for_when_another_has_it(make: MakeEngine, tmp_path: Path) -> None:
    engine = make("kv_both", storage(tmp_path / "a"), storage(tmp_path / "b"))
    engine.run(FakeRequest("a", PROMPT))
    settle(engine, 1)
    engine.scheduler.children[0].match = lambda request, num_computed_tokens: Pending()
    request = engine.run(FakeRequest("b", PROMPT))
    assert (request.error, request.num_computed_here) == (None, 3)


def test_nobody_loads_layer_by_layer_beside_others(
    make: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever connector says that it would: the others would take what the model computes on a load that fails."""
    engine = make("kv_both", storage(tmp_path / "a"), storage(tmp_path / "b"))
    engine.scheduler.children[0].match = lambda request, num_computed_tokens: Hit(16, layerwise=True)
    request = engine.run(FakeRequest("a", PROMPT))
    assert (request.error, request.num_computed_here) == (None, len(PROMPT))
    engine.require_right(request)
    assert "layerwise loads" in caplog.text


def test_requests_that_end_while_they_wait_or_load(make: MakeEngine, tmp_path: Path) -> None:
    engine = make("kv_both", HAND_OFF, storage(tmp_path))
    engine.run(FakeRequest("a", PROMPT))
    settle(engine)
    waiting = engine.add(FakeRequest("b", PROMPT))
    engine.abort(waiting)
    loading = engine.add(FakeRequest("c", PROMPT))
    engine.run_until(lambda: loading.state != "waiting")
    if loading.state not in ("done", "aborted"):
        engine.abort(loading)
    engine.run_until(lambda: not engine.held and not engine.scheduler.has_work())


def test_lossy_kv_is_handed_off_where_that_is_allowed() -> None:
    extra = {"connectors": [HAND_OFF, storage(Path("/y?codec=int4"))], "hand_off_lossy": True}
    config = KVTransferConfig(kv_connector="MultiConnector", kv_connector_extra_config=extra)
    find_connector(config).check(config)
