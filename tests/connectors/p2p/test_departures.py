"""When layers are announced: as they are saved, or, where a device still computes them, at the end of the step."""

from __future__ import annotations

import pytest
from kv_support import Node, Region, make_layout

from kvferry.connectors.p2p.departures import Departures
from kvferry.connectors.p2p.plan import P2pPlan, Save
from kvferry.transport.lookup_buffer.entries import Announced, Cursor


@pytest.mark.parametrize("on_device", [False, True])
def test_layers_are_announced_when_their_kv_is_there(on_device: bool) -> None:
    region = Region(make_layout(), 16, seed=1)
    node = Node(region, "shm")
    seen: list[tuple[str, list[int]]] = []

    def announced(what: str) -> None:
        changes, _ = node.buffer.table.changes("t", Cursor())
        parts = [part for change in changes if isinstance(change, Announced) for part in change.parts]
        seen.append((what, [part.first_layer for part in parts]))

    departures = Departures(node.buffer, 2, (lambda: announced("device")) if on_device else None)
    departures.start(P2pPlan(saves=[Save("t", True, 0, 0, [3, 4])]))
    for layer in range(2):
        departures.save_layer(layer)
        announced(f"saved {layer}")
    departures.flush()
    announced("flushed")
    departures.save_layer(0)
    departures.flush()
    announced("no more")
    if on_device:
        assert seen == [("saved 0", []), ("saved 1", []), ("device", []), ("flushed", [0, 1]), ("no more", [0, 1])]
    else:
        assert seen == [("saved 0", [0]), ("saved 1", [0, 1]), ("flushed", [0, 1]), ("no more", [0, 1])]
    node.buffer.drop("t")
    node.close()
    region.close()
