"""The legs of one request: what each is sent, which there are, and the hand-offs between them.

Does not know why an instance is chosen, nor what becomes of a leg's answer.
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
from kvferry.router.headers import JSON, PROGRESS, REQUEST_ID, TIMELINE, LegHeaders
from kvferry.router.instances.instance import Instance, SglangFacts, UnknownFacts, VllmFacts
from kvferry.router.protocols.form import Form
from kvferry.router.protocols.keys import with_client_keys
from kvferry.router.request.hand_off import HandOff
from kvferry.router.request.leg import Leg, LegChanges
from kvferry.router.request.next_turn import Conversation, KeptTicket
from kvferry.router.request.record import RequestRecord
from kvferry.router.request.services import Services

_LATE_PREFILL_S = 5.0
"""How long P's answer may come after the client has all of D's."""
_MAX_PREFILL_ANSWER_BYTES = 16 * 2**20

_ENCODER = msgspec.json.Encoder()
_ONE = (None, 1)
"""Numbers of choices that make one."""
_NOT_COMPRESSED = [(b"accept-encoding", b"identity")]
"""The header for answers that the router reads itself."""
_NO_MARKS = (VllmFacts, SglangFacts, UnknownFacts)
"""Instances that do not mark the events of their streams."""


class RequestLegs:
    """Used by one task. `close` it: it cuts what is still open, and has P release what nobody fetched."""

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
        """The conversation; None without --keep-for-next-turn, or if the client does not name one."""
        self._seed = shared_seed(body)
        self.may_continue = body.values.get("stream") is True and not services.config.trust_client_tickets
        """Whether the answer may go on from another instance, if that can be done exactly."""
        self._marked = self.may_continue and is_of_one(request.path, body)
        self._headers: LegHeaders | None = None
        self.changes = LegChanges()
        """Waited for by the request's task."""
        self.sent: list[Leg] = []
        self._hand_offs: list[HandOff] = []

    # What is sent.

    def prefill(self, instance: Instance, form: Form) -> HandOff:
        """Ask P to compute the prompt and keep its KV."""
        form = with_client_keys(form, self._body.kv_keys)
        kept: KeptTicket | None = None
        seed: dict[str, int] = {}
        if form.shares_seed:
            seed = self._seed
            if self.conversation is not None:
                kept = self.conversation.take(instance)
                if is_of_one(self._request.path, self._body) and not self._services.config.trust_client_tickets:
                    self.conversation.goes_on(self._services.pools.decode.instances)
        body = prefill_body(self._body, form, seed, None if kept is None else kept.params)
        leg = self._send("prefill", instance, body, _NOT_COMPRESSED + form.prefill_headers, computes=True)
        leg.collect(_MAX_PREFILL_ANSWER_BYTES)
        hand_off = HandOff(leg, form, kept, self.conversation, self._record)
        self._hand_offs.append(hand_off)
        return hand_off

    def decode(self, instance: Instance, hand_off: HandOff) -> Leg:
        """Ask D to answer with P's KV: from here on it uses the ticket or gives it up, unless it is lost. If P has
        answered without one, D gets the request as it came."""
        hand_off.given = True
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
                keeps=self.conversation is not None and self.conversation.keeps,
            )
        beside = hand_off.leg if hand_off.outcome == "waiting" else None
        leg = self._send("decode", instance, body, decodes=True, beside=beside)
        if beside is not None:
            hand_off.beside = leg
        return leg

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
        while leg.state == "sent":
            await self.changes.wait()
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
        beside: Leg | None = None,
    ) -> Leg:
        request, record, headers, own = self._request, self._record, self._headers, own or []
        if headers is None:
            headers = self._headers = self._headers_of_all()
        span = None
        if record.span is not None:
            span = record.span.child(kind, record.now(), {"kvferry.instance": instance.name})
            own = span.headers() + own
        if self._marked and not isinstance(instance.facts, _NO_MARKS):
            own = [*own, (PROGRESS, b"1")]
        leg = self._services.legs.send(
            instance,
            request.method,
            request.target,
            headers.with_own(own),
            body,
            self.changes,
            uncached=record.sent(kind, instance),
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
        """Wait for P's own answer, which in a concurrent hand-off comes at any moment once the client has D's."""
        try:
            async with asyncio.timeout(_LATE_PREFILL_S):
                while hand_off.outcome == "waiting":
                    await self.changes.wait()
        except TimeoutError:
            return

    def release(self) -> None:
        """Have P free what nobody fetches (any more)."""
        for one in self._hand_offs:
            one.release(self._services.releases, self._services.pools.decode, self._request.headers)

    def close(self) -> None:
        """End all legs: nobody wants what is still to come. May be called several times."""
        for leg in self.sent:
            leg.close()
        self.release()


def shared_seed(body: RequestBody) -> dict[str, int]:
    """The seed field that both legs get if the client gave none, so that D continues with P's random numbers; empty if
    it did."""
    return {} if body.values.get("seed") is not None else {"seed": RANDOM.getrandbits(63)}


def is_of_one(path: str, body: RequestBody) -> bool:
    """Whether the answer has one choice."""
    values = body.values
    if values.get("n") not in _ONE or values.get("best_of") not in _ONE or body.get("use_beam_search"):
        return False
    return path != "/v1/completions" or not is_batch(body.raw("prompt"))


def is_reproducible(body: RequestBody) -> bool:
    """Whether a second answer from another instance would be the same: greedy, or with a seed from the client."""
    if body.get("use_beam_search"):
        return False
    return body.values.get("temperature") == 0 or body.values.get("seed") is not None


def prefill_body(body: RequestBody, form: Form, seed: dict[str, int], kept: dict[str, Any] | None = None) -> bytes:
    """The body of the prefill leg: one token, not streamed, and the KV kept for another instance. `kept`: where P
    fetches the KV of earlier turns.

    SGLang's P generates one token whatever the request says, and expects the same request as D.
    """
    if form.uses_rendezvous:
        return body.encode(without=("stream_options",), **{**form.prefill_fields, "stream": False})
    fields: dict[str, Any] = {"max_tokens": 1, "n": 1, "stream": False, **seed, **form.prefill_fields}
    if "max_completion_tokens" in body:
        fields["max_completion_tokens"] = 1
    min_tokens = body.values.get("min_tokens")
    if isinstance(min_tokens, int):
        fields["min_tokens"] = min(min_tokens, 1)
    fields[HAND_OFF_FIELD] = {**form.produce, **kept, "transfer_id": form.transfer_id} if kept else form.produce
    return body.encode(without=("stream_options", "best_of", *form.prefill_without), **fields)


def decode_body(
    body: RequestBody, params: Any, seed: dict[str, int], form: Form, *, returns_ticket: bool, keeps: bool = False
) -> bytes:
    """The body of the decode leg, with a ticket: the client's own, with the seed that P's token was sampled with.

    Unless `returns_ticket`, D keeps KV for another turn only if the router removes its ticket from the answer
    (`keeps`), since the ticket has addresses that clients must not see.
    """
    if form.uses_rendezvous and form.early is not None:
        return body.encode(**{**form.early, **seed})
    return body.encode(**{HAND_OFF_FIELD: params if returns_ticket else _with_keeping(params, keeps), **seed})


def _with_keeping(params: Any, keeps: bool) -> Any:
    if isinstance(params, msgspec.Raw):
        try:
            params = msgspec.json.decode(params, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # D will say what is wrong with it
            return params
    return {**params, "keep_for_next_turn": keeps}
