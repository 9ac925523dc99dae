"""The answer on its way to the client: as it comes, and if its instance is lost, from another one."""

from __future__ import annotations

import logging

from kvferry.core.errors import PeerLost
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.core.messages.openai import SSE_DONE
from kvferry.http.server.response import Response
from kvferry.router.body import RequestBody
from kvferry.router.headers import SERVER_TIMING, TIMING_WANTED
from kvferry.router.instances.instance import SglangFacts, VllmFacts
from kvferry.router.request.leg import Leg
from kvferry.router.request.leg_bodies import repeats_itself
from kvferry.router.request.progress import EventPassage, Progress
from kvferry.router.request.record import RequestRecord
from kvferry.router.request.relay import Relay, lost_within
from kvferry.router.request.replay import Replay
from kvferry.router.request.request_legs import RequestLegs
from kvferry.router.request.rescue import Rescue

logger = logging.getLogger(__name__)

_LONGEST_READ = 64 * 2**20
"""Of a whole answer that is read for the ticket in it."""


class Delivery:
    """Of one request's answer."""

    def __init__(
        self, relay: Relay, response: Response, legs: RequestLegs, rescue: Rescue, record: RequestRecord
    ) -> None:
        self._relay, self._response, self._legs = relay, response, legs
        self._rescue, self._record = rescue, record

    async def send(self, answer: Leg, body: RequestBody) -> bool:
        """Send an answer as it comes; returns whether the client has all of it, and it is no error. `body`: the
        client's. Raises `RequestError` if nothing can be sent."""
        response, relay, conversation = self._response, self._relay, self._legs.conversation
        if TIMING_WANTED in response.request.first:
            response.add_header(SERVER_TIMING, self._record.decision.server_timing())
        if answer.status < 300:
            self._rescue.begun_by(answer.instance)
            if (passage := self._passage_of(answer, body)) is not None:
                return await self._stream(answer, passage)
            if conversation.keeps and answer.status == 200 and not answer.is_event_stream:
                content = await relay.read(answer, _LONGEST_READ)
                content = conversation.without_ticket(answer.instance, content, events=False)
                response.send(answer.status, content, relay.headers(answer, with_length=False))
                return True
        return await relay.send(answer, response) and answer.status < 400

    def _passage_of(self, answer: Leg, body: RequestBody) -> EventPassage | None:
        """What another instance would need to continue this answer; None: no instance could."""
        if answer.status != 200 or not answer.is_event_stream:
            return None
        if answer.is_marked:
            return Progress()
        kind = type(answer.instance.facts)
        is_known = kind in (VllmFacts, SglangFacts, InstanceFacts)
        may_repeat = self._legs.may_continue and self._rescue.num_left > 0 and repeats_itself(body)
        return Replay(kind) if is_known and may_repeat else None

    async def _stream(self, answer: Leg, passage: EventPassage) -> bool:
        """A stream that another instance can continue."""
        response, relay = self._response, self._relay
        response.start(answer.status, relay.headers(answer, with_length=False))
        while True:
            try:
                await answer.relay(response, passage, movable=True)
                lost = PeerLost(f"{answer.instance} ended an answer early")
            except PeerLost as error:
                lost = error
            if (closing := passage.closing) is not None:
                self._record.num_tokens = passage.count_tokens()
                response.end(self._legs.conversation.without_ticket(answer.instance, closing, events=True))
                return True
            logger.warning("request %s: %s", response.request.id, lost)
            told = passage.error
            self._record.failed(answer, "lost_in_answer")
            self._legs.close()  # nobody fetches any more: the rest is computed anew
            following = await self._rescue.elsewhere(passage, answer.instance)
            if following is None:
                if told:
                    response.end(relay.hide(told) + SSE_DONE)
                else:
                    response.fail(lost_within(lost))
                return False
            answer = following
