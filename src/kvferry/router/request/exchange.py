"""One client's request on its way through the instances, told from its plan to the end of its answer.

Prefill on one instance, decode on another: one after the other, or both at once. If a prefill instance fails, another
one is tried, and after that D does both phases; if a decode instance fails, another one gets the same ticket. The
client gets an instance's answer, whether its status is good or bad, or an error if no instance gave any.

Owns the request's legs and hand-offs. Legs need no task: each tells of its changes, and the story goes on.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.entropy import secret_hex
from kvferry.core.errors import PeerLost, RequestError
from kvferry.core.instance_facts import InstanceFacts
from kvferry.core.openai import SSE_DONE
from kvferry.core.timeline import Timeline
from kvferry.http.errors import Unreachable
from kvferry.http.headers import RawHeaders, find_header
from kvferry.http.response import Response
from kvferry.observe.tracing import Attributes, Span
from kvferry.router.body import RequestBody
from kvferry.router.choice.chooser import Chooser
from kvferry.router.choice.placement import Placement
from kvferry.router.choice.plan import Split, make_plan
from kvferry.router.choice.policies.base import Asked
from kvferry.router.client_request import ClientRequest
from kvferry.router.config import RouterConfig
from kvferry.router.errors import failure, unanswered
from kvferry.router.headers import JSON, PROGRESS, REQUEST_ID, SERVER_TIMING, TIMELINE, TIMING_WANTED, LegHeaders
from kvferry.router.instances.connections import Connections
from kvferry.router.instances.instance import Absent, Instance, SglangFacts, Unasked, VllmFacts
from kvferry.router.instances.pools import WITHOUT_KV_S, Pools
from kvferry.router.metrics import Metrics
from kvferry.router.protocols.choose import choose_form
from kvferry.router.protocols.form import Form
from kvferry.router.request.hand_off import HandOff, PrefillOutcome
from kvferry.router.request.leg import Leg, LegState
from kvferry.router.request.leg_bodies import (
    decode_body,
    is_of_one,
    is_without_kv,
    prefill_body,
    prefill_usage,
    repeats_itself,
    shared_seed,
    whole_body,
)
from kvferry.router.request.legs import Legs
from kvferry.router.request.next_turn import NextTurns
from kvferry.router.request.progress import EventPassage, Progress
from kvferry.router.request.relay import Relay, lost_within
from kvferry.router.request.releases import Releases
from kvferry.router.request.replay import Replay
from kvferry.router.request.rescue import Rescue

logger = logging.getLogger(__name__)

LONGEST_BUSY_S = 60.0
"""For how long an instance is passed over at most, whatever its `Retry-After` says."""
_LATE_PREFILL_S = 5.0
"""How long P's answer may come after the client has all of D's."""
_MAX_PREFILL_ANSWER_BYTES = 16 * 2**20
_LONGEST_READ = 64 * 2**20
"""Of a whole answer that is read for the ticket in it."""
_LONGEST_MODEL = 256
"""Characters of a model's name that tell conversations apart."""
_EVENT_BYTES = 240
"""Of one token in a stream, about: what decoding takes is counted by bytes, as answers are not read."""
_LEAST_PAUSE_S, _USUAL_PAUSE_S = 0.1, 1.0
"""Who says 0 in `Retry-After` is not asked without end; and who says nothing that can be read."""

_ENCODER = msgspec.json.Encoder()
_NOT_COMPRESSED = [(b"accept-encoding", b"identity")]
"""For answers that the router reads itself."""


@dataclass(frozen=True)
class Services:
    """What all exchanges share."""

    config: RouterConfig
    clock: Clock
    pools: Pools
    connections: Connections
    legs: Legs
    releases: Releases
    metrics: Metrics
    chooser: Chooser
    relay: Relay
    next_turns: NextTurns | None = None
    """With --keep-for-next-turn."""


