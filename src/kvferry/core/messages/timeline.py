"""Time stamps of a request's phases, in seconds since the epoch, so that the stamps of two instances can be
compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

Stamp = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Seconds since the epoch; finite."""

PHASES = (
    "arrived",
    "routed",
    "prefill_queued",
    "prefill_started",
    "prefill_done",
    "transfer_started",
    "transfer_done",
    "decode_queued",
    "decode_started",
    "first_token",
    "done",
)


class Timeline(msgspec.Struct, omit_defaults=True):
    """One stamp for each phase; None: the phase did not happen. The first stamp of a phase counts."""

    arrived: Stamp | None = None
    routed: Stamp | None = None
    prefill_queued: Stamp | None = None
    prefill_started: Stamp | None = None
    prefill_done: Stamp | None = None
    transfer_started: Stamp | None = None
    transfer_done: Stamp | None = None
    decode_queued: Stamp | None = None
    decode_started: Stamp | None = None
    first_token: Stamp | None = None
    done: Stamp | None = None

    def stamp(self, phase: str, now: float) -> None:
        """Record that `phase` happened at `now`, unless it has a stamp already."""
        if getattr(self, phase) is None:
            setattr(self, phase, now)

    def adopt(self, earlier: Timeline) -> None:
        """Take over the stamps of the leg before this one (P's, from the ticket), which win.

        The stamps of the answer itself are not taken over, since this leg gives the answer.
        """
        for phase in PHASES:
            value = getattr(earlier, phase)
            if value is not None and phase not in ("first_token", "done"):
                setattr(self, phase, value)

    def span(self, start: str, end: str) -> float | None:
        """Seconds between two phases; None if either did not happen."""
        begun, ended = getattr(self, start), getattr(self, end)
        return None if begun is None or ended is None else float(ended - begun)


def since_arrival(stamps: Mapping[str, float]) -> dict[str, float]:
    """The stamps of a timeline in ms since the request's arrival, or since the first stamp."""
    zero = stamps.get("arrived", min(stamps.values(), default=0.0))
    return {phase: round(1000 * (stamp - zero), 3) for phase, stamp in stamps.items()}
