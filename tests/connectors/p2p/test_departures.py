"""When layers are announced: as they are saved, or, where a device still computes them, at the end of the step."""

from __future__ import annotations

import pytest
from kv_support import Node, Region, make_layout

from kvferry.connectors.p2p.departures import Departures
from kvferry.connectors.p2p.plan import Keep, P2pPlan, Save
from kvferry.transport.lookup_buffer.entries import Cursor
from kvferry.transport.lookup_buffer.messages import Announced, Over, Sealed


@pytest.mark.parametrize("on_device", [False, True])
def test_layers_are_announced_when_their_kv_is_there(on_device: bool) -> None:
    region = Region(make_layout(), 16, seed=1)
    node = Node(region, "shm")
    seen: list[tuple[str, list[int]]] = []

    def announced(what: str) -> None:
        changes, _ = node.table.changes("t", Cursor())
        parts = [part for change in changes if isinstance(change, Announced) for part in change.parts]
        seen.append((what, [part.first_layer for part in parts]))

    departures = Departures(node.buffer, 2, (lambda: announced("device")) if on_device else None)
    departures.start(P2pPlan(saves=[Save("t", True, 0, [3, 4])]))
    announced("started")
    for layer in range(2):
        departures.save_layer(layer)
        announced(f"saved {layer}")
    departures.flush()
    announced("flushed")
    departures.save_layer(0)
    departures.flush()
    announced("no more")
    if on_device:
        assert seen == [
            ("started", []),
            ("saved 0", []),
            ("saved 1", []),
            ("device", []),
            ("flushed", [0, 1]),
            ("no more", [0, 1]),
        ]
    else:
        assert seen == [
            ("started", []),
            ("saved 0", [0]),
            ("saved 1", [0, 1]),
            ("flushed", [0, 1]),
            ("no more", [0, 1]),
        ]
    node.table.drop("t")
    node.close()
    region.close()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_a_step_that_broke_off_hands_nothing_off(on_device: bool, told: bool) -> None:
    region = Region(make_layout(), 16, seed=1)
    node = Node(region, "shm")
    departures = Departures(node.buffer, 2, (lambda: None) if on_device else None)
    departures.start(P2pPlan(saves=[Save("t", True, 0, [3, 4])]))
    departures.save_layer(0)
    if told:
        departures.discard()
    else:
        departures.start(P2pPlan())
    for layer in range(2):
        departures.save_layer(layer)
    departures.flush()
    changes, _ = node.table.changes("t", Cursor())
    assert changes == [Over("dropped")]
    node.close()
    region.close()


def test_a_hand_off_that_cannot_be_begun_is_over_for_its_consumer() -> None:
    region = Region(make_layout(), 16, seed=1)
    node = Node(region, "shm")
    departures = Departures(node.buffer, 2)
    node.table.open = fails  # type: ignore[method-assign]
    departures.start(P2pPlan(saves=[Save("t", True, 0, [3, 4])]))
    changes, _ = node.table.changes("t", Cursor())
    assert changes == [Over("dropped")]
    node.close()
    region.close()


def fails(*arguments: object) -> bool:
    raise RuntimeError("no room for the key's record")


def test_blocks_of_a_request_that_is_over_are_announced_at_once() -> None:
    region = Region(make_layout(), 16, seed=1)
    node = Node(region, "shm")
    departures = Departures(node.buffer, 2)
    departures.start(P2pPlan(keeps=[Keep("t", "r", [3, 4], b"meta", 480.0)]))
    changes, _ = node.table.changes("t", Cursor())
    assert [type(change) for change in changes] == [Announced, Sealed]
    assert node.table._entries["t"].lease_s == 480.0
    node.buffer.end("t")
    assert departures.released() == {"r"}
    node.close()
    region.close()
