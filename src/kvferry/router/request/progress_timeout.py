"""How long one leg is waited for.

A long prefill, or a long queue before it, is no reason to give a request up: an instance that makes progress is waited
for, one that hangs is not. Progress is shown by bytes of any answer, and by the instance's step counter, which is read
when there have been no bytes for a while (`Legs.watch`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.http.client.call import Call
from kvferry.router.instances.instance import LATE_BEFORE_DOWN, Instance

if TYPE_CHECKING:
    from kvferry.router.request.leg import Leg


class ProgressTimeout:
    """How long to wait for a leg: for `silence_s` without a sign of progress, and no longer once its instance seems
    dead, if it is `movable`: another instance can give the rest. Progress of the leg `beside` it, for which its
    instance waits, counts too until that one has ended."""

    __slots__ = ("_beside", "_instance", "_progress_at", "_seen_bytes", "_silence_s", "movable")

    def __init__(self, instance: Instance, silence_s: float, now: float, beside: Leg | None) -> None:
        self._instance, self._silence_s, self._progress_at, self._beside = instance, silence_s, now, beside
        self._seen_bytes, self.movable = 0, True

    def answer_began(self, between_bytes_s: float, now: float) -> None:
        """Note that the answer began: from now on it may pause for `between_bytes_s`."""
        self._progress_at = self._instance.last_sign = now
        self._silence_s, self.movable, self._beside = between_bytes_s, False, None

    @property
    def waits_for(self) -> tuple[Instance, ...]:
        """The instances whose progress counts."""
        beside = self._beside
        if beside is None or beside.state == "ended":
            return (self._instance,)
        return (self._instance, beside.instance)

    def silent_for(self, now: float) -> float:
        """Seconds without progress."""
        beside, there = self._beside, 0.0
        if beside is not None:
            there = beside.ended_at if beside.state == "ended" else beside.instance.last_sign
        return now - max(self._progress_at, self._instance.last_sign, there)

    def waited_for(self, now: float) -> float:
        """Seconds without a byte of the answer."""
        return now - self._progress_at

    def stood_still(self, missed_s: float, now: float) -> None:
        """Note that this process could not see any progress for `missed_s`."""
        self._progress_at = min(now, self._progress_at + missed_s)

    def look(self, call: Call, now: float) -> None:
        """Note what has come since the last look."""
        num_bytes = call.num_received_so_far
        if num_bytes != self._seen_bytes:
            self._seen_bytes, self._progress_at, self._instance.last_sign = num_bytes, now, now
        elif call.paused:
            self._progress_at = now  # it is the client who does not read

    def is_over(self, total_s: float, now: float) -> bool:
        """Whether the leg is to be given up. `total_s`: the longest wait without a byte, whatever else there is."""
        stands_still = self.movable and self._instance.looks.num_late >= LATE_BEFORE_DOWN
        waits_too_long = self.waited_for(now) > max(total_s, self._silence_s)
        return stands_still or waits_too_long or self.silent_for(now) > self._silence_s
