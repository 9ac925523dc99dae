"""What one request takes of its instances, and how long it took there.

Charges each instance's `Load` when a leg is sent and gives it back when that is over, whatever happened; tells the
estimates what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.clock import Clock
from kvferry.router.cost import Estimates
from kvferry.router.instance import Instance
from kvferry.router.legs import PrefillUsage

_EVENT_BYTES = 240
"""Of one token in a stream, about: what decoding takes is counted by bytes, as answers are not read."""


@dataclass
class _Leg:
    """Under way on `instance` since `begun`, where `ahead` tokens were to be computed before it. `uncached`: tokens of
    the prompt that it seems to lack; `computes`: it is to compute them, and has not yet."""

    instance: Instance
    begun: float
    ahead: float
    uncached: int
    computes: bool
    answered_at: float | None = None
    num_beside: int = 0


class Account:
    """Of one request. Closed by `close`."""

    def __init__(self, estimates: Estimates, clock: Clock, cached: dict[Instance, int], num_tokens: int) -> None:
        self._estimates, self._clock = estimates, clock
        self._cached, self._num_tokens = cached, num_tokens
        self._prefill: _Leg | None = None
        self._decode: _Leg | None = None
        self._prefilled_at: float | None = None

    def begin_prefill(self, instance: Instance) -> None:
        """It is sent the prompt."""
        self._end_prefill()
        self._prefilled_at = None
        self._prefill = self._begin(instance, computes=True)

    def begin_decode(self, instance: Instance, *, whole: bool) -> None:
        """It is sent the request, to decode or to do both."""
        self._end_decode()
        self._decode = self._begin(instance, computes=whole)
        instance.load.num_decodes += 1

    def prefilled(self, instance: Instance, usage: PrefillUsage, prompt_bytes: int) -> None:
        """P has answered."""
        leg, self._prefilled_at = self._prefill, self._clock.monotonic()
        if leg is None or leg.instance is not instance:
            return
        seconds = self._prefilled_at - leg.begun
        self._end_prefill()
        computed = usage.prompt_tokens - usage.cached_tokens if usage.prompt_tokens else leg.uncached
        self._estimates.prefilled(instance.name, leg.ahead + computed, seconds)
        self._estimates.tokenized(prompt_bytes, usage.prompt_tokens)
        if self._decode is not None and self._decode.answered_at is not None:
            self._estimates.hand_off.add(self._decode.uncached, 0.0)  # The client had its first token by then.

    def answered(self, instance: Instance, *, streams: bool) -> None:
        """D's answer has begun; with its first token, if it `streams`."""
        leg = self._decode
        if leg is None or leg.instance is not instance or leg.answered_at is not None:
            return
        computed, leg.num_beside = leg.computes, instance.load.num_decodes
        self._computed(leg)
        if not streams:
            return
        leg.answered_at = now = self._clock.monotonic()
        if computed:
            self._estimates.prefilled(instance.name, leg.ahead + leg.uncached, now - leg.begun)
        elif self._prefilled_at is not None:
            self._estimates.hand_off.add(leg.uncached, now - self._prefilled_at)

    def end(self, instance: Instance) -> None:
        """It failed the request."""
        if self._prefill is not None and self._prefill.instance is instance:
            self._end_prefill()
        if self._decode is not None and self._decode.instance is instance:
            self._end_decode()

    def close(self, num_bytes: int) -> None:
        """All is over; the client got so many bytes of a whole answer, or 0."""
        leg = self._decode
        if leg is not None and leg.answered_at is not None and num_bytes:
            num_beside = (leg.num_beside + leg.instance.load.num_decodes) / 2
            seconds = self._clock.monotonic() - leg.answered_at
            self._estimates.decoded(num_beside, num_bytes / _EVENT_BYTES, seconds)
        self._end_prefill()
        self._end_decode()

    def _begin(self, instance: Instance, *, computes: bool) -> _Leg:
        now, load = self._clock.monotonic(), instance.load
        uncached = max(0, self._num_tokens - self._cached.get(instance, 0))
        leg = _Leg(instance, now, load.prefill_tokens, uncached, computes)
        load.note_taken(uncached, now)
        if computes:
            load.num_prefills += 1
            load.prefill_tokens += uncached
        return leg

    def _computed(self, leg: _Leg) -> None:
        if leg.computes:
            leg.computes = False
            leg.instance.load.num_prefills -= 1
            leg.instance.load.prefill_tokens -= leg.uncached

    def _end_prefill(self) -> None:
        if self._prefill is not None:
            self._computed(self._prefill)
            self._prefill = None

    def _end_decode(self) -> None:
        if self._decode is not None:
            self._computed(self._decode)
            self._decode.instance.load.num_decodes -= 1
            self._decode = None
