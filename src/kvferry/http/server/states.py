"""States of a client's connection, and their deadlines.

handshake  TLS, which has its own time
opened     no byte has come yet              → http_header_s
idle       no byte of the next request       → http_idle_s
head       a header has begun                → http_header_s
body       a body is still to come           → http_body_gap_s, http_body_s
running    the request is complete           → no deadline; a slow answer is not the client's fault
closing    the last answer is being sent     → http_stall_s, then the connection is cut
lingering  the same, to a client that sends  → _LINGER_S, then the connection is cut
lost       the client has disconnected
"""

from __future__ import annotations

from math import inf
from typing import Literal

from kvferry.http.server.limits import HttpLimits

State = Literal["handshake", "opened", "idle", "head", "body", "running", "closing", "lingering", "lost"]

OVER: frozenset[State] = frozenset(("closing", "lingering", "lost"))
"""States in which no request is read."""

_LINGER_S = 2.0
"""Seconds for which the input of a refused client is still read, so that it gets its answer instead of a reset."""


def client_timeouts(limits: HttpLimits) -> dict[State, float]:
    """Timeouts of clients in seconds, by state."""
    return {
        "handshake": inf,
        "opened": limits.http_header_s,
        "idle": limits.http_idle_s,
        "head": limits.http_header_s,
        "body": limits.http_body_gap_s,
        "running": inf,
        "closing": limits.http_stall_s,
        "lingering": _LINGER_S,
        "lost": inf,
    }
