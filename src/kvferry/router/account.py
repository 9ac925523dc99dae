"""The load that one request puts on its instances, and how long its legs took.

Each instance's `Load` is increased when a leg is sent and decreased when the leg is over, however it ended. The
measured times go to the estimates.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvferry.core.clock import Clock
from kvferry.router.cost import Estimates
from kvferry.router.instance import Instance
from kvferry.router.legs import PrefillUsage

_EVENT_BYTES = 240
"""Of one token in a stream, about: what decoding takes is counted by bytes, as answers are not read."""


class _Leg(msgspec.Struct):
    """A leg that runs on `instance` since `begun`, when `ahead` tokens were still to be computed there before it.
    `uncached`: tokens of the prompt that the instance probably does not have cached; `computes`: it will compute them,
    and has not done so yet."""

    instance: Instance
    begun: float
    ahead: float
    uncached: int
    computes: bool
    answered_at: float | None = None
    num_beside: int = 0


class Account:
    """The load and the times of one request. Closed by `close`."""

    def __init__(self, estimates: Estimates, clock: Clock, cached: Mapping[Instance, int], num_tokens: int) -> None:
        self._estimates, self._clock = estimates, clock
        self._cached, self._num_tokens = cached, num_tokens
        self._prefill: _Leg | None = None
        self._decode: _Leg | None = None
        self._prefilled_at: float | None = None

    def begin_prefill(self, instance: Instance) -> None:
        """The prefill leg is sent to a prefill instance."""
        if self._prefill is not None:
            self._end_prefill(self._prefill)
        self._prefilled_at = None
        self._prefill = self._begin(instance, computes=True)

    def begin_decode(self, instance: Instance, *, whole: bool) -> None:
        """The decode leg, or the whole request, is sent to a decode instance."""
        if self._decode is not None:
            self._end_decode(self._decode)
        self._decode = self._begin(instance, computes=whole)
        instance.load.num_decodes += 1

    def prefilled(self, instance: Instance, usage: PrefillUsage, prompt_bytes: int) -> None:
        """P has answered."""
        leg, estimates = self._prefill, self._estimates
        self._prefilled_at = now = self._clock.monotonic()
        if leg is None or leg.instance is not instance:
            return
        self._end_prefill(leg)
        computed = usage.prompt_tokens - usage.cached_tokens if usage.prompt_tokens else leg.uncached
        estimates.prefilled(instance.name, leg.ahead + computed, now - leg.begun)
        estimates.tokenized(prompt_bytes, usage.prompt_tokens)
        if self._decode is not None and self._decode.answered_at is not None:
            estimates.hand_off.add(self._decode.uncached, 0.0)  # The client had its first token by then.

    def answered(self, instance: Instance, *, streams: bool) -> None:
        """D's answer has begun; if it `streams`, with its first token."""
        leg = self._decode
        if leg is None or leg.instance is not instance or leg.answered_at is not None:
            return
        computed, leg.num_beside = leg.computes, instance.load.num_decodes
        if computed:
            self._computed(leg)
        if not streams:
            return
        leg.answered_at = now = self._clock.monotonic()
        if computed:
            self._estimates.prefilled(instance.name, leg.ahead + leg.uncached, now - leg.begun)
        elif self._prefilled_at is not None:
            self._estimates.hand_off.add(leg.uncached, now - self._prefilled_at)

    def end(self, instance: Instance) -> None:
        """The leg on this instance failed."""
        if self._prefill is not None and self._prefill.instance is instance:
            self._end_prefill(self._prefill)
        if self._decode is not None and self._decode.instance is instance:
            self._end_decode(self._decode)

    def close(self, num_bytes: int) -> None:
        """The request is over. `num_bytes` of a whole answer were sent to the client, or 0."""
        if self._prefill is not None:
            self._end_prefill(self._prefill)
        leg = self._decode
        if leg is None:
            return
        if leg.answered_at is not None and num_bytes:
            num_beside = (leg.num_beside + leg.instance.load.num_decodes) / 2
            seconds = self._clock.monotonic() - leg.answered_at
            self._estimates.decoded(num_beside, num_bytes / _EVENT_BYTES, seconds)
        self._end_decode(leg)

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
        """What it was to compute is done, or will not be done."""
        leg.computes, load = False, leg.instance.load
        load.num_prefills -= 1
        load.prefill_tokens -= leg.uncached

    def _end_prefill(self, leg: _Leg) -> None:
        self._computed(leg)
        self._prefill = None

    def _end_decode(self, leg: _Leg) -> None:
        if leg.computes:
            self._computed(leg)
        leg.instance.load.num_decodes -= 1
        self._decode = None
