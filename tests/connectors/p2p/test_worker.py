"""When layers are announced: as they are saved, or, where a device still computes them, at the end of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from kv_support import BlockRegion, make_layout

from kvferry.connectors.api import ConnectorContext, Released
from kvferry.connectors.p2p import worker
from kvferry.connectors.p2p.plan import P2pPlan, Save, Seal
from kvferry.connectors.p2p.worker import P2pWorkerSide
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.transport.lookup_buffer.entries import Cursor
from kvferry.transport.lookup_buffer.messages import News

SAVE = P2pPlan(saves=[Save("t", True, 0, [3, 4])])
NUM_LAYERS = 2


@pytest.fixture(params=["host", "device"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What is called when the device is waited for, if there is one; host memory stands in for its own."""
    waits: list[Callable[[], None]] = []
    if request.param == "device":
        monkeypatch.setattr(worker, "device_wait", lambda device: lambda: [wait() for wait in waits])
        waits.append(lambda: None)
    return waits


@pytest.fixture
def side() -> Iterator[P2pWorkerSide]:
    yield from started()


@pytest.fixture
def side_of_either(device: list[Callable[[], None]]) -> Iterator[P2pWorkerSide]:
    yield from started()


def started() -> Iterator[P2pWorkerSide]:
    config = KVTransferConfig(kv_connector="P2pConnector", kv_connector_extra_config={"transport": "shm"})
    side = P2pWorkerSide(ConnectorContext(config, make_layout(NUM_LAYERS)))
    region = BlockRegion(make_layout(NUM_LAYERS), 16, seed=1)
    side.register(region.memory)
    yield side
    side.close()
    region.close()


def told(side: P2pWorkerSide) -> News | None:
    return side.table.news(Cursor("t"))


def test_layers_are_announced_when_their_kv_is_there(
    side_of_either: P2pWorkerSide, device: list[Callable[[], None]]
) -> None:
    side = side_of_either
    seen: list[tuple[str, list[int]]] = []

    def note(what: str) -> None:
        news = told(side)
        seen.append((what, [part.first_layer for part in news.parts] if news is not None else []))

    if device:
        device.append(lambda: note("device"))
    side.start(SAVE)
    note("started")
    for layer in range(NUM_LAYERS):
        side.save_layer(layer)
        note(f"saved {layer}")
    side.flush()
    note("flushed")
    side.save_layer(0)
    side.flush()
    note("no more")
    after = [("flushed", [0, 1]), ("no more", [0, 1])]
    if device:
        assert seen == [("started", []), ("saved 0", []), ("saved 1", []), ("device", []), *after]
    else:
        assert seen == [("started", []), ("saved 0", [0]), ("saved 1", [0, 1]), *after]
    side.table.drop("t")


@pytest.mark.parametrize("is_told", [False, True])
def test_a_step_that_broke_off_hands_nothing_off(side_of_either: P2pWorkerSide, is_told: bool) -> None:
    side = side_of_either
    side.start(SAVE)
    side.save_layer(0)
    if is_told:
        side.discard()
    else:
        side.start(P2pPlan())
    for layer in range(NUM_LAYERS):
        side.save_layer(layer)
    side.flush()
    assert told(side) == News(0, -1, over="dropped")


def test_a_hand_off_that_cannot_be_begun_is_over_for_its_consumer(side: P2pWorkerSide) -> None:
    side.table.open = fails  # type: ignore[method-assign]
    side.start(SAVE)
    assert told(side) == News(0, -1, over="dropped")


def fails(*arguments: object) -> bool:
    raise RuntimeError("no room for the key's record")


def test_blocks_of_a_request_that_is_over_are_announced_at_once(side: P2pWorkerSide) -> None:
    side.start(P2pPlan(seals=[Seal("t", "r", b"meta", [3, 4], 480.0)]))
    news = told(side)
    assert news is not None
    assert [part.block_ids for part in news.parts] == [[3, 4]]
    assert news.meta == b"meta"
    assert side.table._entries["t"].lease_s == 480.0
    side.table.release("t")
    assert side.poll() == [Released("r")]
    side.check()
