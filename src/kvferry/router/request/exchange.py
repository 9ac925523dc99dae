"""The course of one request through the instances, from its plan to the end of its answer.

Prefill runs on one instance and decode on another, sequentially or concurrently. If a prefill instance fails, another
one is tried, and after that D does both phases; if a decode instance fails, another one gets the same ticket. The
client gets an instance's answer, whatever its status, or an error if no instance gave any.

A request waits for an instance if a fleet's controller has stopped all of them, and for the first probe of a new one.

`Placement` chooses the next instance, `RequestLegs` sends the legs, `HandOff` reads P's answer, `Delivery` sends the
answer to the client, and `RequestRecord` records the result. Legs have no tasks: a change of a leg wakes the task of
the request.
"""

from __future__ import annotations

import asyncio

import msgspec

from kvferry.core.errors import PeerLost, RequestError
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.http.errors import Unreachable
from kvferry.http.server.response import Response
from kvferry.router.body import RequestBody
from kvferry.router.choice.placement import Placement
from kvferry.router.choice.plan import Aggregated, Plan, is_to_be_disaggregated, make_plan
from kvferry.router.client_request import ClientRequest
from kvferry.router.errors import unanswered
from kvferry.router.headers import AGGREGATE
from kvferry.router.instances.instance import Instance, InstanceState, VllmFacts
from kvferry.router.request.delivery import Delivery
from kvferry.router.request.hand_off import HandOff
from kvferry.router.request.leg import Leg, retry_after_s
from kvferry.router.request.next_turn import Conversation
from kvferry.router.request.record import RequestRecord
from kvferry.router.request.request_legs import RequestLegs
from kvferry.router.request.services import Services

_POLL_INTERVAL_S, _COMMENT_INTERVAL_S = 0.1, 5.0
_FIRST_PROBE_POLL_S = 0.01
_MAX_START_RATIO, _EXTRA_START_S = 3.0, 60.0
"""Maximum wait for the start of an instance: this number of usual start times, plus this number of seconds."""


class Answer(msgspec.Struct, frozen=True):
    """The leg whose answer the client gets; `hand_off`: the source of its KV."""

    leg: Leg
    hand_off: HandOff | None = None


