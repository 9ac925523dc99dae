"""The line that shows the load."""

from __future__ import annotations

import pytest

from kvferry.cli.terminal.live_line import load_text
from kvferry.cli.watch.state import WatchedState


def test_nothing_is_known_at_first() -> None:
    text = load_text(WatchedState())
    assert "0 running" in text
    assert "TTFT \u2013" in text
    assert "KV" not in text


@pytest.mark.parametrize(("alive", "running"), [(True, "5 running"), (False, "2 running")])
def test_instances_that_are_up_are_added(alive: bool, running: str) -> None:
    state = WatchedState()
    state.instances = {
        "a": {"running": 2, "waiting": 1, "kv_used": 0.25},
        "b": {"in_flight": 3, "alive": alive, "kv_used": None},
    }
    text = load_text(state)
    assert running in text
    assert "1 waiting" in text
    assert "KV 25 %" in text
    assert len(text) <= 80
