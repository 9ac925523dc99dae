"""The answer on its way to the client: as it comes, and if its instance is lost, from another one.

Any instance of the same kind that serves the model can continue an answer, or give one whose hand-off has no KV: decode
instances first, then prefill instances. Owns which of them failed this answer; one of those is asked again only after
`Health` has checked it again, and one that asked for a pause (`Retry-After`) only after that.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from kvferry.core.entropy import RANDOM
from kvferry.core.errors import PeerLost, ProtocolError
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.core.messages.openai import SSE_DONE
from kvferry.http.server.response import Response
from kvferry.router.body import RequestBody
from kvferry.router.choice.pairing import with_model
from kvferry.router.headers import SERVER_TIMING, TIMING_WANTED
from kvferry.router.instances.instance import UNASKED, Facts, Instance, SglangFacts, VllmFacts
from kvferry.router.protocols.choose import alike
from kvferry.router.request.hand_off import HandOff
from kvferry.router.request.leg import Leg
from kvferry.router.request.progress import EventPassage, Progress
from kvferry.router.request.record import RequestRecord
from kvferry.router.request.relay import stream_lost_error
from kvferry.router.request.replay import Replay
from kvferry.router.request.request_legs import RequestLegs, is_reproducible
from kvferry.router.request.services import Services

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.1
"""How soon it is seen that an instance is back; only those that may have room are asked."""

_SPREAD_S = 0.5
"""Seconds over which those who waited for the same instance come to it."""

_MAX_READ = 64 * 2**20
"""Most bytes of a whole answer that is read for the ticket in it."""


class Delivery:
    """Brings one request's answer to the client."""

    def __init__(
        self, services: Services, response: Response, body: RequestBody, legs: RequestLegs, record: RequestRecord
    ) -> None:
        self._services, self._response, self._body = services, response, body
        self._legs, self._record = legs, record
        self._like: Facts = UNASKED
        """Facts of the instance whose answer is forwarded: only one of the same kind can continue it."""
        self._spread_s = 0.0
        self._lost: dict[Instance, Facts] = {}
        self._num_left = services.config.continuations

    async def send(self, answer: Leg) -> bool:
        """Send an answer as it comes; returns whether the client has all of it, and it is no error. Raises
        `RequestError` if nothing can be sent."""
        response, relay, conversation = self._response, self._services.relay, self._legs.conversation
        if TIMING_WANTED in response.request.first:
            response.add_header(SERVER_TIMING, self._record.decision.server_timing())
        head = answer.head
        if head.status < 300:
            self._like = answer.instance.facts
            if (passage := self._passage_of(answer)) is not None:
                return await self._stream(answer, passage)
            if conversation is not None and conversation.keeps and head.status == 200 and not head.is_event_stream:
                content = await relay.read(answer, _MAX_READ)
                content = conversation.without_ticket(answer.instance, content, events=False)
                response.send(head.status, content, relay.headers(answer, with_length=False))
                return True
        return await relay.send(answer, response) and head.status < 400

    def _passage_of(self, answer: Leg) -> EventPassage | None:
        """What another instance would need to continue this answer; None: no instance could."""
        if answer.head.status != 200 or not answer.head.is_event_stream:
            return None
        if answer.is_marked:
            return Progress()
        kind = type(answer.instance.facts)
        is_known = kind in (VllmFacts, SglangFacts, InstanceFacts)
        may_repeat = self._legs.may_continue and self._num_left > 0 and is_reproducible(self._body)
        return Replay(kind) if is_known and may_repeat else None

    async def _stream(self, answer: Leg, passage: EventPassage) -> bool:
        """A stream that another instance can continue."""
        response, relay = self._response, self._services.relay
        response.start(answer.head.status, relay.headers(answer, with_length=False))
        while True:
            try:
                await answer.relay(response, passage, movable=True)
                lost = PeerLost(f"{answer.instance} ended an answer early")
            except PeerLost as error:
                lost = error
            if (closing := passage.closing) is not None:
                self._record.num_tokens = passage.count_tokens()
                if (conversation := self._legs.conversation) is not None:
                    closing = conversation.without_ticket(answer.instance, closing, events=True)
                response.end(closing)
                return True
            logger.warning("request %s: %s", response.request.id, lost)
            told = passage.error
            self._record.failed(answer, "lost_in_answer")
            self._legs.close()  # nobody fetches any more: the rest is computed anew
            following = await self._elsewhere(passage, answer.instance)
            if following is None:
                if told:
                    response.end(relay.hide(told) + SSE_DONE)
                else:
                    response.fail(stream_lost_error(lost))
                return False
            answer = following

    # Other instances.

    async def _elsewhere(self, passage: EventPassage, lost: Instance) -> Leg | None:
        """The rest of a stream whose instance was lost; None if no instance can give it."""
        if not self._num_left or not passage.can_go_elsewhere:
            return None
        self._num_left -= 1
        self._failed(lost)
        try:
            body = self._body.encode(**passage.fields())
            passage.restart()
        except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError, ProtocolError) as error:
            logger.warning("%s sent invalid progress marks in an answer, which cannot be continued: %s", lost, error)
            return None
        if passage.hopeless:
            return None
        answer = await self._first_that_serves(body, passage.kind, self._services.config.continuation_timeout_s)
        self._services.metrics.continued("done" if answer is not None else "failed")
        return answer

    async def from_the_beginning(self) -> Leg | None:
        """A whole answer of which the client has nothing yet, from any instance that can give it now."""
        body = self._body.encode()
        return await self._first_that_serves(body, InstanceFacts, 0.0) if self._services.config.continuations else None

    async def from_prefill(self, hand_off: HandOff) -> Leg | None:
        """A whole answer from the prefill instance that has just computed the prompt, whose KV no store took: it still
        has it in its prefix cache, and any other instance would have to compute it again."""
        prefill = hand_off.prefill
        able = self._services.config.continuations and prefill.usable
        return await self._ask(prefill, self._legs.at_prefill(hand_off)) if able else None

    def _failed(self, instance: Instance) -> None:
        """Do not ask this instance again, unless something new is known about it."""
        self._lost[instance] = instance.facts

    async def _first_that_serves(self, body: bytes, kind: type[Facts], timeout_s: float) -> Leg | None:
        deadline = self._services.clock.monotonic() + timeout_s
        while True:
            while (instance := self._pick(kind)) is not None:
                answer = await self._ask(instance, body)
                if answer is not None:
                    return answer
            if self._services.clock.monotonic() >= deadline:
                return None
            self._spread_s = RANDOM.uniform(0.0, _SPREAD_S)
            await asyncio.sleep(_LOOK_AGAIN_S)  # until one is back, or has room

    async def _ask(self, instance: Instance, body: bytes) -> Leg | None:
        """The instance's answer, unless it failed or refused, which is noted here, or is busy."""
        leg = await self._legs.again(instance, body)
        if leg.state != "lost" and leg.head.status < 300:
            return leg
        if leg.has_failed:
            self._record.failed(leg)
        if leg.state == "lost" or leg.verdict != "busy":
            self._failed(instance)
        leg.close()
        return None

    def _pick(self, kind: type[Facts]) -> Instance | None:
        model = self._body.get("model")
        known = with_model(
            model if isinstance(model, str) else "",
            [*self._services.pools.decode.instances, *self._services.pools.prefill.instances],
        )
        able = [one for one in known if self._is_able(one, kind)]
        trusted = [one for one in able if one.trusted] or able
        return min(trusted, key=lambda one: (one.role, one.load.num_legs), default=None)  # "decode" comes first

    def _is_able(self, instance: Instance, kind: type[Facts]) -> bool:
        facts = instance.confirmed
        if not (instance.usable and instance.answers_alone and isinstance(facts, kind)):
            return False
        if self._lost.get(instance) is facts:
            return False
        is_free = not instance.busy_until or instance.busy_until + self._spread_s <= self._services.clock.monotonic()
        return is_free and alike(self._like, facts)
