"""Timeout of one leg, by the progress of its instance.

A long prefill, or a long queue before it, is no reason to give a request up, but an instance that hangs is. Progress is
any byte of an answer, or a change of the instance's step counter, which is read when no bytes have come for a while
(`Legs.watch`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.http.client.call import Call
from kvferry.router.instances.instance import MAX_LATE_CHECKS, Instance

if TYPE_CHECKING:
    from kvferry.router.request.leg import Leg


class ProgressTimeout:
    """Ends the wait for a leg after `silence_s` without progress, or earlier if its instance seems dead and the leg is
    `movable`: another instance can give the rest. Progress of the `partner` leg, for which the instance waits, counts
    too until that leg has ended."""

    __slots__ = ("_instance", "_partner", "_progress_at", "_seen_bytes", "_silence_s", "movable")

    def __init__(self, instance: Instance, silence_s: float, now: float, partner: Leg | None) -> None:
        self._instance, self._silence_s, self._progress_at, self._partner = instance, silence_s, now, partner
        self._seen_bytes, self.movable = 0, True

    def answer_began(self, between_bytes_s: float, now: float) -> None:
        """Record that the answer has begun: from now on it may pause for `between_bytes_s`."""
        self._progress_at = self._instance.last_progress = now
        self._silence_s, self.movable, self._partner = between_bytes_s, False, None

    @property
    def watched_instances(self) -> tuple[Instance, ...]:
        """The instances whose progress counts."""
        partner = self._partner
        if partner is None or partner.state == "ended":
            return (self._instance,)
        return (self._instance, partner.instance)

    def silent_for(self, now: float) -> float:
        """Seconds without progress."""
        partner, partner_progress_at = self._partner, 0.0
        if partner is not None:
            partner_progress_at = partner.ended_at if partner.state == "ended" else partner.instance.last_progress
        return now - max(self._progress_at, self._instance.last_progress, partner_progress_at)

    def waited_for(self, now: float) -> float:
        """Seconds without a byte of the answer."""
        return now - self._progress_at

    def add_pause(self, missed_s: float, now: float) -> None:
        """Record that this process could not see any progress for `missed_s`."""
        self._progress_at = min(now, self._progress_at + missed_s)

    def observe(self, call: Call, now: float) -> None:
        """Record the bytes that have come since the last call."""
        num_bytes = call.num_received_so_far
        if num_bytes != self._seen_bytes:
            self._seen_bytes, self._progress_at, self._instance.last_progress = num_bytes, now, now
        elif call.paused:
            self._progress_at = now  # the client does not read

    def is_over(self, total_s: float, now: float) -> bool:
        """True if the leg is to be given up. `total_s`: the longest wait without a byte, despite other progress."""
        is_stalled = self.movable and self._instance.checks.num_late >= MAX_LATE_CHECKS
        waits_too_long = self.waited_for(now) > max(total_s, self._silence_s)
        return is_stalled or waits_too_long or self.silent_for(now) > self._silence_s
