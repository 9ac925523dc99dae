"""Delivers the answer to the client, and continues it on another instance if its own is lost.

Any instance of the same kind that serves the model can continue an answer, or give one whose hand-off has no KV: decode
instances first, then prefill instances. Owns the set of instances that failed this answer. A failed instance is tried
again only after `Health` has checked it again, and one that sent `Retry-After` only after that time.
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
from kvferry.router.headers import SERVER_TIMING, TIMING_REQUEST
from kvferry.router.instances.instance import NOT_PROBED, Facts, Instance, SglangFacts, VllmFacts
from kvferry.router.protocols.choose import are_compatible
from kvferry.router.request.hand_off import HandOff
from kvferry.router.request.leg import Leg
from kvferry.router.request.progress import Progress, ResumableStream
from kvferry.router.request.record import RequestRecord
from kvferry.router.request.relay import stream_lost_error
from kvferry.router.request.replay import Replay
from kvferry.router.request.request_legs import RequestLegs, is_reproducible
from kvferry.router.request.services import Services

logger = logging.getLogger(__name__)


class Delivery:
    """Delivers one request's answer to the client."""

    max_read = 64 * 2**20
    """Maximum number of bytes of an unstreamed answer that is read for the ticket in it."""
    jitter_s = 0.5
    """Seconds over which requests that waited for the same busy instance are spread."""
    poll_interval_s = 0.1
    """Seconds between two searches for an instance that can serve."""

    def __init__(
        self, services: Services, response: Response, body: RequestBody, legs: RequestLegs, record: RequestRecord
    ) -> None:
        self._services, self._response, self._body = services, response, body
        self._legs, self._record = legs, record
        self._source_facts: Facts = NOT_PROBED
        """Facts of the instance whose answer is forwarded: only an instance with compatible facts can continue it."""
        self._jitter_s = 0.0
        self._lost: dict[Instance, Facts] = {}
        self._num_continuations_left = services.config.continuations

    async def send(self, answer: Leg) -> bool:
        """Send an answer while it arrives. Returns True if the client has the complete answer, and the answer is no
        error. Raises `RequestError` if nothing can be sent."""
        response, relay, conversation = self._response, self._services.relay, self._legs.conversation
        if TIMING_REQUEST in response.request.first:
            response.add_header(SERVER_TIMING, self._record.decision.server_timing())
        head = answer.head
        if head.status < 300:
            self._source_facts = answer.instance.facts
            if (stream := self._resumable_stream(answer)) is not None:
                return await self._stream(answer, stream)
            if conversation is not None and conversation.keeps_kv and head.status == 200 and not head.is_event_stream:
                content = await relay.read(answer, self.max_read)
                content = conversation.strip_ticket(answer.instance, content, events=False)
                response.send(head.status, content, relay.headers(answer, with_length=False))
                return True
        return await relay.send(answer, response) and head.status < 400

    def _resumable_stream(self, answer: Leg) -> ResumableStream | None:
        """The state with which another instance can continue this answer; None if no instance can."""
        if answer.head.status != 200 or not answer.head.is_event_stream:
            return None
        if answer.is_marked:
            return Progress()
        kind = type(answer.instance.facts)
        is_known = kind in (VllmFacts, SglangFacts, InstanceFacts)
        may_repeat = self._legs.may_continue and self._num_continuations_left > 0 and is_reproducible(self._body)
        return Replay(kind) if is_known and may_repeat else None

    async def _stream(self, answer: Leg, stream: ResumableStream) -> bool:
        """Send a stream that another instance can continue. Return True if it is complete."""
        response, relay = self._response, self._services.relay
        response.start(answer.head.status, relay.headers(answer, with_length=False))
        while True:
            try:
                await answer.relay(response, stream, movable=True)
                lost = PeerLost(f"{answer.instance} ended an answer early")
            except PeerLost as error:
                lost = error
            if (closing := stream.closing) is not None:
                self._record.num_tokens = stream.count_tokens()
                if (conversation := self._legs.conversation) is not None:
                    closing = conversation.strip_ticket(answer.instance, closing, events=True)
                response.end(closing)
                return True
            logger.warning("request %s: %s", response.request.id, lost)
            error_event = stream.error
            self._record.failed(answer, "lost_in_answer")
            self._legs.close()  # the rest is computed again, without the hand-off
            next_leg = await self._resume(stream, answer.instance)
            if next_leg is None:
                if error_event:
                    response.end(relay.hide(error_event) + SSE_DONE)
                else:
                    response.fail(stream_lost_error(lost))
                return False
            answer = next_leg

    # Other instances.

    async def _resume(self, stream: ResumableStream, lost: Instance) -> Leg | None:
        """Continue a stream whose instance was lost; None if no instance can."""
        if not self._num_continuations_left or not stream.can_be_resumed:
            return None
        self._num_continuations_left -= 1
        self._exclude(lost)
        try:
            body = self._body.encode(**stream.fields())
            stream.restart()
        except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError, ProtocolError) as error:
            logger.warning("%s sent invalid progress marks in an answer, which cannot be continued: %s", lost, error)
            return None
        if stream.is_unrecoverable:
            return None
        answer = await self._send_until_served(body, stream.kind, self._services.config.continuation_timeout_s)
        self._services.metrics.continued("done" if answer is not None else "failed")
        return answer

    async def serve_anywhere(self) -> Leg | None:
        """Serve a request on any instance that can serve it now, if no byte of its answer was sent. None: no instance
        can."""
        body = self._body.encode()
        return await self._send_until_served(body, InstanceFacts, 0.0) if self._services.config.continuations else None

    async def serve_on_prefill(self, hand_off: HandOff) -> Leg | None:
        """Let the prefill instance answer itself, after no store took its KV: the prompt is still in its prefix cache,
        and any other instance would have to compute it again. None if it cannot."""
        prefill = hand_off.prefill
        if not (self._services.config.continuations and prefill.usable):
            return None
        return await self._try_instance(prefill, self._legs.aggregated_body(hand_off))

    def _exclude(self, instance: Instance) -> None:
        """Do not try this instance again until its facts are new."""
        self._lost[instance] = instance.facts

    async def _send_until_served(self, body: bytes, kind: type[Facts], timeout_s: float) -> Leg | None:
        deadline = self._services.clock.monotonic() + timeout_s
        while True:
            while (instance := self._pick_instance(kind)) is not None:
                answer = await self._try_instance(instance, body)
                if answer is not None:
                    return answer
            if self._services.clock.monotonic() >= deadline:
                return None
            self._jitter_s = RANDOM.uniform(0.0, self.jitter_s)
            await asyncio.sleep(self.poll_interval_s)  # until an instance is back, or not busy

    async def _try_instance(self, instance: Instance, body: bytes) -> Leg | None:
        """The instance's answer. None: the instance is busy, has failed or has refused, which is recorded."""
        leg = await self._legs.continue_on(instance, body)
        if leg.state != "lost" and leg.head.status < 300:
            return leg
        if leg.has_failed:
            self._record.failed(leg)
        if leg.state == "lost" or leg.verdict != "busy":
            self._exclude(instance)
        leg.close()
        return None

    def _pick_instance(self, kind: type[Facts]) -> Instance | None:
        model = self._body.get("model")
        candidates = with_model(
            model if isinstance(model, str) else "",
            [*self._services.pools.decode.instances, *self._services.pools.prefill.instances],
        )
        capable = [instance for instance in candidates if self._can_serve(instance, kind)]
        trusted = [instance for instance in capable if instance.trusted] or capable
        return min(
            trusted, key=lambda instance: (instance.role, instance.load.num_legs), default=None
        )  # "decode" comes first

    def _can_serve(self, instance: Instance, kind: type[Facts]) -> bool:
        facts = instance.confirmed
        if not (instance.usable and instance.answers_alone and isinstance(facts, kind)):
            return False
        if self._lost.get(instance) is facts:
            return False
        is_free = (
            not instance.paused_until or instance.paused_until + self._jitter_s <= self._services.clock.monotonic()
        )
        return is_free and are_compatible(self._source_facts, facts)
