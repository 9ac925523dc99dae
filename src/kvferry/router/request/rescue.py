"""Finds another instance to continue an answer whose instance was lost, or to give one whose hand-off has no KV.

Any instance of the same kind that serves the model can: decode instances first, then prefill instances. Owns which of
them failed this answer; one of those is asked again only after `Health` has checked it again, and one that asked for a
pause (`Retry-After`) only after that.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from kvferry.core.entropy import RANDOM
from kvferry.core.errors import ProtocolError
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.router.body import RequestBody
from kvferry.router.choice.pairing import with_model
from kvferry.router.instances.instance import Facts, Instance, Unasked
from kvferry.router.protocols.choose import alike
from kvferry.router.request.hand_off import HandOff
from kvferry.router.request.leg import Leg, LegState
from kvferry.router.request.progress import EventPassage
from kvferry.router.request.record import RequestRecord
from kvferry.router.request.request_legs import RequestLegs
from kvferry.router.request.services import Services

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.1
"""How soon it is seen that an instance is back; only those that may have room are asked."""

_SPREAD_S = 0.5
"""Over which those who waited for the same instance come to it."""


class Rescue:
    """For one request."""

    def __init__(self, services: Services, body: RequestBody, legs: RequestLegs, record: RequestRecord) -> None:
        self._config, self._clock, self._pools = services.config, services.clock, services.pools
        self._metrics, self._body, self._legs, self._record = services.metrics, body, legs, record
        self._like: Facts = Unasked()
        self._spread_s = 0.0
        self._lost: dict[Instance, Facts] = {}
        self.num_left = self._config.continuations

    def begun_by(self, instance: Instance) -> None:
        """This instance's answer is being forwarded; only an instance of the same kind can continue it."""
        self._like = instance.facts

    async def elsewhere(self, passage: EventPassage, lost: Instance) -> Leg | None:
        """The rest of a stream whose instance was lost; None if no instance can give it."""
        if not self.num_left or not passage.can_go_elsewhere:
            return None
        self.num_left -= 1
        self.failed(lost)
        try:
            body = self._body.encode(**passage.fields())
            passage.restart()
        except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError, ProtocolError) as error:
            logger.warning("%s sent invalid progress marks in an answer, which cannot be continued: %s", lost, error)
            return None
        if passage.hopeless:
            return None
        answer = await self._first_that_serves(body, passage.kind, self._config.continuation_timeout_s)
        self._metrics.continued("done" if answer is not None else "failed")
        return answer

    async def from_the_beginning(self) -> Leg | None:
        """A whole answer of which the client has nothing yet, from any instance that can give it now."""
        body = self._body.encode()
        return await self._first_that_serves(body, InstanceFacts, 0.0) if self._config.continuations else None

    async def from_prefill(self, hand_off: HandOff) -> Leg | None:
        """A whole answer from the prefill instance that has just computed the prompt, whose KV no store took: it still
        has it in its prefix cache, and any other instance would have to compute it again."""
        prefill = hand_off.prefill
        able = self._config.continuations and prefill.usable
        return await self._ask(prefill, self._legs.at_prefill(hand_off)) if able else None

    def failed(self, instance: Instance) -> None:
        """This instance is not asked again, unless something new is known about it."""
        self._lost[instance] = instance.facts

    async def _first_that_serves(self, body: bytes, kind: type[Facts], timeout_s: float) -> Leg | None:
        deadline = self._clock.monotonic() + timeout_s
        while True:
            while (instance := self._pick(kind)) is not None:
                answer = await self._ask(instance, body)
                if answer is not None:
                    return answer
            if self._clock.monotonic() >= deadline:
                return None
            self._spread_s = RANDOM.uniform(0.0, _SPREAD_S)
            await asyncio.sleep(_LOOK_AGAIN_S)  # until one is back, or has room

    async def _ask(self, instance: Instance, body: bytes) -> Leg | None:
        """The instance's answer, unless it failed or refused, which is noted here, or is busy."""
        leg = await self._legs.again(instance, body)
        if leg.state is not LegState.LOST and leg.status < 300:
            return leg
        if leg.has_failed:
            self._record.failed(leg)
        if leg.state is LegState.LOST or leg.verdict != "busy":
            self.failed(instance)
        leg.close()
        return None

    def _pick(self, kind: type[Facts]) -> Instance | None:
        model = self._body.get("model")
        known = with_model(
            model if isinstance(model, str) else "", [*self._pools.decode.instances, *self._pools.prefill.instances]
        )
        able = [one for one in known if self._is_able(one, kind)]
        trusted = [one for one in able if one.trusted] or able
        return min(trusted, key=lambda one: (one.role, one.load.num_legs), default=None)  # "decode" comes first

    def _is_able(self, instance: Instance, kind: type[Facts]) -> bool:
        facts = instance.facts
        if not instance.usable or not isinstance(facts, kind) or self._lost.get(instance) is facts:
            return False
        is_free = not instance.busy_until or instance.busy_until + self._spread_s <= self._clock.monotonic()
        return is_free and alike(self._like, facts)