class Exchange:
    """One request to one of `PROMPT_FIELDS`."""

    def __init__(self, services: Services, request: ClientRequest, body: RequestBody, response: Response) -> None:
        self._services, self._request, self._body, self._response = services, request, body, response
        self._clock, self._metrics, chooser = services.clock, services.metrics, services.chooser
        asked = chooser.read(request.path, body, request.first)
        self._decision = chooser.record(request.path, asked, request.request_id, request.arrived)
        self._placement = Placement(
            chooser, services.pools, services.metrics, services.config.retries, asked, self._decision
        )
        self._asked = asked
        self._session = None if services.next_turns is None else conversation(asked)
        self._span: Span | None = None
        self._seed = shared_seed(body)
        self._keeps = False
        """D keeps its KV for the conversation's next turn, and its answer brings the ticket."""
        self._busy_left_s = services.config.busy_wait_s
        self._may_continue = body.values.get("stream") is True and not services.config.trust_client_tickets
        self._marks_wanted = self._may_continue and is_of_one(request.path, body)
        self._headers: LegHeaders
        self._rescue = Rescue(services.config, services.clock, services.pools, services.metrics, body)
        self._legs: list[Leg] = []
        self._hand_offs: list[HandOff] = []
        self._failed: set[Leg] = set()
        self._fetched: HandOff | None = None
        """The one from which the answer for the client comes."""
        self._lost_decode: PeerLost | None = None
        self._news = asyncio.Event()
        self._error: Exception | None = None

    async def run(self) -> None:
        """Answer the client."""
        services, decision, delivered = self._services, self._decision, False
        try:
            if services.chooser.tracer is not None:
                about = {"kvferry.request_id": self._request.request_id.decode(errors="replace")}
                name = f"POST {self._request.path}"
                self._span = services.chooser.tracer.request(name, self._request.headers, decision.arrived, about)
            plan = self._placement.plan(make_plan(self._request.path, self._body, services.pools))
            decision.routed = self._clock.wall()
            self._headers = self._headers_of_all_legs()
            if isinstance(plan, Split):
                answer = await self._split()
            else:
                self._metrics.served("whole", plan.reason)
                answer = await self._whole()
            self._note_answer(answer)
            delivered = await self._deliver(answer)
            if delivered and self._fetched is not None:
                self._fetched.settle()  # D has fetched all that P kept for it, or has given it up
                await self._prefill_is_over()
        except RequestError as error:
            self._response.fail(error)
        finally:
            self._close(self._response.num_bytes if delivered else 0)

    # Who answers.

    async def _split(self) -> Leg:
        """The answer to a request that is to be handed off."""
        while (prefill := self._placement.next_prefill()) is not None:
            answer = await self._hand_off(prefill)
            if answer is not None:
                return answer
        self._metrics.served("local")
        return await self._whole()

    async def _whole(self) -> Leg:
        """Both phases on one decode instance."""
        if self._services.next_turns is not None and self._session is not None:
            self._services.next_turns.drop(self._session)  # no prefill instance will fetch that KV
        return await self._decode(self._body.encode(), None)

    async def _hand_off(self, prefill: Instance) -> Leg | None:
        """P computes the prompt, and D fetches the KV and answers. Returns the client's answer; None: P failed.

        If D can be told before P has answered where to ask, both are called at once. What then becomes of the two:

            P                   D                                         the request
            -                   has begun to answer                       D's answer; P goes on beside it
            -                   failed, no other can serve, not P's fault D's answer; if D is lost, P does both
            -                   failed, and they meet in a room           another P: the room is void
            waiting             waiting, or failed                        is waited for
            failed              -                                         another P
            refused the request -                                         P's answer
            keeps nothing       -                                         D does both; if both were called, another P
            ticket              waiting, asks the engine that has it      is waited for
            ticket without KV   not called yet                            P does both, from its prefix cache; else D
            ticket              waiting, asks another engine              D is called again, with the ticket
            ticket              failed, or not called yet                 D, or another one, is called with the ticket
        """
        services, placement = self._services, self._placement
        readers = placement.readers(prefill)
        form = choose_form(services.config, secret_hex(), prefill, [one.facts for one in readers if one.usable])
        if form is None or not readers:
            self._leg_failed(prefill, "no_bootstrap" if form is None else "no_pair")
            placement.forgive_decodes()
            return None
        at_once = form.concurrent and form.early is not None
        self._metrics.served("concurrent" if at_once else "sequential")
        hand_off = await self._send_prefill(prefill, form)
        d: Leg | None = None
        if at_once and (decode := placement.next_decode(prefill)) is not None:
            d = self._send_decode(decode, self._decode_body(form.early, form), hand_off, beside=prefill)
        while True:
            if d is not None and d.has_served:
                self._fetched = hand_off
                return d
            if at_once and (d is None or d.has_failed):
                if self._is_final(d):
                    hand_off.leg.close()
                    return d if d is not None and d.state is not LegState.LOST else await self._from_any_instance()
                if form.meets_in_a_room:
                    hand_off.abandon()
                    return None
            match hand_off.outcome:
                case PrefillOutcome.WAITING:
                    await self._change()
                    continue
                case PrefillOutcome.REFUSED:
                    await self._give_up(d, hand_off)
                    return hand_off.leg
                case PrefillOutcome.FAILED:
                    await self._give_up(d, hand_off)
                    hand_off.leg.close()
                    placement.forgive_decodes()
                    return None
                case PrefillOutcome.NOTHING if at_once:
                    await self._give_up(d, hand_off)
                    self._leg_failed(prefill, "no_ticket")
                    placement.forgive_decodes()
                    return None
                case PrefillOutcome.NOTHING:
                    prefill.gave_no_ticket = not isinstance(prefill.facts, InstanceFacts)
                    return await self._decode(self._body.encode(), hand_off)  # which may find it in a store
            if d is not None and not d.has_failed:
                if hand_off.is_as_promised():
                    d.restart(self._clock.monotonic())
                    await self._change()
                    continue
                d.close()
                placement.forgive_decodes()
                d = None
            return await self._decode_with_ticket(hand_off, d)

    async def _decode_with_ticket(self, hand_off: HandOff, last: Leg | None) -> Leg:
        """A decode instance is called with P's ticket. `last` has failed with the early one."""
        self._fetched = hand_off
        if hand_off.ticket is not None and is_without_kv(hand_off.ticket):
            self._leave_out(hand_off.prefill)
            body = whole_body(self._body, self._seed_for(hand_off.form))
            if (whole := await self._rescue.from_prefill(hand_off.prefill, body, self._send_and_wait)) is not None:
                return whole
        answer = await self._decode(self._decode_body(hand_off.ticket, hand_off.form), hand_off, last)
        if answer.verdict == "fault" and isinstance(hand_off.prefill.facts, VllmFacts):
            hand_off.prefill.learn(Unasked())  # Another process may be at its address now; `Health` asks it.
        return answer

    def _leave_out(self, prefill: Instance) -> None:
        """Its stores take no KV: split no requests over it until `Health` hears that they do, or for a while."""
        if isinstance(prefill.facts, InstanceFacts):
            prefill.learn(msgspec.structs.replace(prefill.facts, stores_take_kv=False))
        else:
            self._services.pools.prefill.leave_out(prefill, WITHOUT_KV_S)

    async def _decode(self, body: bytes, hand_off: HandOff | None, last: Leg | None = None) -> Leg:
        """The first good answer of a decode instance, after a pause if all are full; otherwise the last bad answer, so
        that the client sees what was wrong. Raises `RequestError` when there is none."""
        placement, prefill = self._placement, None if hand_off is None else hand_off.prefill
        last = None if last is None or last.state is LegState.LOST else last
        while True:
            while (instance := placement.next_decode(prefill)) is not None:
                leg = self._send_decode(instance, body, hand_off)
                while leg.state is LegState.SENT:
                    await self._change()
                if leg.has_served:
                    return leg
                if leg.state is not LegState.LOST:
                    if last is not None:
                        last.close()
                    last = leg
            if last is None:
                return await self._from_any_instance()
            pause_s = retry_after_s(last.headers)
            if last.verdict != "busy" or pause_s > self._busy_left_s:
                return last
            self._busy_left_s -= pause_s
            last.close()
            await asyncio.sleep(pause_s)
            placement.forgive_decodes()
            last = None

    async def _from_any_instance(self) -> Leg:
        """No decode instance answers: both phases on an instance of any role. Raises `RequestError` when there is
        none."""
        whole = await self._rescue.from_the_beginning(self._body.encode(), self._send_and_wait)
        if whole is None:
            raise unanswered(self._lost_decode)
        self._release_all()  # nobody fetches any more
        return whole

    def _is_final(self, d: Leg | None) -> bool:
        """Whether a decode leg that failed is over for good, whatever P answers: no other instance can serve, and P is
        not the cause."""
        if self._placement.has_other_decode():
            return False
        if d is None or d.state is LegState.LOST:
            return isinstance(self._lost_decode, Unreachable)
        return d.verdict == "busy" and self._busy_left_s <= 0

    async def _give_up(self, d: Leg | None, hand_off: HandOff) -> None:
        """P has failed: D need not wait for it, nor will P fetch the KV of earlier turns."""
        if d is not None:
            d.close()
        turns, kept, hand_off.kept = self._services.next_turns, hand_off.kept, None
        if turns is None or kept is None or self._session is None:
            return
        if hand_off.leg.was_unreachable:
            turns.put_back(self._session, kept)
        else:  # it may have begun to fetch, and nobody else can any more
            turns.release(kept)

    # The answer to the client.

    async def _deliver(self, answer: Leg) -> bool:
        """Send an answer as it comes; returns whether the client has all of it, and it is no error."""
        response, relay = self._response, self._services.relay
        if TIMING_WANTED in self._request.first:
            response.add_header(SERVER_TIMING, self._decision.server_timing())
        if answer.status < 300:
            if (passage := self._passage_of(answer)) is not None:
                return await self._stream(answer, passage)
            if self._keeps and answer.status == 200 and not answer.is_event_stream:
                content = await relay.read(answer, _LONGEST_READ)
                content = await self._take_ticket(answer, content, events=False)
                response.send(answer.status, content, relay.headers(answer, with_length=False))
                return True
        return await relay.send(answer, response) and answer.status < 400

    def _passage_of(self, answer: Leg) -> EventPassage | None:
        """What another instance would need to continue this answer; None: no instance could."""
        self._rescue.begun_by(answer.instance)
        if answer.is_marked:
            return Progress()
        kind = type(answer.instance.facts)
        could_repeat = self._may_continue and self._services.config.continuations > 0 and repeats_itself(self._body)
        if (
            could_repeat
            and answer.is_event_stream
            and answer.status == 200
            and kind in (VllmFacts, SglangFacts, InstanceFacts)
        ):
            return Replay(kind)
        return None

    async def _stream(self, answer: Leg, passage: EventPassage) -> bool:
        """A stream that another instance can continue."""
        response, relay = self._response, self._services.relay
        response.start(answer.status, relay.headers(answer, with_length=False))
        while True:
            try:
                await answer.relay(response, passage, movable=True)
                lost = PeerLost(f"{answer.instance} ended an answer early")
            except PeerLost as error:
                lost = error
            if (closing := passage.closing) is not None:
                if self._keeps:
                    closing = await self._take_ticket(answer, closing, events=True)
                response.end(closing)
                return True
            logger.warning("request %s: %s", response.request.id, lost)
            told = passage.error
            following = await self._continuation(answer, passage)
            if following is None:
                if told:
                    response.end(relay.hide(told) + SSE_DONE)
                else:
                    response.fail(lost_within(lost))
                return False
            answer = following

    async def _continuation(self, lost: Leg, passage: EventPassage) -> Leg | None:
        """The rest of an answer whose instance was lost, from another instance; None if no instance can give it."""
        self._leg_failed(lost.instance, "lost_in_answer")
        for leg in self._legs:
            leg.close()
        self._release_all()  # nobody fetches any more: the rest is computed anew
        return await self._rescue.elsewhere(passage, lost.instance, self._send_and_wait)

    async def _take_ticket(self, answer: Leg, content: bytes, *, events: bool) -> bytes:
        """Keep the ticket of a whole answer, or of the last `events` of a stream, and return the content without it."""
        turns, session = self._services.next_turns, self._session
        if turns is None or session is None:
            return content
        take = turns.take_from_events if events else turns.take_from_body
        return take(session, answer.instance, content)

    async def _prefill_is_over(self) -> None:
        """In a concurrent hand-off P's own answer comes at any moment once the client has D's."""
        deadline = self._clock.monotonic() + _LATE_PREFILL_S
        try:
            async with asyncio.timeout(deadline - self._clock.monotonic()):
                while any(one.outcome is PrefillOutcome.WAITING for one in self._hand_offs):
                    await self._change()
        except TimeoutError:
            return

    # Legs.

    async def _send_prefill(self, prefill: Instance, form: Form) -> HandOff:
        kept = None
        turns = self._services.next_turns
        if turns is not None and self._session is not None and form.shares_seed:
            kept = turns.take(self._session, prefill)
        body = prefill_body(self._body, form, self._seed_for(form), None if kept is None else kept.params)
        self._decision.prefill_sent = now = self._clock.wall()
        leg = self._send("prefill", prefill, body, _NOT_COMPRESSED + form.prefill_headers, now, computes=True)
        leg.collect(_MAX_PREFILL_ANSWER_BYTES)
        self._hand_offs.append(hand_off := HandOff(prefill, form, leg, kept))
        return hand_off

    def _send_decode(
        self, instance: Instance, body: bytes, hand_off: HandOff | None, beside: Instance | None = None
    ) -> Leg:
        """Send a decode leg, with the ticket of `hand_off` if there is one: from here on the instance uses it or gives
        it up, unless it is lost."""
        if hand_off is not None:
            hand_off.given = True
        self._decision.decode_sent = now = self._clock.wall()
        return self._send("decode", instance, body, [], now, computes=hand_off is None, decodes=True, beside=beside)

    async def _send_and_wait(self, instance: Instance, body: bytes) -> Leg:
        """A leg that gives a whole answer, or the rest of one, once it has begun to or has failed."""
        leg = self._send("continuation", instance, body, [], self._clock.wall(), computes=True, decodes=True)
        while leg.state is LegState.SENT:
            await self._change()
        return leg

    def _send(
        self,
        name: str,
        instance: Instance,
        body: bytes,
        own: RawHeaders,
        now: float,
        *,
        computes: bool,
        decodes: bool = False,
        beside: Instance | None = None,
    ) -> Leg:
        span = None if self._span is None else self._span.child(name, now, {"kvferry.instance": instance.name})
        if span is not None:
            own = span.headers() + own
        if self._marks_wanted and not isinstance(instance.facts, VllmFacts | SglangFacts | Absent):
            own = [*own, (PROGRESS, b"1")]
        uncached = max(0, self._asked.num_tokens - self._decision.cached.get(instance, 0))
        request = self._request
        leg = self._services.legs.send(
            instance,
            request.method,
            request.target,
            self._headers.with_own(own),
            body,
            self._changed,
            uncached=uncached,
            computes=computes,
            decodes=decodes,
            beside=beside,
        )
        leg.span = span
        self._legs.append(leg)
        return leg

    def _headers_of_all_legs(self) -> LegHeaders:
        request = self._request
        timeline = _ENCODER.encode(Timeline(arrived=request.arrived, routed=self._decision.routed))
        always = [
            JSON,
            (REQUEST_ID, request.request_id),
            (TIMELINE, timeline),
            *self._services.connections.authorization,
        ]
        return LegHeaders(request.headers, always)

    def _decode_body(self, ticket: Any, form: Form) -> bytes:
        """D's body. D may keep its blocks for the next turn only if its ticket can be removed from the answer."""
        returns = self._services.config.trust_client_tickets
        if not returns and self._session is not None and form.shares_seed:
            known = [
                isinstance(one.facts, InstanceFacts) for one in self._services.pools.decode.instances if one.usable
            ]
            self._keeps = bool(known) and all(known) and is_of_one(self._request.path, self._body)
        return decode_body(self._body, ticket, self._seed_for(form), form, returns_ticket=returns, keeps=self._keeps)

    def _seed_for(self, form: Form) -> dict[str, int]:
        return self._seed if form.shares_seed else {}

    # What becomes of them.

    async def _change(self) -> None:
        """Wait until something has become of a leg. Raises what should never have been raised."""
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error

    def _changed(self, leg: Leg) -> None:
        """For the legs, from the event loop: an exception is this request's, not the connection's."""
        try:
            self._note(leg)
        except Exception as error:  # noqa: BLE001 - raised by `_change`
            self._error = error
        self._news.set()

    def _note(self, leg: Leg) -> None:
        if leg.has_failed and leg not in self._failed and not leg.broke_off:
            self._failed.add(leg)
            if leg.error is not None:
                self._leg_failed(leg.instance, failure(leg.error), leg)
                self._rescue.failed(leg.instance)
            else:
                self._leg_failed(leg.instance, str(leg.status), leg)
                if leg.verdict == "busy":
                    pause_s = min(retry_after_s(leg.headers), LONGEST_BUSY_S)
                    leg.instance.pauses(self._clock.monotonic() + pause_s)
            if leg.error is not None and leg.work.decodes:
                self._lost_decode = leg.error
                for one in self._hand_offs:
                    one.given = False
        for hand_off in self._hand_offs:
            if hand_off.leg is leg:
                content = hand_off.look()
                if content is not None:
                    self._note_prefilled(hand_off, content)
                elif hand_off.failure:
                    self._leg_failed(leg.instance, hand_off.failure, leg)

    def _leg_failed(self, instance: Instance, reason: str, leg: Leg | None = None) -> None:
        """The instance failed this request and is not tried again for it."""
        self._placement.failed(instance, reason)
        self._metrics.leg_failed(instance, reason)
        logger.info("request %s: %s failed: %s", self._request.request_id.decode(), instance, reason)
        if leg is not None and leg.span is not None:
            leg.span.end(self._clock.wall(), {}, reason)

    def _note_prefilled(self, hand_off: HandOff, content: bytes) -> None:
        """P has answered: how long it took, and where its time went."""
        estimates, decision, leg = self._services.chooser.estimates, self._decision, hand_off.leg
        decision.prefill_answered, decision.prefill_usage = self._clock.wall(), (usage := prefill_usage(content))
        computed = usage.prompt_tokens - usage.cached_tokens if usage.prompt_tokens else leg.work.uncached
        estimates.prefilled(leg.instance.name, leg.work.ahead + computed, leg.ended_at - leg.begun_at)
        estimates.tokenized(self._asked.num_bytes, usage.prompt_tokens)
        if (answered := next((one for one in self._legs if one.work.decodes and one.has_served), None)) is not None:
            estimates.hand_off.add(answered.work.uncached, 0.0)  # The client had its first token by then.
        if leg.span is not None:
            told = usage.timeline or Timeline()
            for name, begun, ended in (
                ("queue", told.prefill_queued, told.prefill_started),
                ("prefill", told.prefill_started, told.prefill_done),
            ):
                if begun is not None and ended is not None:
                    leg.span.part(name, begun, ended)
            leg.span.end(decision.prefill_answered, {"kvferry.cached_tokens": usage.cached_tokens})

    def _note_answer(self, leg: Leg) -> None:
        """An answer for the client has begun; if it streams, with its first token."""
        self._decision.first_byte = self._clock.wall()
        if not (self._asked.streams and leg.work.decodes and leg.verdict == "served"):
            return
        estimates, work = self._services.chooser.estimates, leg.work
        if self._fetched is None:
            estimates.prefilled(leg.instance.name, work.ahead + work.uncached, leg.first_byte_at - leg.begun_at)
        elif self._fetched.leg.ended_at:
            estimates.hand_off.add(work.uncached, max(0.0, leg.first_byte_at - self._fetched.leg.ended_at))

    def _release_all(self) -> None:
        """Have P free what nobody fetches."""
        for one in self._hand_offs:
            one.release(self._services.releases, self._services.pools.decode, self._request.headers)

    def _close(self, num_bytes: int) -> None:
        """The request is over: cut what is still open, and have P release what nobody fetched. `num_bytes` of a whole
        answer were sent to the client, or 0."""
        decision, estimates = self._decision, self._services.chooser.estimates
        for leg in self._legs:
            leg.close()
        last = self._legs[-1] if self._legs else None
        if num_bytes and last is not None and last.work.decodes and last.first_byte_at and self._asked.streams:
            estimates.decoded(last.work.num_beside, num_bytes / _EVENT_BYTES, last.ended_at - last.first_byte_at)
        self._release_all()
        for one in self._hand_offs:
            if one.kept is not None and one.outcome is PrefillOutcome.WAITING and self._services.next_turns is not None:
                self._services.next_turns.release(one.kept)
        decision.done = now = self._clock.wall()
        self._metrics.phases(decision.phases())
        if self._span is not None:
            for leg in self._legs:
                if leg.span is not None:
                    leg.span.end(now, {})
            if decision.first_byte is not None:
                self._span.part("first byte", decision.arrived, decision.first_byte)
            about: Attributes = {"kvferry.decision": decision.reason, "kvferry.prompt_tokens": decision.prompt_tokens}
            self._span.end(now, about, "" if num_bytes else "not delivered")


def conversation(asked: Asked) -> str | None:
    """The name of the client's conversation, if it has one; conversations of different models are different."""
    return f"{asked.model[:_LONGEST_MODEL]} {asked.session}" if asked.session else None


def retry_after_s(headers: RawHeaders) -> float:
    """How long an answer of 429 or 503 asks to wait; a date, or a value that cannot be read, counts as missing."""
    told = find_header(headers, b"retry-after") or b""
    return max(_LEAST_PAUSE_S, float(told) if told.isdigit() and len(told) < 9 else _USUAL_PAUSE_S)
