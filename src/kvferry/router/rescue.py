"""Has another instance go on with an answer whose instance was lost.

Any instance of the same kind that serves the model can: decode instances first, then prefill instances. Owns which of
them failed this answer; one of those is asked again only when `Health` has looked at it since. One that asked to be
left alone (`Retry-After`) is.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import PeerLost, ProtocolError
from kvferry.router.body import RequestBody
from kvferry.router.chooser import with_model
from kvferry.router.config import RouterConfig
from kvferry.router.instance import Facts, Instance, InstanceFacts, Unasked
from kvferry.router.legs import Verdict, verdict
from kvferry.router.metrics import Metrics
from kvferry.router.pools import Pools
from kvferry.router.progress import EventPassage
from kvferry.router.protocols.choose import can_pair
from kvferry.router.upstream import Answer

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.1
"""How soon it is seen that an instance is back; only those that may have room are asked."""

_SPREAD_S = 0.5
"""Over which those who waited for the same instance come to it."""

Call = Callable[[Instance, bytes], Awaitable[Answer]]
"""Sends a leg with this body. Raises `PeerLost`."""


class Rescue:
    """Of one request."""

    def __init__(self, config: RouterConfig, clock: Clock, pools: Pools, metrics: Metrics, body: RequestBody) -> None:
        self._config, self._clock, self._pools, self._metrics = config, clock, pools, metrics
        self._body = body
        model = body.get("model")
        self._model = model if isinstance(model, str) else ""
        self._like: Facts = Unasked()
        self._spread_s = 0.0
        self._lost: dict[Instance, Facts] = {}
        self._num_left = config.continuations

    def begun_by(self, instance: Instance) -> None:
        """Its answer is passed on; whoever goes on with it must be alike."""
        self._like = instance.facts

    async def elsewhere(self, passage: EventPassage, lost: Instance, call: Call) -> Answer | None:
        """The rest of a stream whose instance was lost; None when nobody can give it."""
        if not self._num_left or not passage.can_go_elsewhere:
            return None
        self._num_left -= 1
        self.failed(lost)
        try:
            body = self._body.encode(**passage.fields())
            passage.restart()
        except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, ProtocolError) as error:
            logger.warning("%s told nonsense of an answer, which cannot be continued: %s", lost, error)
            return None
        if passage.hopeless:
            return None
        answer = await self._first_that_serves(call, body, passage.kind, self._config.continuation_timeout_s)
        self._metrics.continued("done" if answer is not None else "failed")
        return answer

    async def from_the_beginning(self, body: bytes, call: Call) -> Answer | None:
        """An answer that nobody has begun, of whoever can give it now."""
        return await self._first_that_serves(call, body, InstanceFacts, 0.0) if self._config.continuations else None

    def failed(self, instance: Instance) -> None:
        """Not to be asked again, as far as is known of it now."""
        self._lost[instance] = instance.facts

    async def _first_that_serves(self, call: Call, body: bytes, kind: type[Facts], timeout_s: float) -> Answer | None:
        deadline = self._clock.monotonic() + timeout_s
        while True:
            while (instance := self._pick(kind)) is not None:
                answer = await self._ask(call, instance, body)
                if answer is not None:
                    return answer
            if self._clock.monotonic() >= deadline:
                return None
            self._spread_s = random.uniform(0.0, _SPREAD_S)
            await asyncio.sleep(_LOOK_AGAIN_S)  # until one is back, or has room

    async def _ask(self, call: Call, instance: Instance, body: bytes) -> Answer | None:
        """Its answer, unless it failed or refused, which is noted, or is busy, which `call` notes."""
        try:
            answer = await call(instance, body)
        except PeerLost:
            self.failed(instance)
            return None
        if answer.status < 300:
            return answer
        if verdict(answer.status) is not Verdict.BUSY:
            self.failed(instance)
        answer.close()
        return None

    def _pick(self, kind: type[Facts]) -> Instance | None:
        known = with_model(self._model, [*self._pools.decode.instances, *self._pools.prefill.instances])
        able = [one for one in known if self._is_able(one, kind)]
        trusted = [one for one in able if one.trusted] or able
        return min(trusted, key=lambda one: (one.role, one.in_flight), default=None)  # "decode" comes first

    def _is_able(self, instance: Instance, kind: type[Facts]) -> bool:
        facts = instance.facts
        if not instance.usable or not isinstance(facts, kind) or self._lost.get(instance) is facts:
            return False
        is_free = not instance.busy_until or instance.busy_until + self._spread_s <= self._clock.monotonic()
        return is_free and can_pair(self._like, facts)
