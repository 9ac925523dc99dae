"""What the stream of a page says, as `kvferry top` keeps it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.cli.watch.state import MAX_REQUESTS, WatchedState
from kvferry.core.errors import ProtocolError

SNAPSHOT = {
    "type": "snapshot", "kind": "router", "now": 1.0, "models": ["m"], "points": [{"at": 1.0, "ttft_p50": 20.0}],
    "instances": {"decode-0": {"name": "decode-0", "role": "decode", "alive": True, "running": 1}}, "requests": [],
    "events": [], "verdict": "",
}  # fmt: skip


def applied(*events: dict[str, Any]) -> WatchedState:
    state = WatchedState()
    for event in (SNAPSHOT, *events):
        state.apply(json.dumps(event).encode())
    return state


def test_deltas_change_what_they_name_and_nothing_else() -> None:
    state = applied({"type": "delta", "now": 3.0, "instances": {"decode-0": {"running": 5}}, "point": {"at": 3.0}})
    assert state.instances["decode-0"] == {"name": "decode-0", "role": "decode", "alive": True, "running": 5}
    assert (state.now, state.last("ttft_p50"), state.last("itl_p50")) == (3.0, 20.0, None)
    state = applied({"type": "delta", "now": 3.0, "instances": {"decode-0": None}})
    assert state.instances == {}


def test_a_snapshot_replaces_everything() -> None:
    state = applied({"type": "delta", "now": 2.0, "events": [{"at": 2.0, "text": "a"}]}, SNAPSHOT)
    assert list(state.events) == []
    assert len(state.points) == 1


def test_requests_are_bounded() -> None:
    requests = [{"request_id": str(number)} for number in range(MAX_REQUESTS + 10)]
    state = applied({"type": "delta", "now": 2.0, "requests": requests})
    assert len(state.requests) == MAX_REQUESTS
    assert "0" not in state.requests


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"{}", b'{"type": "delta"}', b'{"now": 1, "type": "delta", "instances": 3}', b"\xff"]
)
def test_what_is_no_update_is_an_error(content: bytes) -> None:
    with pytest.raises(ProtocolError):
        WatchedState().apply(content)


@pytest.mark.parametrize(
    ("loads", "busiest"),
    [((9, 1, 1), "d0"), ((3, 1, 1), ""), ((9, 6, 6), ""), ((9,), ""), ((0, 0), ""), ((1, 1, 20), "d2")],
)
def test_an_instance_with_far_more_than_others_is_named(loads: tuple[int, ...], busiest: str) -> None:
    state = WatchedState()
    for number, load in enumerate(loads):
        state.instances[f"d{number}"] = {"role": "decode", "alive": True, "running": load, "waiting": 0}
    assert state.busiest("decode") == busiest
    assert state.busiest("prefill") == ""
