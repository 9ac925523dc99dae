"""The legs of one request: their bodies and headers, and the hand-offs between them.

Does not know why an instance is chosen, nor how a leg's answer is used.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from kvferry.core.entropy import RANDOM
from kvferry.core.messages.hand_off import HAND_OFF_FIELD
from kvferry.core.messages.timeline import Timeline
from kvferry.http.headers import RawHeaders
from kvferry.router.body import RequestBody
from kvferry.router.choice.plan import is_batch
from kvferry.router.client_request import ClientRequest
from kvferry.router.headers import JSON, NOT_COMPRESSED, PROGRESS, REQUEST_ID, TIMELINE, LegHeaders
from kvferry.router.instances.instance import Instance, SglangFacts, UnknownFacts, VllmFacts
from kvferry.router.protocols.form import Form
from kvferry.router.protocols.keys import with_client_keys
from kvferry.router.request.hand_off import HandOff
from kvferry.router.request.leg import Leg, LegChanges
from kvferry.router.request.next_turn import Conversation, KeptTicket
from kvferry.router.request.record import RequestRecord
from kvferry.router.request.services import Services

_ENCODER = msgspec.json.Encoder()
_SINGLE = (None, 1)
"""Values of `n` and `best_of` for a single choice."""
_UNMARKED_FACTS = (VllmFacts, SglangFacts, UnknownFacts)
"""Instances that do not mark the events of their streams."""


class RequestLegs:
    """Sends the legs of one request, for one task. `close` cuts open legs, and lets P release KV that was not
    fetched."""

    max_prefill_answer_bytes = 16 * 2**20
    prefill_grace_s = 5.0
    """Seconds for which P's answer may come after the client has all of D's."""

    def __init__(
        self,
        services: Services,
        request: ClientRequest,
        body: RequestBody,
        record: RequestRecord,
        conversation: Conversation | None,
    ) -> None:
        self._services, self._request, self._body, self._record = services, request, body, record
        self.conversation = conversation
        """The conversation; None without --keep-for-next-turn, or if the client names none."""
        self._seed = shared_seed(body)
        self.may_continue = body.values.get("stream") is True and not services.config.trust_client_tickets
        """The answer may continue on another instance, if that can be done exactly."""
        self._wants_marks = self.may_continue and has_one_choice(request.path, body)
        self._headers: LegHeaders | None = None
        self.changes = LegChanges()
        """The task of the request waits for these changes."""
        self.sent: list[Leg] = []
        self._hand_offs: list[HandOff] = []

    # Sending.

    def prefill(self, instance: Instance, form: Form) -> HandOff:
        """Send P's leg: compute the prompt and keep its KV."""
        form = with_client_keys(form, self._body.kv_keys)
        ticket: KeptTicket | None = None
        seed: dict[str, int] = {}
        if form.shares_seed:
            seed = self._seed
            if self.conversation is not None:
                ticket = self.conversation.take(instance)
                if has_one_choice(self._request.path, self._body) and not self._services.config.trust_client_tickets:
                    self.conversation.keep_if_supported(self._services.pools.decode.instances)
        body = prefill_body(self._body, form, seed, None if ticket is None else ticket.params)
        leg = self._send("prefill", instance, body, [NOT_COMPRESSED, *form.prefill_headers], computes=True)
        leg.collect(self.max_prefill_answer_bytes)
        hand_off = HandOff(leg, form, ticket, self.conversation, self._record)
        self._hand_offs.append(hand_off)
        return hand_off

    def decode(self, instance: Instance, hand_off: HandOff) -> Leg:
        """Send D's leg: answer with P's KV. From now on D uses the ticket or gives it up, unless it is lost. If P has
        answered without a ticket, D gets the client's request."""
        hand_off.decode_has_ticket = True
        form = hand_off.form
        if hand_off.ticket is None:
            body = self._body.encode()
        else:
            body = decode_body(
                self._body,
                hand_off.ticket,
                self._seed if form.shares_seed else {},
                form,
                returns_ticket=self._services.config.trust_client_tickets,
                keeps_kv=self.conversation is not None and self.conversation.keeps_kv,
            )
        prefill_leg = hand_off.leg if hand_off.outcome == "waiting" else None
        leg = self._send("decode", instance, body, decodes=True, partner=prefill_leg)
        if prefill_leg is not None:
            hand_off.decode_leg = leg
        return leg

    def aggregated(self, instance: Instance) -> Leg:
        """Send a leg with both phases."""
        return self._send("decode", instance, self._body.encode(), computes=True, decodes=True)

    def aggregated_body(self, hand_off: HandOff) -> bytes:
        """The body with which P does both phases after all, with the seed by which it has sampled its token."""
        seed: dict[str, Any] = self._seed if hand_off.form.shares_seed else {}
        return self._body.encode(**seed)

    async def continue_on(self, instance: Instance, body: bytes) -> Leg:
        """Send a leg for an answer or the rest of one. Returns once the answer has begun or failed."""
        leg = self._send("continuation", instance, body, computes=True, decodes=True)
        while leg.state == "sent":
            await self.changes.wait()
        return leg

    def _send(
        self,
        kind: str,
        instance: Instance,
        body: bytes,
        extra_headers: RawHeaders | None = None,
        *,
        computes: bool = False,
        decodes: bool = False,
        partner: Leg | None = None,
    ) -> Leg:
        request, record, headers, extra_headers = self._request, self._record, self._headers, extra_headers or []
        if headers is None:
            headers = self._headers = self._common_headers()
        span = None
        if record.span is not None:
            span = record.span.child(kind, record.now(), {"kvferry.instance": instance.name})
            extra_headers = span.headers() + extra_headers
        if self._wants_marks and not isinstance(instance.facts, _UNMARKED_FACTS):
            extra_headers = [*extra_headers, (PROGRESS, b"1")]
        leg = self._services.legs.send(
            instance,
            request.method,
            request.target,
            headers.with_extra(extra_headers),
            body,
            self.changes,
            uncached=record.sent(kind, instance),
            computes=computes,
            decodes=decodes,
            partner=partner,
        )
        leg.span = span
        self.sent.append(leg)
        return leg

    def _common_headers(self) -> LegHeaders:
        request = self._request
        timeline = _ENCODER.encode(Timeline(arrived=request.arrived, routed=self._record.decision.routed))
        always = [
            JSON,
            (REQUEST_ID, request.request_id),
            (TIMELINE, timeline),
            *self._services.connections.authorization,
        ]
        return LegHeaders(request.headers, always)

    # Ending.

    async def wait_for_prefill(self, hand_off: HandOff) -> None:
        """Wait for P's answer, which in a concurrent hand-off is imminent once the client has D's."""
        try:
            async with asyncio.timeout(self.prefill_grace_s):
                while hand_off.outcome == "waiting":
                    await self.changes.wait()
        except TimeoutError:
            return

    def release(self) -> None:
        """Let P free KV that no leg fetches."""
        for hand_off in self._hand_offs:
            hand_off.release(self._services.releases, self._services.pools.decode, self._request.headers)

    def close(self) -> None:
        """End all legs, and release KV that was not fetched. May be called several times."""
        for leg in self.sent:
            leg.close()
        self.release()


