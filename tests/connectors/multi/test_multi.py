"""Several connectors at once, on engines without a model: a hand-off, with host memory behind, in both roles."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeRequest
from kv_support import make_layout

from kvferry.connectors.api import Hit, Miss
from kvferry.connectors.kv_store.load_policy import LoadPolicy
from kvferry.connectors.multi.settings import child_configs
from kvferry.connectors.registry import find_connector
from kvferry.core.errors import ConfigError, ConnectorLost, LeakError, StoreError
from kvferry.core.messages.hand_off import Consume, Produce, Ticket, parse_hand_off
from kvferry.core.messages.instance_facts import TicketKinds
from kvferry.core.settings.transfer_config import KVTransferConfig

MakeEngine = Callable[..., FakeEngine]
PROMPT = list(range(100, 119))
HAND_OFF = {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"transport": "shm"}}

BY_LAYERS = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": "file:/x", "load": "layerwise"}}


def storage(folder: Path, **more: Any) -> dict[str, Any]:
    return {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": f"file:{folder}"}, **more}


def memory(name: str) -> dict[str, Any]:
    extra = {"num_cpu_blocks": 64, "block_size": 8, "eviction_policy": "s3fifo"}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.fixture
def make(make_engine: MakeEngine) -> MakeEngine:
    def make(role: str, *children: dict[str, Any], **options: Any) -> FakeEngine:
        return make_engine("MultiConnector", role, connectors=list(children), **options)

    return make


def settle(engine: FakeEngine, index: int = 1) -> None:
    """Until all that was saved is in that one's store."""
    engine.run_until(engine.worker.children[index].is_flushed)


def consumed(tokens: Sequence[int], ticket: dict[str, Any] | None, name: str = "d") -> FakeRequest:
    hand_off = parse_hand_off(ticket, name)
    assert isinstance(hand_off, Consume)
    request = FakeRequest(name, list(tokens), hand_off)
    request.prefill_result = hand_off.ticket.prefill_result
    return request


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


SILENT = """
from folder_connector import *

class SilentScheduler(SchedulerSide[FolderPlan]):
    # None of the classes beside `SchedulerSide`.

    def __init__(self, context):
        super().__init__(context)
        self._side = FolderSchedulerSide(context)
        for name in ("match", "allocated", "plan", "completed", "finish", "has_work"):
            setattr(self, name, getattr(self._side, name))

    match = allocated = plan = completed = finish = None

Silent = ConnectorSpec(
    "silent:SilentScheduler", "folder_connector:FolderWorkerSide", 2, options="folder_connector:FolderOptions"
)
"""