class Exchange:
    """One request to one of `PROMPT_FIELDS`."""

    def __init__(self, services: Services, request: ClientRequest, body: RequestBody, response: Response) -> None:
        chooser = services.chooser
        self._services, self._request, self._body, self._response = services, request, body, response
        traits = chooser.read(request.path, body, request.first)
        self._record = record = RequestRecord(services, request, traits)
        self._placement = Placement(
            chooser, services.pools, services.metrics, services.config.retries, traits, record.decision
        )
        turns = services.next_turns
        conversation = Conversation(turns, traits) if turns is not None and traits.session else None
        self._legs = RequestLegs(services, request, body, record, conversation)
        self._delivery = Delivery(services, response, body, self._legs, record)
        self._busy_left_s = services.config.busy_wait_s
        self._lost_decode: PeerLost | None = None

    async def run(self) -> None:
        """Serve the request and answer the client."""
        services, legs, num_bytes = self._services, self._legs, 0
        try:
            if not services.pools.decode.alive():
                await _wait_for_instances(services, self._response, streams=self._body.get("stream") is True)
            plan = self._placement.plan(self._plan())
            self._record.decision.routed = services.clock.wall()
            answer: Answer | None = None
            if isinstance(plan, Aggregated):
                services.metrics.served("whole", plan.reason)
            else:
                while answer is None and (prefill := self._placement.next_prefill()) is not None:
                    answer = await self._hand_off(prefill)
                if answer is None:
                    services.metrics.served("local")
            if answer is None:
                answer = await self._aggregated(plan)
            self._record.on_answered(answer.leg, None if answer.hand_off is None else answer.hand_off.leg)
            if await self._delivery.send(answer.leg):
                num_bytes = self._response.num_bytes
                if answer.hand_off is not None:
                    answer.hand_off.settle()  # D has fetched P's KV, or has given it up
                    if answer.hand_off.outcome == "waiting":
                        await legs.wait_for_prefill(answer.hand_off)
        except RequestError as error:
            self._response.fail(error)
        finally:
            legs.close()
            self._record.on_ended(legs.sent, num_bytes)

    def _plan(self) -> Plan:
        """Plan the request; its client may request an answer without a hand-off if an instance does both phases."""
        pools = self._services.pools
        if self._request.first.get(AGGREGATE) == b"1" and pools.decode.instances and pools.decode.answers_alone:
            return Aggregated("client")
        return make_plan(self._request.path, self._body, pools)

    async def _aggregated(self, plan: Plan) -> Answer:
        """Let one decode instance serve both phases. Raises `RequestError` if none can."""
        if not self._services.pools.decode.answers_alone and is_to_be_disaggregated(plan):
            raise unanswered(self._lost_decode, "prefill")
        if self._legs.conversation is not None:
            self._legs.conversation.drop()  # no prefill instance will fetch that KV
        return await self._decode(None)

    async def _hand_off(self, prefill: Instance) -> Answer | None:
        """P computes the prompt, and D fetches the KV and answers. None: P failed.

        If D can ask P before P has answered, both are called concurrently. The outcomes of both legs:

            P                   D                                         the request
            -                   has begun to answer                       D's answer; P goes on beside it
            -                   failed, no other can serve, not P's fault D's answer; if D is lost, P does both
            -                   failed, and both use a rendezvous         another P: the room is void
            waiting             waiting, or failed                        is waited for
            failed              -                                         another P
            refused the request -                                         P's answer
            keeps nothing       -                                         D does both; if both were called, another P
            ticket              waiting, asks the engine that has it      is waited for
            ticket without KV   not called yet                            P does both, from its prefix cache; else D
            ticket              waiting, asks another engine              D is called again, with the ticket
            ticket              failed, or not called yet                 D, or another one, is called with the ticket
        """
        placement, legs, record = self._placement, self._legs, self._record
        if prefill.state is InstanceState.NEW:
            await _wait_for_first_probe(self._services, prefill)
        form = placement.form(prefill)
        if isinstance(form, str):
            record.failed_instance(prefill, form)
            self._give_up(prefill)
            return None
        is_concurrent = form.concurrent and form.early is not None
        self._services.metrics.served("concurrent" if is_concurrent else "sequential")
        hand_off = legs.prefill(prefill, form)
        d: Leg | None = None  # called before P has answered
        last: Leg | None = None  # the same leg, once it has failed
        if is_concurrent and (decode := placement.next_decode(prefill)) is not None:
            d = legs.decode(decode, hand_off)
        while True:
            if d is not None and d.has_served:
                return Answer(d, hand_off)
            if d is not None and d.has_failed:
                self._decode_failed(d, hand_off)
                d, last = None, d
            if is_concurrent and d is None:
                if self._is_final(last):
                    hand_off.leg.close()
                    if last is None or last.state == "lost":
                        return await self._from_any_instance()
                    return Answer(last)
                if form.uses_rendezvous:
                    if hand_off.outcome == "failed":
                        placement.failed(prefill)
                    hand_off.void_rendezvous()
                    return None
            match hand_off.outcome:
                case "waiting":
                    await legs.changes.wait()
                case "ticket" if d is not None and hand_off.matches_early_ticket:
                    await legs.changes.wait()
                case "ticket":
                    if d is not None:
                        d.close()
                        placement.reset_failed()
                    return await self._with_ticket(hand_off, last)
                case "nothing" if not is_concurrent:
                    prefill.process.gave_no_ticket = not isinstance(prefill.facts, InstanceFacts)
                    return await self._decode(hand_off)  # D may find the KV in a store
                case outcome:
                    if (early := d or last) is not None:
                        early.close()
                    hand_off.give_up()
                    if outcome == "refused":
                        return Answer(hand_off.leg)
                    if outcome == "nothing":
                        record.failed(hand_off.leg, "no_ticket")
                    self._give_up(prefill)
                    return None

    def _give_up(self, prefill: Instance) -> None:
        """Give up this P, which failed. Failures of decode instances were its fault and are reset."""
        self._placement.failed(prefill)
        self._placement.reset_failed()

    async def _with_ticket(self, hand_off: HandOff, last: Leg | None) -> Answer:
        """Call a decode instance with P's ticket. `last` has failed with the early ticket."""
        prefill = hand_off.prefill
        if hand_off.is_without_kv:
            self._services.pools.prefill.mark_without_kv(prefill)
            if (answer_leg := await self._delivery.serve_on_prefill(hand_off)) is not None:
                return Answer(answer_leg, hand_off)
        answer = await self._decode(hand_off, last)
        if answer.leg.verdict == "fault" and isinstance(prefill.facts, VllmFacts):
            prefill.invalidate()  # Another process may be at its address now.
        return answer

    async def _decode(self, hand_off: HandOff | None, last: Leg | None = None) -> Answer:
        """The first good answer of a decode instance, after a pause if all are busy; otherwise the last bad answer, so
        that the client sees the reason. Raises `RequestError` if there is no answer."""
        placement, legs, prefill = self._placement, self._legs, None if hand_off is None else hand_off.prefill
        last = None if last is None or last.state == "lost" else last
        while True:
            while (instance := placement.next_decode(prefill)) is not None:
                leg = legs.aggregated(instance) if hand_off is None else legs.decode(instance, hand_off)
                while leg.state == "sent":
                    await legs.changes.wait()
                if leg.has_served:
                    return Answer(leg, hand_off)
                self._decode_failed(leg, hand_off)
                if leg.state != "lost":
                    if last is not None:
                        last.close()
                    last = leg
            if last is None:
                return await self._from_any_instance()
            pause_s = retry_after_s(last.head.headers)
            if last.verdict != "busy" or pause_s > self._busy_left_s:
                return Answer(last, hand_off)
            self._busy_left_s -= pause_s
            last.close()
            await asyncio.sleep(pause_s)
            placement.reset_failed()
            last = None

    async def _from_any_instance(self) -> Answer:
        """Serve both phases on an instance of any role, because no decode instance answers. Raises `RequestError` if no
        instance can."""
        leg = await self._delivery.serve_anywhere()
        if leg is None:
            raise unanswered(self._lost_decode)
        self._legs.release()  # no leg fetches P's KV
        return Answer(leg)

    def _decode_failed(self, leg: Leg, hand_off: HandOff | None) -> None:
        """Record the failure of a decode leg. A lost leg does not fetch P's KV."""
        self._placement.failed(leg.instance)
        self._record.failed(leg)
        if leg.error is not None:
            self._lost_decode = leg.error
            if hand_off is not None:
                hand_off.decode_has_ticket = False

    def _is_final(self, d: Leg | None) -> bool:
        """True if a decode leg failed for good, whatever P answers: no other instance can serve, and P is not the
        cause."""
        if self._placement.has_other_decode():
            return False
        if d is None or d.state == "lost":
            return isinstance(self._lost_decode, Unreachable)
        return d.verdict == "busy" and self._busy_left_s <= 0


