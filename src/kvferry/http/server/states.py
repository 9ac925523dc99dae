"""What a client's connection waits for, and how long.

handshake  TLS, which has its own time
opened     nothing has come yet              → http_header_s
idle       nothing of the next request       → http_idle_s
head       a header has begun                → http_header_s
body       a body is still to come           → http_body_gap_s, http_body_s
running    the request is here               → no deadline; who answers slowly is not the client's fault
closing    the last answer is on its way out → http_stall_s, then the connection is cut
lingering  the same, to a client that sends  → _LINGER_S, then the connection is cut
lost       the client has disconnected
"""

from __future__ import annotations

from math import inf
from typing import Literal

from kvferry.http.server.limits import HttpLimits

State = Literal["handshake", "opened", "idle", "head", "body", "running", "closing", "lingering", "lost"]

OVER: frozenset[State] = frozenset(("closing", "lingering", "lost"))
"""States in which nothing of a request is read any more."""

_LINGER_S = 2.0
"""How long a refused client that still sends is listened to, so that it reads its answer instead of a reset."""


def patience_with_clients(limits: HttpLimits) -> dict[State, float]:
    """Seconds that a client may take, by state."""
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