@pytest.mark.parametrize("connector", ["folder_connector:FolderConnector", "silent:Silent"])
@pytest.mark.parametrize("order", [1, -1])
def test_another_package_s_connector_hands_off(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connector: str, order: int
) -> None:
    """Wherever it is in the list, with the role of the instance, also if it does not say that it does."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "silent.py").write_text(SILENT)
    for name in ("folder_connector", "silent"):
        sys.modules.pop(name, None)
    folder = {"kv_connector": connector, "kv_connector_extra_config": {"folder": str(tmp_path)}}
    children = [memory("both"), folder][::order]
    config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_producer", kv_connector_extra_config={"connectors": children}
    )
    assert [child.kv_role for child in child_configs(config)] == ["kv_both", "kv_producer"][::order]
    producer, consumer = make("kv_producer", *children), make("kv_consumer", *children)
    prefill = producer.run(FakeRequest("p", PROMPT, Produce("t")))
    assert prefill.ticket is not None
    decode = consumer.run(consumed(PROMPT, prefill.ticket))
    assert (decode.error, decode.num_computed_here) == (None, 0)
    consumer.require_right(decode)


def test_both_sides_agree_on_the_one_that_hands_off(make: MakeEngine, tmp_path: Path) -> None:
    for children, chosen in (
        ([storage(tmp_path), HAND_OFF], 1),
        ([HAND_OFF, HAND_OFF], 0),
        ([storage(tmp_path)] * 2, None),
    ):
        engine = make("kv_both", *children)
        assert engine.scheduler._index == (chosen or 0)
        assert engine.worker._hands_off == chosen


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


@pytest.mark.parametrize(
    ("of_all", "of_one", "writes", "reads"),
    [
        ("kv_producer", {}, ("p2p",), ()),
        ("kv_consumer", {}, (), ("p2p", "store")),
        ("kv_both", {"kv_role": "kv_producer"}, ("p2p",), ("store",)),
        ("kv_both", {"kv_role": "kv_consumer"}, (), ("p2p", "store")),
    ],
)
def test_its_tickets_are_those_that_roles_allow(
    make: MakeEngine, tmp_path: Path, of_all: str, of_one: dict[str, Any], writes: tuple[str], reads: tuple[str]
) -> None:
    kinds = make(of_all, HAND_OFF | of_one, storage(tmp_path)).scheduler.tickets()
    assert kinds.writes == writes
    assert tuple(one.partition(":")[0] for one in kinds.reads) == reads


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


def test_one_that_is_long_in_closing_holds_nobody_up(make: MakeEngine, tmp_path: Path) -> None:
    """But for the blocks that it may still write to."""
    engine = make("kv_both", storage(tmp_path / "a"), storage(tmp_path / "b"))
    engine.run(FakeRequest("a", PROMPT))
    settle(engine, 0)
    settle(engine, 1)
    lost, may_end = engine.worker.children[0], threading.Event()
    close, start = lost.close, lost.start

    def close_late() -> None:
        assert may_end.wait(60)
        close()

    def begin_and_stumble(plan: Any) -> None:
        start(plan)
        raise StoreError("gone")

    lost.close, lost.start = close_late, begin_and_stumble
    request = engine.add(FakeRequest("b", PROMPT))
    engine.run_until(lambda: engine.worker.lost == {0})
    other = engine.run(FakeRequest("c", [*PROMPT[:4], *range(200, 220)]))
    engine.require_right(other)
    assert request.state == "loading"
    with pytest.raises(LeakError, match="not closed yet"):
        engine.worker.check()
    may_end.set()
    engine.run_until(lambda: request.state == "done")
    engine.require_right(request)


def test_roles_that_are_said_are_kept() -> None:
    whole = {"kv_connector": "MultiConnector", "kv_role": "kv_consumer"}
    parts = [HAND_OFF, storage(Path("/x")), storage(Path("/y"), kv_role="kv_producer")]
    config = KVTransferConfig(**whole, kv_connector_extra_config={"connectors": parts})
    assert [child.kv_role for child in child_configs(config)] == ["kv_consumer", "kv_both", "kv_producer"]
    config = KVTransferConfig(**whole, kv_connector_extra_config={"connectors": parts[1:2] * 2})
    assert [child.kv_role for child in child_configs(config)] == ["kv_consumer", "kv_both"]


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
    engine.scheduler.children[0]._prober.result = lambda request_id: None
    request = engine.run(FakeRequest("b", PROMPT))
    assert (request.error, request.num_computed_here) == (None, 3)


def test_a_load_that_fails_leaves_nothing_wrong_in_the_other_s_store(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `auto` too, where a connector alone would load layer by layer."""
    monkeypatch.setattr(LoadPolicy, "prefers_layerwise", lambda *arguments, **named: True)
    alone = make("kv_both", storage(tmp_path / "a"))
    alone.run(FakeRequest("a", PROMPT))
    settle(alone, 0)
    for path in (tmp_path / "a").rglob("*.kv"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    first = storage(tmp_path / "a")
    first["kv_connector_extra_config"]["load"] = "auto"
    both = make("kv_both", first, storage(tmp_path / "b"), chunk=100)
    request = both.run(FakeRequest("b", PROMPT))
    assert isinstance(request.error, StoreError), "the damage showed"
    settle(both, 1)
    other = make("kv_both", storage(tmp_path / "b"))
    again = other.run(FakeRequest("c", PROMPT))
    assert (again.error, again.num_computed_here) == (None, 3)
    other.require_right(again)


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


def test_each_one_measures_how_fast_the_model_is(make: MakeEngine, tmp_path: Path) -> None:
    """Nothing is loaded meanwhile: a step is told to each, though nothing happened in it."""
    engine = make("kv_both", HAND_OFF, storage(tmp_path / "a"), storage(tmp_path / "b"))
    engine.run(FakeRequest("a", PROMPT))
    said = engine.scheduler.statistics()
    assert said["1_prefill_tokens_per_s"] > 0
    assert said["2_prefill_tokens_per_s"] > 0


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


@pytest.mark.parametrize(
    ("children", "told"),
    [
        ([], "1 to 8"),
        ([{"kv_connector": "P2pConector"}], "did you mean 'P2pConnector'"),
        ([{"kv_conector": "P2pConnector"}], "did you mean 'kv_connector'"),
        ([{"kv_connector": "MultiConnector"}], "cannot be part of another"),
        (
            [{"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": "flie:/x"}}],
            "did you mean 'file:'",
        ),
        (
            [storage(Path("/x")), storage(Path("/y?codec=int4"))],
            "keeps KV exact and int4, .* tiers of one KVStoreConnector",
        ),
        ([HAND_OFF, BY_LAYERS], r"connectors\[1\]: load layerwise is for a connector alone"),
        ([BY_LAYERS, storage(Path("/y"))], r"connectors\[0\]: load layerwise"),
        ([HAND_OFF, storage(Path("/y?codec=int4"))], "or allow it with kv_connector_extra_config.hand_off_lossy"),
    ],
)
def test_what_is_wrong_is_told(children: list[dict[str, Any]], told: str) -> None:
    config = KVTransferConfig(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": children})
    with pytest.raises(ConfigError, match=told):
        find_connector(config).check(config)


def test_lossy_kv_is_handed_off_where_that_is_allowed() -> None:
    extra = {"connectors": [HAND_OFF, storage(Path("/y?codec=int4"))], "hand_off_lossy": True}
    config = KVTransferConfig(kv_connector="MultiConnector", kv_connector_extra_config=extra)
    find_connector(config).check(config)


def test_it_has_an_address_only_where_one_of_them_has(make: MakeEngine, tmp_path: Path) -> None:
    assert make("kv_both", HAND_OFF, storage(tmp_path)).worker.address() is not None
    assert make("kv_both", storage(tmp_path)).worker.address() is None
    assert make_layout().block_size == 4
