"""One client's request on its way through the instances, from its plan to an answer.

Prefill on one instance, decode on another: one after the other, or both at once. A prefill instance that fails is
replaced by another, and after that by D itself, which then does both. Every way ends in an `Answer` for the client,
good or bad as the instance gave it, or raises `RequestError` when no instance gave any.

Owns the legs' tasks and the answers that are open. Who may still be tried is `Candidates`' to know, what P may hold
is `Tickets`'.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import PeerLost, RequestError, TransferError, Unavailable
from kvferry.core.timeline import Timeline
from kvferry.http.errors import Unreachable
from kvferry.http.headers import RawHeaders
from kvferry.router.body import RequestBody
from kvferry.router.candidates import Candidates
from kvferry.router.chooser import Chooser
from kvferry.router.config import RouterConfig
from kvferry.router.errors import InstanceLost, InstanceSilent, Silent
from kvferry.router.headers import JSON, PROGRESS, REQUEST_ID, TIMELINE, for_instance
from kvferry.router.instance import Absent, Instance, InstanceFacts, SglangFacts, Unasked, VllmFacts
from kvferry.router.legs import (
    MAX_PREFILL_ANSWER_BYTES,
    Prefilled,
    PrefillFailed,
    PrefillOutcome,
    Refused,
    Verdict,
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
from kvferry.router.metrics import Metrics
from kvferry.router.next_turn import Kept, NextTurns
from kvferry.router.patience import Patience, retry_after_s
from kvferry.router.plan import Plan, Split
from kvferry.router.pools import Pools
from kvferry.router.progress import EventPassage, Progress
from kvferry.router.protocols.choose import can_pair, choose_form
from kvferry.router.protocols.form import Form
from kvferry.router.releases import Releases
from kvferry.router.replay import Replay
from kvferry.router.rescue import Rescue
from kvferry.router.tickets import Tickets
from kvferry.router.upstream import Answer, Upstream
from kvferry.router.watchdog import Wait

logger = logging.getLogger(__name__)

_LONGEST_BUSY_S = 60.0
"""For how long an instance is passed over at most, whatever its `Retry-After` says."""

_LATE_PREFILL_S = 5.0
"""How long P's answer may come after the client has all of D's."""

_ENCODER = msgspec.json.Encoder()

_NOT_COMPRESSED = [(b"accept-encoding", b"identity")]
"""For answers that the router reads itself."""


class ClientRequest(msgspec.Struct, frozen=True):
    """One request as it came. `path` and `query` are undecoded; `arrived` is seconds since the epoch."""

    method: str
    path: str
    query: str
    headers: RawHeaders
    body: bytes
    request_id: bytes
    arrived: float

    @property
    def target(self) -> str:
        """Path and query."""
        return f"{self.path}?{self.query}" if self.query else self.path


@dataclass(frozen=True)
class Services:
    """What every exchange uses."""

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
    """A request, its legs so far, and what they left behind. Ended by `close`, whatever happened."""

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
        self._tickets = Tickets(services.releases, services.pools.decode)
        self._rescue = Rescue(services.config, services.clock, services.pools, services.metrics, body)
        self._marks_wanted = is_stream_of_one(request.path, body) and not services.config.trust_client_tickets
        self._repeats = self._marks_wanted and services.config.continuations > 0 and repeats_itself(body)
        self._session = None if services.next_turns is None else candidates.session
        self._patience = Patience(services.config.busy_wait_s)
        self._seed = shared_seed(body)
        self._timeline = _ENCODER.encode(Timeline(arrived=request.arrived, routed=services.clock.wall()))
        self._keeps = False
        self._decode_lost: PeerLost | None = None
        self._answers: list[Answer] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self, plan: Plan) -> Answer:
        """The client's answer. Raises `RequestError`."""
        if isinstance(plan, Split):
            return await self._split()
        self._metrics.served("whole", plan.reason)
        self._drop_kept()
        return await self._whole()

    async def delivered(self) -> None:
        """The client has all of the answer. P's own, in a concurrent hand-off, is due any moment."""
        self._tickets.delivered()
        late = [task for task in self._tasks if not task.done()]
        if late:
            await asyncio.wait(late, timeout=_LATE_PREFILL_S)

    def passage_of(self, answer: Answer) -> EventPassage | None:
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
        """Whether the end of an answer may bring a ticket for the next turn, which the client must not see."""
        return self._keeps

    def take_ticket(self, answer: Answer, content: bytes, *, events: bool) -> bytes:
        """Keep the ticket of a whole answer, or of the last `events` of a stream, and return the content without it."""
        turns, session = self._services.next_turns, self._session
        if turns is None or session is None:
            return content
        take = turns.take_from_events if events else turns.take_from_body
        return take(session, answer.instance, content)

    async def continued(self, passage: EventPassage, lost: Answer) -> Answer | None:
        """The rest of an answer whose instance was lost, from another instance; None: there is none that could give
        it."""
        self._failed(lost.instance, "lost_in_answer")
        lost.close()
        for task in self._tasks:
            task.cancel()
        self._tickets.release_all(self._request.headers)  # nobody fetches any more: the rest is computed anew
        answer = await self._rescue.elsewhere(passage, lost.instance, self._call_for_rescue)
        if answer is not None:
            self._candidates.continued(answer.instance)
        return answer

    async def close(self) -> None:
        """Cut what is still open, have P release what nobody fetched, and see the legs' tasks to their ends, which is a
        matter of moments: all is done at once, even if this is cancelled. Raises what a leg should never have raised.
        """
        left = [task for task in self._tasks if not task.done()]
        for task in left:
            task.cancel()
        for answer in self._answers:
            answer.close()
        self._tickets.release_all(self._request.headers)
        await _ended(left)
        for task in self._tasks:
            if not task.cancelled():
                task.result()

    # The order of the legs.

    async def _split(self) -> Answer:
        for prefill in self._candidates.prefills():
            outcome = await self._hand_off(prefill)
            if isinstance(outcome, Answer):
                return outcome
            if isinstance(outcome, Refused):
                return outcome.answer
            if not outcome.by_decode:
                self._candidates.forgive_decodes()
        self._metrics.served("local")
        self._drop_kept()
        return await self._whole()

    def _drop_kept(self) -> None:
        """No prefill instance fetches the turns before."""
        if self._services.next_turns is not None and self._session is not None:
            self._services.next_turns.drop(self._session)

    async def _whole(self) -> Answer:
        """Both phases on one decode instance."""
        return await self._decode(whole_body(self._body))

    async def _hand_off(self, prefill: Instance) -> Answer | Refused | PrefillFailed:
        decodes = [one.facts for one in self._pools.decode.instances if one.usable]
        transfer_id = self._tickets.open(prefill)
        form = choose_form(self._services.config, transfer_id, prefill, decodes)
        can_hand_off = any(can_pair(prefill.facts, one.facts) for one in self._pools.decode.instances)
        if form is None or not can_hand_off:
            self._tickets.settle(transfer_id)
            self._failed(prefill, "no_bootstrap" if form is None else "no_pair")
            return PrefillFailed("it cannot hand off now")
        if form.concurrent and form.early is not None:
            self._metrics.served("concurrent")
            return await self._concurrent(prefill, form, form.early)
        self._metrics.served("sequential")
        return await self._sequential(prefill, form)

    async def _sequential(self, prefill: Instance, form: Form) -> Answer | Refused | PrefillFailed:
        """P answers, then D is called with the ticket."""
        outcome = await self._prefill(prefill, form)
        if not isinstance(outcome, Prefilled):
            return outcome
        return await self._decode_with_ticket(prefill, outcome)

    async def _concurrent(
        self, prefill: Instance, form: Form, ticket: dict[str, Any]
    ) -> Answer | Refused | PrefillFailed:
        """P and D are called at once; D asks P itself.

        D's answer may begin before P's; P's leg then goes on beside it. When D fails, or P is done first, P's outcome
        decides: without it there is nothing for D to wait for, and when it comes from another engine than D asks, D is
        called again with P's ticket.
        """
        early = self._decode_body(ticket, form)
        prefilling = self._start(self._prefill(prefill, form))
        decoding = self._start(self._decode_beside(prefill, early, form.transfer_id, prefilling))
        await _either(prefilling, decoding)
        if decoding.done() and self._is_final(decoding.result()):
            return self._fetched(decoding.result(), form.transfer_id)
        if form.meets_in_a_room and decoding.done():
            await self._cancel(prefilling)
            return self._void(decoding.result(), form.transfer_id)
        outcome: PrefillOutcome = await prefilling
        if not isinstance(outcome, Prefilled) or outcome.params is None:
            await self._cancel(decoding)
            return self._without_ticket(prefill, outcome)
        if not _asked_there(outcome, ticket):
            await self._cancel(decoding)
            self._candidates.forgive_decodes()
            return await self._decode_with_ticket(prefill, outcome)
        answer: Answer | None = await decoding
        if self._is_final(answer):
            return self._fetched(answer, form.transfer_id)
        return await self._decode_with_ticket(prefill, outcome, answer)

    def _is_final(self, answer: Answer | None) -> bool:
        """Whether D's leg is over for good, whatever P says: it served, or nobody else can and P is not to blame."""
        if answer is not None and verdict(answer.status) is Verdict.SERVED:
            return True
        if self._candidates.has_other_decode():
            return False
        if answer is None:
            return isinstance(self._decode_lost, Unreachable)
        return verdict(answer.status) is Verdict.BUSY and self._patience.is_over

    def _fetched(self, answer: Answer | None, transfer_id: str) -> Answer:
        if answer is None:
            raise unanswered(self._decode_lost)
        self._tickets.fetching(transfer_id)
        return answer

    def _void(self, answer: Answer | None, transfer_id: str) -> PrefillFailed:
        """D failed, and P with it, as nobody else can come into the room."""
        self._tickets.settle(transfer_id)
        if answer is not None:
            answer.close()
        return PrefillFailed("the decode instance that was to fetch failed", by_decode=True)

    def _without_ticket(self, prefill: Instance, outcome: PrefillOutcome) -> Refused | PrefillFailed:
        if not isinstance(outcome, Prefilled):
            return outcome
        self._failed(prefill, "no_ticket")
        return PrefillFailed("it keeps nothing for another instance")

    # The prefill leg.

    async def _prefill(self, prefill: Instance, form: Form) -> PrefillOutcome:
        kept = self._kept_for(prefill, form)
        body = prefill_body(self._body, form, self._seed_for(form), kept.params if kept is not None else {})
        wait = self._upstream.wait_for(prefill, body)
        try:
            answer = await self._call(prefill, body, wait, _NOT_COMPRESSED + form.prefill_headers)
        except PeerLost as error:
            if isinstance(error, Unreachable):
                self._tickets.settle(form.transfer_id)
                self._keep_for_another(kept)
            return PrefillFailed(str(error))
        if verdict(answer.status) is not Verdict.SERVED:
            answer.close()
            return PrefillFailed(f"{prefill} answered {answer.status}")
        if answer.status >= 400:
            self._tickets.settle(form.transfer_id)
            return Refused(answer)
        return await self._read_ticket(answer, form)

    async def _read_ticket(self, answer: Answer, form: Form) -> Prefilled | PrefillFailed:
        prefill = answer.instance
        try:
            content = answer.read_now(MAX_PREFILL_ANSWER_BYTES)
            if content is None:
                async with asyncio.timeout(self._services.config.answer_timeout_s):
                    content = await answer.read(MAX_PREFILL_ANSWER_BYTES)
            params = form.read_ticket(content)
        except (TransferError, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._failed(prefill, "broken_answer")
            return PrefillFailed(f"{prefill} gave no whole answer: {error}")
        finally:
            answer.close()  # P's leg is over, however long D's takes
        self._candidates.prefilled(prefill, prefill_usage(content))
        if params is None:
            self._tickets.settle(form.transfer_id)
            return Prefilled(form, None, None)
        self._tickets.received(form.transfer_id, params)
        origin = ticket_origin(params)
        if isinstance(prefill.facts, InstanceFacts) and (origin is None or origin.engine_id != prefill.facts.engine_id):
            prefill.facts = Unasked()  # Another process is at this address now; `Health` asks it.
        elif isinstance(prefill.facts, VllmFacts) and origin is not None and origin.port:
            prefill.facts = prefill.facts.with_origin(origin)
        return Prefilled(form, params, origin)

    # The decode leg.

    async def _decode_beside(
        self, prefill: Instance, body: bytes, transfer_id: str, prefilling: asyncio.Task[PrefillOutcome]
    ) -> Answer | None:
        """One decode instance's answer, good or bad; None when it broke off or could not be reached.

        Until P has answered, D waits for it: as long as P works, D may be silent.
        """
        instance = next(self._candidates.decodes(prefill), None)
        if instance is None:
            return None
        wait = self._upstream.wait_for(instance, body, beside=prefill)
        prefilling.add_done_callback(lambda _: wait.restart(self._services.clock.monotonic()))
        return await self._call_decode(instance, body, wait, transfer_id)

    def _decode_body(self, params: Any, form: Form) -> bytes:
        returns = self._services.config.trust_client_tickets
        self._keeps = not returns and self._may_keep(form)
        return decode_body(self._body, params, self._seed_for(form), form, returns_ticket=returns, keeps=self._keeps)

    def _may_keep(self, form: Form) -> bool:
        """Whether D is to keep its blocks for the next turn: where its ticket can be taken off the answer again."""
        return (
            self._session is not None
            and form.shares_seed
            and is_of_one(self._request.path, self._body)
            and all(isinstance(one.facts, InstanceFacts) for one in self._pools.decode.instances)
        )

    def _kept_for(self, prefill: Instance, form: Form) -> Kept | None:
        """From where P fetches the turns before; the first that is reached, as it can be fetched once."""
        turns = self._services.next_turns
        return turns.take(self._session, prefill) if turns and self._session and form.shares_seed else None

    def _keep_for_another(self, kept: Kept | None) -> None:
        """P has not been reached."""
        if kept is not None and self._services.next_turns is not None and self._session is not None:
            self._services.next_turns.put_back(self._session, kept)

    async def _decode_with_ticket(self, prefill: Instance, outcome: Prefilled, last: Answer | None = None) -> Answer:
        if outcome.params is None:
            return await self._whole()
        form = outcome.form
        self._tickets.fetching(form.transfer_id)
        body = self._decode_body(outcome.params, form)
        answer = await self._decode(body, last, prefill, form.transfer_id)
        if verdict(answer.status) is Verdict.FAULT and isinstance(prefill.facts, VllmFacts):
            prefill.facts = Unasked()  # Another process may be at its address now; `Health` asks it.
        return answer

    async def _decode(
        self,
        body: bytes,
        last: Answer | None = None,
        prefill: Instance | None = None,
        transfer_id: str | None = None,
    ) -> Answer:
        """The first decode instance that serves, after a wait where all are full; else the last bad answer, so that the
        client sees what was wrong.

        With a ticket in the body, `prefill` is whose. `last` is an answer that another instance gave before. Raises
        `RequestError` when there is none.
        """
        while True:
            last = await self._decode_once(body, last, prefill, transfer_id)
            if verdict(last.status) is Verdict.SERVED or not await self._patience.waited(last):
                return last
            self._candidates.forgive_decodes()
            last = None

    async def _decode_once(
        self, body: bytes, last: Answer | None, prefill: Instance | None, transfer_id: str | None
    ) -> Answer:
        for instance in self._candidates.decodes(prefill):
            wait = self._upstream.wait_for(instance, body)
            answer = await self._call_decode(instance, body, wait, transfer_id)
            if answer is None:
                continue
            if verdict(answer.status) is Verdict.SERVED:
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

    async def _call_for_rescue(self, instance: Instance, body: bytes) -> Answer:
        return await self._call(instance, body, self._upstream.wait_for(instance, body))

    async def _call_decode(self, instance: Instance, body: bytes, wait: Wait, transfer_id: str | None) -> Answer | None:
        """Send a decode leg, with the ticket of `transfer_id` if there is one; None when it broke off.

        From here on the ticket is D's to spend or to give up, unless D is lost.
        """
        if transfer_id is not None:
            self._tickets.give(transfer_id)
        try:
            return await self._call(instance, body, wait)
        except PeerLost as error:
            self._decode_lost = error
            if transfer_id is not None:
                self._tickets.take_back(transfer_id)
            return None

    # Any leg.

    async def _call(self, instance: Instance, body: bytes, wait: Wait, own: RawHeaders | None = None) -> Answer:
        """Send a leg, with headers of the router's own, and wait for its answer's first bytes.

        An answer of load or fault is returned too, but the instance then counts as failed for this request.
        Raises `PeerLost`.
        """
        always: RawHeaders = [JSON, (REQUEST_ID, self._request.request_id), (TIMELINE, self._timeline)]
        if self._marks_wanted and not isinstance(instance.facts, VllmFacts | SglangFacts | Absent):
            always.append((PROGRESS, b"1"))
        headers = for_instance(self._request.headers, always + self._candidates.headers(instance) + (own or []))
        try:
            answer = await self._upstream.open(
                instance, self._request.method, self._request.target, headers, body, wait
            )
        except PeerLost as error:
            self._failed(instance, failure(error))
            self._rescue.failed(instance)
            raise
        self._answers.append(answer)
        if verdict(answer.status) is Verdict.BUSY:
            wait_s = min(retry_after_s(answer.headers), _LONGEST_BUSY_S)
            instance.busy_until = self._services.clock.monotonic() + wait_s
        if verdict(answer.status) is not Verdict.SERVED:
            self._failed(instance, str(answer.status))
        return answer

    def _failed(self, instance: Instance, reason: str) -> None:
        """The instance failed this request; it is not tried again for it."""
        self._candidates.failed(instance, reason)
        self._metrics.leg_failed(instance, reason)
        logger.info("request %s: %s failed: %s", self._request.request_id.decode(), instance, reason)

    def _seed_for(self, form: Form) -> dict[str, int]:
        return self._seed if form.shares_seed else {}

    def _start(self, leg: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a leg beside others; it is cancelled when the exchange ends."""
        task = asyncio.get_running_loop().create_task(leg)
        self._tasks.add(task)
        return task

    async def _cancel(self, leg: asyncio.Task[Any]) -> None:
        leg.cancel()
        await asyncio.wait({leg})


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """All of them, which have been cancelled, are done. Whoever cancels this too waits for them all the same."""
    cancelled: asyncio.CancelledError | None = None
    left = set(tasks)
    while left:
        try:
            _, left = await asyncio.wait(left)
        except asyncio.CancelledError as error:
            cancelled = error
            left = {task for task in left if not task.done()}
    if cancelled is not None:
        raise cancelled


async def _either(*tasks: asyncio.Task[Any]) -> None:
    """Until one of them is done. As `asyncio.wait`, which takes several times as long to set up."""
    woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: asyncio.Task[Any]) -> None:
        if not woken.done():
            woken.set_result(None)

    for task in tasks:
        task.add_done_callback(wake)
    try:
        await woken
    finally:
        for task in tasks:
            task.remove_done_callback(wake)


def _asked_there(outcome: Prefilled, early: dict[str, Any]) -> bool:
    """Whether P's ticket comes from where D was told to ask."""
    return outcome.origin is None or outcome.origin.engine_id == early["remote_engine_id"]


def failure(error: PeerLost) -> str:
    """Why a leg has no answer, as a label for metrics."""
    if isinstance(error, Unreachable):
        return "unreachable"
    return "silent" if isinstance(error, Silent) else "lost"


def unanswered(lost: PeerLost | None) -> RequestError:
    """What a client is told whose request no instance answered; the last one tried was `lost`."""
    if lost is None or isinstance(lost, Unreachable):
        return Unavailable("no decode instance can be reached; try again later")
    if isinstance(lost, Silent):
        return InstanceSilent("the decode instance did not answer in time, and there is no other to ask")
    return InstanceLost("the decode instance broke off before it answered, and there is no other to ask")
