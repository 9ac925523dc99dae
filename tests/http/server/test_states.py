"""Timeouts of a client's connection, by its state."""

from __future__ import annotations

from math import inf
from typing import get_args

from kvferry.http.server.limits import HttpLimits
from kvferry.http.server.states import OVER, State, client_timeouts


def test_every_state_has_its_timeout() -> None:
    limits = HttpLimits(http_header_s=1, http_idle_s=2, http_body_gap_s=3, http_stall_s=4)
    timeouts = client_timeouts(limits)
    assert set(timeouts) == set(get_args(State))
    assert [timeouts[state] for state in ("opened", "head", "idle", "body", "closing")] == [1, 1, 2, 3, 4]


def test_only_what_is_no_fault_of_the_client_has_no_timeout() -> None:
    timeouts = client_timeouts(HttpLimits())
    assert {state for state, timeout_s in timeouts.items() if timeout_s == inf} == {"handshake", "running", "lost"}
    assert set(timeouts) >= OVER
    assert 0 < timeouts["lingering"] < 10
