"""The legs of one request: what each is sent, which there are, and the hand-offs between them.

Does not know why an instance is chosen, nor what becomes of a leg's answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from kvferry.core.messages.timeline import Timeline
from kvferry.http.headers import RawHeaders
from kvferry.router.body import RequestBody
from kvferry.router.client_request import ClientRequest
from kvferry.router.headers import JSON, PROGRESS, REQUEST_ID, TIMELINE, LegHeaders
from kvferry.router.instances.instance import Absent, Instance, SglangFacts, VllmFacts
from kvferry.router.protocols.form import Form
from kvferry.router.request.hand_off import HandOff, PrefillOutcome
from kvferry.router.request.leg import Leg, LegChanges, LegState
from kvferry.router.request.leg_bodies import decode_body, is_of_one, prefill_body, shared_seed
from kvferry.router.request.next_turn import Conversation
from kvferry.router.request.record import RequestRecord
from kvferry.router.request.services import Services

_LATE_PREFILL_S = 5.0
"""How long P's answer may come after the client has all of D's."""
_MAX_PREFILL_ANSWER_BYTES = 16 * 2**20

_ENCODER = msgspec.json.Encoder()
_NOT_COMPRESSED = [(b"accept-encoding", b"identity")]
"""For answers that the router reads itself."""
_NO_MARKS = (VllmFacts, SglangFacts, Absent)
"""Instances that do not mark the events of their streams."""


class RequestLegs:
    """Used by one task. `close` it: it cuts what is still open, and has P release what nobody fetched."""

    def __init__(
        self,
        services: Services,
        request: ClientRequest,
        body: RequestBody,
        record: RequestRecord,
        conversation: Conversation,
    ) -> None:
        self._services, self._request, self._body, self._record = services, request, body, record
        self.conversation = conversation
        self._seed = shared_seed(body)
        self.may_continue = body.values.get("stream") is True and not services.config.trust_client_tickets
        """Whether the answer may go on from another instance, if that can be done exactly."""
        self._marked = self.may_continue and is_of_one(request.path, body)
        self._headers: LegHeaders | None = None
        self._changes = LegChanges()
        self.sent: list[Leg] = []
        self._hand_offs: list[HandOff] = []

    async def change(self) -> None:
        """Wait until something has become of a leg. Raises what should never have been raised."""
        await self._changes.wait()

    # What is sent.

    def prefill(self, instance: Instance, form: Form) -> HandOff:
        """Ask P to compute the prompt and keep its KV."""
        kept, seed = None, dict[str, int]()
        if form.shares_seed:
            kept, seed = self.conversation.take(instance), self._seed
            if is_of_one(self._request.path, self._body) and not self._services.config.trust_client_tickets:
                self.conversation.goes_on(self._services.pools.decode.instances)
        body = prefill_body(self._body, form, seed, None if kept is None else kept.params)
        leg = self._send("prefill", instance, body, _NOT_COMPRESSED + form.prefill_headers, computes=True)
        leg.collect(_MAX_PREFILL_ANSWER_BYTES)
        hand_off = HandOff(leg, form, kept, self.conversation, self._record)
        self._hand_offs.append(hand_off)
        return hand_off

    def decode(self, instance: Instance, hand_off: HandOff, beside: Instance | None = None) -> Leg:
        """Ask D to answer with P's KV: from here on it uses the ticket or gives it up, unless it is lost. If P has
        answered without one, D gets the request as it came."""
        hand_off.given = True
        form, body = hand_off.form, self._body.encode()
        if hand_off.ticket is not None:
            body = decode_body(
                self._body,
                hand_off.ticket,
                self._seed if form.shares_seed else {},
                form,
                returns_ticket=self._services.config.trust_client_tickets,
                keeps=self.conversation.keeps,
            )
        return self._send("decode", instance, body, decodes=True, beside=beside)

    def whole(self, instance: Instance) -> Leg:
        """Ask an instance for both phases."""
        return self._send("decode", instance, self._body.encode(), computes=True, decodes=True)

    def at_prefill(self, hand_off: HandOff) -> bytes:
        """The body for P when it does both phases after all, with the seed that it has sampled its token with."""
        seed: dict[str, Any] = self._seed if hand_off.form.shares_seed else {}
        return self._body.encode(**seed)

    async def again(self, instance: Instance, body: bytes) -> Leg:
        """A leg that gives a whole answer, or the rest of one, once it has begun to or has failed."""
        leg = self._send("continuation", instance, body, computes=True, decodes=True)
        while leg.state is LegState.SENT:
            await self._changes.wait()
        return leg

    def _send(
        self,
        kind: str,
        instance: Instance,
        body: bytes,
        own: RawHeaders | None = None,
        *,
        computes: bool = False,
        decodes: bool = False,
        beside: Instance | None = None,
    ) -> Leg:
        request, record, headers, own = self._request, self._record, self._headers, own or []
        if headers is None:
            headers = self._headers = self._headers_of_all()
        span = record.sent(kind, instance)
        if span is not None:
            own = span.headers() + own
        if self._marked and not isinstance(instance.facts, _NO_MARKS):
            own = [*own, (PROGRESS, b"1")]
        leg = self._services.legs.send(
            instance,
            request.method,
            request.target,
            headers.with_own(own),
            body,
            self._changes,
            uncached=record.uncached(instance),
            computes=computes,
            decodes=decodes,
            beside=beside,
        )
        leg.span = span
        self.sent.append(leg)
        return leg

    def _headers_of_all(self) -> LegHeaders:
        request = self._request
        timeline = _ENCODER.encode(Timeline(arrived=request.arrived, routed=self._record.decision.routed))
        always = [
            JSON,
            (REQUEST_ID, request.request_id),
            (TIMELINE, timeline),
            *self._services.connections.authorization,
        ]
        return LegHeaders(request.headers, always)

    # The end.

    async def prefill_ends(self, hand_off: HandOff) -> None:
        """In a concurrent hand-off P's own answer comes at any moment once the client has D's."""
        if hand_off.outcome is not PrefillOutcome.WAITING:
            return
        try:
            async with asyncio.timeout(_LATE_PREFILL_S):
                while hand_off.outcome is PrefillOutcome.WAITING:
                    await self._changes.wait()
        except TimeoutError:
            return

    def release(self) -> None:
        """Have P free what nobody fetches (any more)."""
        for one in self._hand_offs:
            one.release(self._services.releases, self._services.pools.decode, self._request.headers)

    def close(self) -> None:
        """Nobody wants what is still to come. May be called several times."""
        for leg in self.sent:
            leg.close()
        self.release()
