"""When layers are announced: as they are saved, or, where a device still computes them, at the end of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from kv_support import BlockRegion, make_layout

from kvferry.connectors.api import ConnectorContext, Released
from kvferry.connectors.p2p.plan import P2pPlan, Save, Seal
from kvferry.connectors.p2p.worker import P2pWorkerSide
from kvferry.core.clock import SYSTEM_CLOCK, Clock, ManualClock
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.transport.lookup_buffer.entries import Cursor
from kvferry.transport.lookup_buffer.messages import KeyUpdate

SAVE = P2pPlan(saves=[Save("t", True, 0, [3, 4])])
NUM_LAYERS = 2


class DeviceSide(P2pWorkerSide):
    """On a device, for whose memory host memory stands in. `waits`: called when the device is waited for."""

    waits: list[Callable[[], None]]

    def device_wait(self, device: str) -> Callable[[], None]:
        self.waits = []

        def wait() -> None:
            for call in self.waits:
                call()

        return wait


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def side(clock: ManualClock) -> Iterator[P2pWorkerSide]:
    yield from started(clock=clock)


@pytest.fixture(params=[P2pWorkerSide, DeviceSide], ids=["host", "device"])
def side_of_either(request: pytest.FixtureRequest) -> Iterator[P2pWorkerSide]:
    yield from started(request.param)


def started(kind: type[P2pWorkerSide] = P2pWorkerSide, clock: Clock = SYSTEM_CLOCK) -> Iterator[P2pWorkerSide]:
    config = KVTransferConfig(kv_connector="P2pConnector", kv_connector_extra_config={"transport": "shm"})
    side = kind(ConnectorContext(config, make_layout(NUM_LAYERS), clock=clock))
    region = BlockRegion(make_layout(NUM_LAYERS), 16, seed=1)
    side.register(region.memory)
    yield side
    side.close()
    region.close()


def told(side: P2pWorkerSide) -> KeyUpdate | None:
    return side.table.next_update(Cursor("t"))


def test_layers_are_announced_when_their_kv_is_there(side_of_either: P2pWorkerSide) -> None:
    side = side_of_either
    seen: list[tuple[str, list[int]]] = []

    def note(what: str) -> None:
        update = told(side)
        seen.append((what, [part.first_layer for part in update.parts] if update is not None else []))

    if isinstance(side, DeviceSide):
        side.waits.append(lambda: note("device"))
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
    if isinstance(side, DeviceSide):
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
    assert told(side) == KeyUpdate(0, -1, end_reason="dropped")


def test_a_hand_off_that_cannot_be_begun_is_over_for_its_consumer(side: P2pWorkerSide) -> None:
    side.table.open = fails  # type: ignore[method-assign]
    side.start(SAVE)
    assert told(side) == KeyUpdate(0, -1, end_reason="dropped")


def fails(*arguments: object) -> bool:
    raise RuntimeError("no room for the key's record")


def test_blocks_of_a_request_that_is_over_are_announced_at_once(side: P2pWorkerSide, clock: ManualClock) -> None:
    side.start(P2pPlan(seals=[Seal("t", "r", b"meta", [3, 4], 480.0)]))
    update = told(side)
    assert update is not None
    assert [part.block_ids for part in update.parts] == [[3, 4]]
    assert update.meta == b"meta"
    clock.advance(479.0)
    assert side.poll() == []
    clock.advance(1.0)
    side.table.expire()
    assert side.table.statistics()["ended_expired"] == 1
    assert side.poll() == [Released("r")]
    side.check()