def shared_seed(body: RequestBody) -> dict[str, int]:
    """The seed field for both legs, so that D continues with P's random numbers; empty if the client gave a seed."""
    return {} if body.values.get("seed") is not None else {"seed": RANDOM.getrandbits(63)}


def has_one_choice(path: str, body: RequestBody) -> bool:
    """True if the answer has a single choice."""
    values = body.values
    if values.get("n") not in _SINGLE or values.get("best_of") not in _SINGLE or body.get("use_beam_search"):
        return False
    return path != "/v1/completions" or not is_batch(body.raw("prompt"))


def is_reproducible(body: RequestBody) -> bool:
    """True if another instance would give the same answer: greedy, or with a seed from the client."""
    if body.get("use_beam_search"):
        return False
    return body.values.get("temperature") == 0 or body.values.get("seed") is not None


def prefill_body(
    body: RequestBody, form: Form, seed: dict[str, int], previous_ticket: dict[str, Any] | None = None
) -> bytes:
    """The body of the prefill leg: one token, not streamed, and the KV kept for another instance. `previous_ticket`:
    for P to fetch the KV of earlier turns.

    SGLang's P generates one token in any case, and expects the same request as D.
    """
    if form.uses_rendezvous:
        return body.encode(without=("stream_options",), **{**form.prefill_fields, "stream": False})
    fields: dict[str, Any] = {"max_tokens": 1, "n": 1, "stream": False, **seed, **form.prefill_fields}
    if "max_completion_tokens" in body:
        fields["max_completion_tokens"] = 1
    min_tokens = body.values.get("min_tokens")
    if isinstance(min_tokens, int):
        fields["min_tokens"] = min(min_tokens, 1)
    fields[HAND_OFF_FIELD] = (
        {**form.produce, **previous_ticket, "transfer_id": form.transfer_id} if previous_ticket else form.produce
    )
    return body.encode(without=("stream_options", "best_of", *form.prefill_excluded_fields), **fields)


def decode_body(
    body: RequestBody, params: Any, seed: dict[str, int], form: Form, *, returns_ticket: bool, keeps_kv: bool = False
) -> bytes:
    """The body of the decode leg: the client's, with a ticket and the seed by which P's token was sampled.

    Unless `returns_ticket`, D keeps KV for another turn only if the router removes its ticket from the answer
    (`keeps_kv`), since the ticket contains addresses that clients must not see.
    """
    if form.uses_rendezvous and form.early is not None:
        return body.encode(**{**form.early, **seed})
    return body.encode(**{HAND_OFF_FIELD: params if returns_ticket else _with_keep_flag(params, keeps_kv), **seed})


def _with_keep_flag(params: Any, keeps_kv: bool) -> Any:
    if isinstance(params, msgspec.Raw):
        try:
            params = msgspec.json.decode(params, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # D reports the error in it
            return params
    return {**params, "keep_for_next_turn": keeps_kv}
