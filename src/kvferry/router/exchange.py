"""One client's request on its way through the instances, from its plan to an answer.

Prefill on one instance, decode on another: one after the other, or both at once. If a prefill instance fails, another
one is tried, and after that D does both phases. The result is always an `Answer` for the client, whether the instance's
status is good or bad, or a `RequestError` if no instance gave an answer.

Owns the tasks of the legs and the answers that are open. `Candidates` knows which instances may still be tried,
`Tickets` what P may hold.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import PeerLost, ProtocolError, TransferError
from kvferry.core.instance_facts import InstanceFacts
from kvferry.core.timeline import Timeline
from kvferry.http.errors import Unreachable
from kvferry.http.headers import RawHeaders
from kvferry.router.body import RequestBody
from kvferry.router.candidates import Candidates
from kvferry.router.chooser import Chooser
from kvferry.router.client_request import ClientRequest
from kvferry.router.config import RouterConfig
from kvferry.router.errors import failure, unanswered
from kvferry.router.headers import JSON, PROGRESS, REQUEST_ID, TIMELINE, LegHeaders
from kvferry.router.instance import Absent, Instance, SglangFacts, Unasked, VllmFacts
from kvferry.router.legs import (
    MAX_PREFILL_ANSWER_BYTES,
    PrefillDone,
    PrefillFailed,
    PrefillOutcome,
    PrefillRefused,
    decode_body,
    is_of_one,
    is_stream_of_one,
    prefill_body,
    prefill_usage,
    repeats_itself,
    shared_seed,
    ticket_origin,
    verdict,
    whole_body,
)
from kvferry.router.legs_at_once import PrefillBeside, asked_there, can_wait_for, either, ended
from kvferry.router.metrics import Metrics
from kvferry.router.next_turn import Kept, NextTurns
from kvferry.router.patience import Patience, retry_after_s
from kvferry.router.plan import Plan, Split
from kvferry.router.pools import Pools
from kvferry.router.progress import EventPassage, Progress
from kvferry.router.protocols.choose import choose_form
from kvferry.router.protocols.form import Form
from kvferry.router.releases import Releases
from kvferry.router.replay import Replay
from kvferry.router.rescue import Rescue
from kvferry.router.tickets import Tickets
from kvferry.router.upstream import SentLeg, Upstream, UpstreamAnswer
from kvferry.router.watchdog import Wait

logger = logging.getLogger(__name__)

_LONGEST_BUSY_S = 60.0
"""For how long an instance is passed over at most, whatever its `Retry-After` says."""

_LATE_PREFILL_S = 5.0
"""How long P's answer may come after the client has all of D's."""

_ENCODER = msgspec.json.Encoder()

_NOT_COMPRESSED = [(b"accept-encoding", b"identity")]
"""For answers that the router reads itself."""


@dataclass(frozen=True)
class Services:
    """What all exchanges share."""

    config: RouterConfig
    clock: Clock
    pools: Pools
    upstream: Upstream
    releases: Releases
    metrics: Metrics
    chooser: Chooser
    next_turns: NextTurns | None = None
    """With --keep-for-next-turn."""


class Exchange:
    """A request, its legs so far, and what they have left to clean up. Must be ended by `close`, whatever happened."""

    def __init__(
        self,
        services: Services,
        request: ClientRequest,
        body: RequestBody,
        candidates: Candidates,
    ) -> None:
        self._services, self._request, self._body = services, request, body
        self._pools, self._upstream, self._metrics = services.pools, services.upstream, services.metrics
        self._candidates = candidates
        self._headers: LegHeaders
        self._tickets = Tickets(services.releases, services.pools.decode)
        self._rescue = Rescue(services.config, services.clock, services.pools, services.metrics, body)
        self._marks_wanted = is_stream_of_one(request.path, body) and not services.config.trust_client_tickets
        self._repeats = self._marks_wanted and services.config.continuations > 0 and repeats_itself(body)
        self._session = None if services.next_turns is None else candidates.session
        self._patience = Patience(services.config.busy_wait_s)
        self._seed = shared_seed(body)
        self._keeps = False
        self._decode_lost: PeerLost | None = None
        self._answers: list[UpstreamAnswer] = []
        self._sent: list[SentLeg] = []
        self._tasks: set[asyncio.Future[Any]] = set()

    async def serve(self, plan: Plan) -> UpstreamAnswer:
        """The client's answer. Raises `RequestError`."""
        self._headers = self._of_all_legs()
        if isinstance(plan, Split):
            return await self._split()
        self._metrics.served("whole", plan.reason)
        await self._drop_kept()
        return await self._whole()

    async def delivered(self) -> None:
        """The client has the whole answer. In a concurrent hand-off, P's own answer will come at any moment."""
        self._tickets.delivered()
        deadline = self._services.clock.monotonic() + _LATE_PREFILL_S
        while late := [task for task in self._tasks if not task.done()]:
            left_s = deadline - self._services.clock.monotonic()
            if left_s <= 0 or not (await asyncio.wait(late, timeout=left_s))[0]:
                return

    def passage_of(self, answer: UpstreamAnswer) -> EventPassage | None:
        """What another instance would need to continue this answer; None: no instance could."""
        self._rescue.begun_by(answer.instance)
        if answer.is_marked:
            return Progress()
        kind = type(answer.instance.facts)
        if self._repeats and answer.is_event_stream and answer.status == 200 and kind in (VllmFacts, SglangFacts):
            return Replay(kind)
        return None

    @property
    def brings_ticket(self) -> bool:
        """Whether the end of an answer may contain a ticket for the next turn, which the client must not see."""
        return self._keeps

    async def take_ticket(self, answer: UpstreamAnswer, content: bytes, *, events: bool) -> bytes:
        """Keep the ticket of a whole answer, or of the last `events` of a stream, and return the content without it."""
        turns, session = self._services.next_turns, self._session
        if turns is None or session is None:
            return content
        take = turns.take_from_events if events else turns.take_from_body
        return await take(session, answer.instance, content)

    async def continued(self, passage: EventPassage, lost: UpstreamAnswer) -> UpstreamAnswer | None:
        """The rest of an answer whose instance was lost, from another instance; None if no instance can give it."""
        self._failed(lost.instance, "lost_in_answer")
        lost.close()
        self._give_up_legs()
        self._tickets.release_all(self._request.headers)  # nobody fetches any more: the rest is computed anew
        answer = await self._rescue.elsewhere(passage, lost.instance, self._call_for_rescue)
        if answer is not None:
            self._candidates.continued(answer.instance)
        return answer

    async def close(self) -> None:
        """Close what is still open, have P release what nobody fetched, and wait for the tasks of the legs, which takes
        moments: all is done at once, even if this call is cancelled. Raises what a leg should never have raised."""
        self._give_up_legs()
        for answer in self._answers:
            answer.close()
        self._tickets.release_all(self._request.headers)
        if self._tasks:
            await ended([task for task in self._tasks if not task.done()])
            for task in self._tasks:
                if not task.cancelled():
                    task.result()

    def _give_up_legs(self) -> None:
        """Nobody wants what has not been answered yet."""
        for task in self._tasks:
            task.cancel()
        for leg in self._sent:
            self._upstream.abandon(leg)

    # The order of the legs.

    async def _split(self) -> UpstreamAnswer:
        while (prefill := self._candidates.next_prefill()) is not None:
            outcome = await self._hand_off(prefill)
            if isinstance(outcome, UpstreamAnswer):
                return outcome
            if isinstance(outcome, PrefillRefused):
                return outcome.answer
            if not outcome.by_decode:
                self._candidates.forgive_decodes()
        self._metrics.served("local")
        await self._drop_kept()
        return await self._whole()

    async def _drop_kept(self) -> None:
        """No prefill instance will fetch the KV of earlier turns."""
        if self._services.next_turns is not None and self._session is not None:
            await self._services.next_turns.drop(self._session)

    async def _whole(self) -> UpstreamAnswer:
        """Both phases on one decode instance."""
        return await self._decode(whole_body(self._body))

    async def _hand_off(self, prefill: Instance) -> UpstreamAnswer | PrefillRefused | PrefillFailed:
        readers = self._candidates.readers(prefill)
        decodes = [one.facts for one in readers if one.usable]
        transfer_id = self._tickets.open(prefill)
        form = choose_form(self._services.config, transfer_id, prefill, decodes)
        if form is None or not readers:
            self._tickets.settle(transfer_id)
            self._failed(prefill, "no_bootstrap" if form is None else "no_pair")
            return PrefillFailed("it cannot hand off now")
        if form.concurrent and form.early is not None:
            self._metrics.served("concurrent")
            return await self._concurrent(prefill, form, form.early)
        self._metrics.served("sequential")
        return await self._sequential(prefill, form)

    async def _sequential(self, prefill: Instance, form: Form) -> UpstreamAnswer | PrefillRefused | PrefillFailed:
        """P answers, then D is called with the ticket."""
        outcome = await self._prefill(prefill, form)
        if not isinstance(outcome, PrefillDone):
            return outcome
        return await self._decode_with_ticket(prefill, outcome)

    async def _concurrent(
        self, prefill: Instance, form: Form, ticket: dict[str, Any]
    ) -> UpstreamAnswer | PrefillRefused | PrefillFailed:
        """P and D are called at once; D asks P itself.

        D's answer may begin before P's; P's leg then continues beside it. If D fails, or P is done first, P's outcome
        decides: without it, D has nothing to wait for, and if it comes from another engine than D asks, D is called
        again with P's ticket.
        """
        early = self._decode_body(ticket, form)
        instance = self._candidates.next_decode(prefill)
        ours, theirs = self._send_both(prefill, instance, early, form)
        outcome: PrefillOutcome | None = None
        answer: UpstreamAnswer | None = None
        if ours is not None and theirs is not None:
            outcome, answer = await self._both_well(ours, theirs, form, ticket)
        if answer is not None:
            return self._fetched(answer, form.transfer_id)
        prefilling = self._start(self._prefill(prefill, form, ours, outcome))
        decoding = self._start(self._decode_beside(prefill, instance, early, form.transfer_id, prefilling, theirs))
        await either(prefilling, decoding)
        if decoding.done() and self._is_final(decoding.result()):
            return self._fetched(decoding.result(), form.transfer_id)
        if form.meets_in_a_room and decoding.done():
            await self._cancel(prefilling)
            return self._void(decoding.result(), form.transfer_id)
        outcome = await prefilling
        if not isinstance(outcome, PrefillDone) or outcome.params is None:
            await self._cancel(decoding)
            return self._without_ticket(prefill, outcome)
        if not asked_there(outcome, ticket):
            await self._cancel(decoding)
            self._candidates.forgive_decodes()
            return await self._decode_with_ticket(prefill, outcome)
        answer = await decoding
        if self._is_final(answer):
            return self._fetched(answer, form.transfer_id)
        return await self._decode_with_ticket(prefill, outcome, answer)

    def _send_both(
        self, prefill: Instance, decode: Instance | None, early: bytes, form: Form
    ) -> tuple[SentLeg | None, SentLeg | None]:
        """Send both legs at once, each of them only over a connection that is free; none to P if P is to get the KV of
        earlier turns, which has to be looked for first."""
        if self._session is not None or decode is None:
            return None, None
        body = prefill_body(self._body, form, self._seed_for(form))
        own = _NOT_COMPRESSED + form.prefill_headers
        ours = self._send(prefill, body, self._upstream.wait_for(prefill, body), own)
        if ours is None:
            return None, None
        self._tickets.give(form.transfer_id)
        return ours, self._send(decode, early, self._upstream.wait_for(decode, early, beside=prefill), [])

    def _send(self, instance: Instance, body: bytes, wait: Wait, own: RawHeaders) -> SentLeg | None:
        headers, request = self._lines(instance, own), self._request
        leg = self._upstream.send(instance, request.method, request.target, headers, body, wait)
        if leg is not None:
            self._sent.append(leg)
        return leg

    async def _both_well(
        self, prefill: SentLeg, decode: SentLeg, form: Form, ticket: dict[str, Any]
    ) -> tuple[PrefillOutcome | None, UpstreamAnswer | None]:
        """Wait for both legs, without a task for either, until D's answer has begun and is the client's, or until one
        of them needs more than to be waited for. Returns P's outcome, which may come later, and D's answer, as far as
        they are there."""

        def turned(beside: PrefillBeside) -> None:
            if beside.outcome is not None:
                decode.wait.restart(self._services.clock.monotonic())
            if not can_wait_for(beside.outcome, ticket):
                decode.wake()

        beside = PrefillBeside(prefill, lambda leg: self._prefilled(leg, form), turned)
        self._tasks.add(beside.over)
        beside.watch()
        while not (decode.has_begun or decode.is_lost):
            if beside.in_trouble if not beside.over.done() else not can_wait_for(beside.outcome, ticket):
                break
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            decode.wake_at_next(woken)
            await woken
        if beside.over.done():
            beside.over.result()
        if decode.has_begun and verdict(decode.status) == "served":
            if beside.outcome is None:
                self._go_on_beside(beside, form)
            return beside.outcome, self._answered(decode)
        beside.stop()
        return beside.outcome, None

    def _go_on_beside(self, beside: PrefillBeside, form: Form) -> None:
        """D's answer has begun before P's is here, which is taken when it comes, or read by a task if that takes
        more."""

        def turned(beside: PrefillBeside) -> None:
            if beside.outcome is None and not beside.over.done():
                beside.stop()
                self._start(self._prefill(beside.leg.instance, form, beside.leg))

        beside.turned = turned
        beside.look()

    def _prefilled(self, leg: SentLeg, form: Form) -> PrefillOutcome:
        """P's outcome, once its whole answer is here."""
        try:
            content = self._upstream.read_now(leg, MAX_PREFILL_ANSWER_BYTES)
        except TransferError as error:
            return self._broken(leg.instance, error)
        return self._take_ticket(leg.instance, content, form)

    def _answered(self, leg: SentLeg) -> UpstreamAnswer:
        return self._noted(self._upstream.finish_now(leg))

    def _is_final(self, answer: UpstreamAnswer | None) -> bool:
        """Whether D's leg is over for good, whatever P answers: it succeeded, or no other instance can serve and P is
        not the cause."""
        if answer is not None and verdict(answer.status) == "served":
            return True
        if self._candidates.has_other_decode():
            return False
        if answer is None:
            return isinstance(self._decode_lost, Unreachable)
        return verdict(answer.status) == "busy" and self._patience.is_over

    def _fetched(self, answer: UpstreamAnswer | None, transfer_id: str) -> UpstreamAnswer:
        if answer is None:
            raise unanswered(self._decode_lost)
        self._tickets.fetching(transfer_id)
        return answer

    def _void(self, answer: UpstreamAnswer | None, transfer_id: str) -> PrefillFailed:
        """D failed, and P with it, since no other instance can join the same bootstrap room."""
        self._tickets.settle(transfer_id)
        if answer is not None:
            answer.close()
        return PrefillFailed("the decode instance that was to fetch failed", by_decode=True)

    def _without_ticket(self, prefill: Instance, outcome: PrefillOutcome) -> PrefillRefused | PrefillFailed:
        if not isinstance(outcome, PrefillDone):
            return outcome
        self._failed(prefill, "no_ticket")
        return PrefillFailed("it keeps nothing for another instance")

    # The prefill leg.

    async def _prefill(
        self, prefill: Instance, form: Form, sent: SentLeg | None = None, outcome: PrefillOutcome | None = None
    ) -> PrefillOutcome:
        """What comes of P's leg. `sent`, `outcome`: the leg, and what came of it, where that is known already."""
        if outcome is not None:
            return outcome
        if self._session is None:
            return await self._prefill_with(None, prefill, form, sent)
        kept = await self._kept_for(prefill, form)
        try:
            outcome = await self._prefill_with(kept, prefill, form)
        finally:
            if kept is not None and not isinstance(outcome, PrefillDone):
                await self._not_fetched(kept, outcome)
        return outcome

    async def _prefill_with(
        self, kept: Kept | None, prefill: Instance, form: Form, sent: SentLeg | None = None
    ) -> PrefillOutcome:
        try:
            if sent is not None:
                answer = await self._finish(sent)
            else:
                body = prefill_body(self._body, form, self._seed_for(form), kept.params if kept is not None else {})
                wait = self._upstream.wait_for(prefill, body)
                answer = await self._call(prefill, body, wait, _NOT_COMPRESSED + form.prefill_headers)
        except PeerLost as error:
            if isinstance(error, Unreachable):
                self._tickets.settle(form.transfer_id)
            return PrefillFailed(str(error), reached=not isinstance(error, Unreachable))
        if verdict(answer.status) != "served":
            answer.close()
            return PrefillFailed(f"{prefill} answered {answer.status}")
        if answer.status >= 400:
            self._tickets.settle(form.transfer_id)
            return PrefillRefused(answer)
        return await self._read_ticket(answer, form)

    async def _read_ticket(self, answer: UpstreamAnswer, form: Form) -> PrefillDone | PrefillFailed:
        try:
            content = answer.read_now(MAX_PREFILL_ANSWER_BYTES)
            if content is None:
                async with asyncio.timeout(self._services.config.answer_timeout_s):
                    content = await answer.read(MAX_PREFILL_ANSWER_BYTES)
        except (TransferError, TimeoutError) as error:
            return self._broken(answer.instance, error)
        finally:
            answer.close()  # P's leg is over, however long D's takes
        return self._take_ticket(answer.instance, content, form)

    def _broken(self, prefill: Instance, error: Exception) -> PrefillFailed:
        self._failed(prefill, "broken_answer")
        return PrefillFailed(f"the answer of {prefill} is incomplete: {error}")

    def _take_ticket(self, prefill: Instance, content: bytes, form: Form) -> PrefillDone | PrefillFailed:
        try:
            params = form.read_ticket(content, from_kvferry=isinstance(prefill.facts, InstanceFacts))
        except ProtocolError as error:
            self._failed(prefill, "wrong_ticket")
            return PrefillFailed(f"the answer of {prefill} cannot be used: {error}")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return self._broken(prefill, error)
        self._candidates.prefilled(prefill, prefill_usage(content))
        if params is None:
            self._tickets.settle(form.transfer_id)
            return PrefillDone(form, None, None)
        self._tickets.received(form.transfer_id, params)
        origin = ticket_origin(params)
        if isinstance(prefill.facts, InstanceFacts) and (origin is None or origin.engine_id != prefill.facts.engine_id):
            prefill.learn(Unasked())  # Another process is at this address now; `Health` asks it.
        elif isinstance(prefill.facts, VllmFacts) and origin is not None and origin.port:
            prefill.learn(prefill.facts.with_origin(origin))
        return PrefillDone(form, params, origin)

    # The decode leg.

    async def _decode_beside(
        self,
        prefill: Instance,
        instance: Instance | None,
        body: bytes,
        transfer_id: str,
        prefilling: asyncio.Task[PrefillOutcome],
        sent: SentLeg | None,
    ) -> UpstreamAnswer | None:
        """One decode instance's answer, good or bad; None if the connection broke or could not be made.

        D waits until P has answered: as long as P works, D may be silent.
        """
        if instance is None:
            return None
        wait = self._upstream.wait_for(instance, body, beside=prefill) if sent is None else sent.wait
        prefilling.add_done_callback(lambda _: wait.restart(self._services.clock.monotonic()))
        return await self._call_decode(instance, body, wait, transfer_id, sent)

    def _decode_body(self, params: Any, form: Form) -> bytes:
        returns = self._services.config.trust_client_tickets
        self._keeps = not returns and self._may_keep(form)
        return decode_body(self._body, params, self._seed_for(form), form, returns_ticket=returns, keeps=self._keeps)

    def _may_keep(self, form: Form) -> bool:
        """Whether D may keep its blocks for the next turn: only if its ticket can be removed from the answer."""
        known = [isinstance(one.facts, InstanceFacts) for one in self._pools.decode.instances if one.usable]
        return (
            self._session is not None
            and form.shares_seed
            and is_of_one(self._request.path, self._body)
            and bool(known)
            and all(known)
        )

    async def _kept_for(self, prefill: Instance, form: Form) -> Kept | None:
        """Where P fetches the KV of earlier turns. Given only to the first P that can be reached, as it can be fetched
        once."""
        turns = self._services.next_turns
        return await turns.take(self._session, prefill) if turns and self._session and form.shares_seed else None

    async def _not_fetched(self, kept: Kept, outcome: PrefillOutcome | None) -> None:
        """P has failed, or its leg was cancelled (None). If P was reached, it may have begun to fetch, and nobody else
        can any more."""
        turns = self._services.next_turns
        if turns is None or self._session is None:
            return
        if isinstance(outcome, PrefillFailed) and not outcome.reached:
            await turns.put_back(self._session, kept)
        else:
            turns.release(kept)

    async def _decode_with_ticket(
        self, prefill: Instance, outcome: PrefillDone, last: UpstreamAnswer | None = None
    ) -> UpstreamAnswer:
        if outcome.params is None:
            return await self._whole()
        form = outcome.form
        self._tickets.fetching(form.transfer_id)
        body = self._decode_body(outcome.params, form)
        answer = await self._decode(body, last, prefill, form.transfer_id)
        if verdict(answer.status) == "fault" and isinstance(prefill.facts, VllmFacts):
            prefill.learn(Unasked())  # Another process may be at its address now; `Health` asks it.
        return answer

    async def _decode(
        self,
        body: bytes,
        last: UpstreamAnswer | None = None,
        prefill: Instance | None = None,
        transfer_id: str | None = None,
    ) -> UpstreamAnswer:
        """The first good answer of a decode instance, after a pause if all are full; otherwise the last bad answer, so
        that the client sees what was wrong.

        With a ticket in the body, `prefill` is where it comes from. `last` is an answer that another instance gave
        before. Raises `RequestError` when there is none.
        """
        while True:
            last = await self._decode_once(body, last, prefill, transfer_id)
            if verdict(last.status) == "served" or not await self._patience.waited(last):
                return last
            self._candidates.forgive_decodes()
            last = None

    async def _decode_once(
        self, body: bytes, last: UpstreamAnswer | None, prefill: Instance | None, transfer_id: str | None
    ) -> UpstreamAnswer:
        while (instance := self._candidates.next_decode(prefill)) is not None:
            wait = self._upstream.wait_for(instance, body)
            answer = await self._call_decode(instance, body, wait, transfer_id)
            if answer is None:
                continue
            if verdict(answer.status) == "served":
                return answer
            if last is not None:
                last.close()
            last = answer
        if last is None:
            last = await self._rescue.from_the_beginning(whole_body(self._body), self._call_for_rescue)
            if last is not None:
                self._tickets.release_all(self._request.headers)  # nobody fetches any more
        if last is None:
            raise unanswered(self._decode_lost)
        return last

    async def _call_for_rescue(self, instance: Instance, body: bytes) -> UpstreamAnswer:
        return await self._call(instance, body, self._upstream.wait_for(instance, body), [])

    async def _call_decode(
        self, instance: Instance, body: bytes, wait: Wait, transfer_id: str | None, sent: SentLeg | None = None
    ) -> UpstreamAnswer | None:
        """Send a decode leg, unless it is `sent`, with the ticket of `transfer_id` if there is one; None if the
        connection broke.

        From here on, D uses the ticket or gives it up, unless D is lost.
        """
        if transfer_id is not None:
            self._tickets.give(transfer_id)
        try:
            return await (self._call(instance, body, wait, []) if sent is None else self._finish(sent))
        except PeerLost as error:
            self._decode_lost = error
            if transfer_id is not None:
                self._tickets.take_back(transfer_id)
            return None

    # Any leg.

    async def _call(self, instance: Instance, body: bytes, wait: Wait, own: RawHeaders) -> UpstreamAnswer:
        """Send a leg, with the router's own headers, and wait for the first bytes of its answer.

        An answer that reports load or a fault is returned too, but the instance then counts as failed for this request.
        Raises `PeerLost`.
        """
        headers, request = self._lines(instance, own), self._request
        return await self._awaited(
            instance, self._upstream.open(instance, request.method, request.target, headers, body, wait)
        )

    async def _finish(self, sent: SentLeg) -> UpstreamAnswer:
        """The same for a leg that was sent."""
        return await self._awaited(sent.instance, self._upstream.finish(sent))

    async def _awaited(self, instance: Instance, answer: Coroutine[Any, Any, UpstreamAnswer]) -> UpstreamAnswer:
        try:
            return self._noted(await answer)
        except PeerLost as error:
            self._failed(instance, failure(error))
            self._rescue.failed(instance)
            raise

    def _noted(self, answer: UpstreamAnswer) -> UpstreamAnswer:
        self._answers.append(answer)
        instance, meaning = answer.instance, verdict(answer.status)
        if meaning == "busy":
            wait_s = min(retry_after_s(answer.headers), _LONGEST_BUSY_S)
            instance.busy_until = self._services.clock.monotonic() + wait_s
        if meaning != "served":
            self._failed(instance, str(answer.status))
        return answer

    def _of_all_legs(self) -> LegHeaders:
        request = self._request
        timeline = _ENCODER.encode(Timeline(arrived=request.arrived, routed=self._services.clock.wall()))
        always = [JSON, (REQUEST_ID, request.request_id), (TIMELINE, timeline), *self._upstream.authorization]
        return LegHeaders(request.headers, always)

    def _lines(self, instance: Instance, own: RawHeaders) -> bytes:
        """A leg's headers: the client's, the router's for all legs, and its `own`."""
        own = self._candidates.headers(instance) + own
        if self._marks_wanted and not isinstance(instance.facts, VllmFacts | SglangFacts | Absent):
            own.append((PROGRESS, b"1"))
        return self._headers.with_own(own)

    def _failed(self, instance: Instance, reason: str) -> None:
        """The instance failed this request and is not tried again for it."""
        self._candidates.failed(instance, reason)
        self._metrics.leg_failed(instance, reason)
        logger.info("request %s: %s failed: %s", self._request.request_id.decode(), instance, reason)

    def _seed_for(self, form: Form) -> dict[str, int]:
        return self._seed if form.shares_seed else {}

    def _start(self, leg: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a leg as a task; it is cancelled when the exchange ends."""
        task = asyncio.get_running_loop().create_task(leg)
        self._tasks.add(task)
        return task

    async def _cancel(self, leg: asyncio.Task[Any]) -> None:
        leg.cancel()
        await asyncio.wait({leg})