async def _wait_for_instances(services: Services, response: Response, *, streams: bool) -> None:
    """Wait until an instance is alive, or until this has taken too long. During the wait, a client that `streams` gets
    comments, and the controller sees the number of waiting requests in `Traffic`."""
    pools, clock = services.pools, services.clock
    starts_s = pools.fleet_plan.starts_s
    if starts_s <= 0:
        return
    traffic, begun = services.chooser.traffic, clock.monotonic()
    comment_at = begun
    traffic.num_waiting += 1
    try:
        while not pools.decode.alive() and pools.fleet_plan.starts_s > 0:
            waited_s = clock.monotonic() - begun
            if waited_s > _MAX_START_RATIO * starts_s + _EXTRA_START_S:
                return
            if streams and begun + waited_s >= comment_at:
                comment_at += _COMMENT_INTERVAL_S
                response.comment(f"an instance is started: {waited_s:.0f} s so far, about {starts_s:.0f} s in all")
            await asyncio.sleep(_POLL_INTERVAL_S)
    finally:
        traffic.num_waiting -= 1


async def _wait_for_first_probe(services: Services, prefill: Instance) -> None:
    """Return once `Health` has probed a new instance, which takes milliseconds, or when it has taken too long. Until
    then its protocol is unknown."""
    deadline = services.clock.monotonic() + services.config.health_timeout_s
    while prefill.state is InstanceState.NEW and services.clock.monotonic() < deadline:  # noqa: ASYNC110 - rare
        await asyncio.sleep(_FIRST_PROBE_POLL_S)
