"""The KV that decode instances keep of a conversation, for the prefill instance that computes its next turn.

D has the KV of the answer, P does not and would compute the answer's tokens again. With `--keep-for-next-turn`, D keeps
its blocks and returns a ticket. The router removes the ticket from the answer, and gives it to P with the next request
of the same conversation, whichever router of the port that comes to. Each can be used once, and is released if it is of
no use. An instance that is leaving keeps what it has for a while (`--keep-while-draining-s`): the next turn fetches it
from there, and its own decode instance has all of the conversation then.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import Unavailable
from kvferry.core.messages.hand_off import HAND_OFF_FIELD
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.router.choice.policies.base import PromptTraits
from kvferry.router.instances.instance import Instance, NotProbed
from kvferry.router.instances.pools import Pools
from kvferry.router.instances.shared_state import SharedState, TicketRow
from kvferry.router.request.releases import Releases

logger = logging.getLogger(__name__)

_MAX_TICKET = 64 * 1024
_MAX_CONVERSATIONS = 8192
_MAX_MODEL = 256
"""Characters of a model's name that tell conversations apart."""
_REMEMBERED_S = 480.0
"""How long D keeps blocks unless told otherwise (`decoder_kv_blocks_ttl`)."""

_LOOK_S = 0.5

_EVENT_END = b"\n\n"
_DATA = b"data: "
_MARK = b'"remote_transfer_id"'
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Ticket(msgspec.Struct):
    remote_transfer_id: str


@dataclass(frozen=True)
class KeptTicket:
    """`decode` keeps blocks until `until`, under `transfer_id`; `params` is what P gets in order to fetch them."""

    decode: Instance
    engine_id: str
    transfer_id: str
    params: dict[str, Any]
    until: float


class NextTurns:
    """Tickets by conversation, which all routers of one port share; those of conversations that were silent longest are
    dropped first. At worst a ticket is lost, and the next turn is computed."""

    def __init__(
        self, pools: Pools, state: SharedState, clock: Clock, releases: Releases, *, keep_while_draining_s: float
    ) -> None:
        self._pools, self._state, self._clock, self._releases = pools, state, clock, releases
        self._keep_while_draining_s = keep_while_draining_s
        self._leaving: dict[int, float] = {}
        """Since when instances are leaving, by their number."""

    def take(self, session: str, prefill: Instance) -> KeptTicket | None:
        """Where `prefill` fetches the KV of earlier turns; None if there is nothing that it can fetch, and what there
        is is released then. The process that keeps it may be gone."""
        kept = self._pop(session)
        if kept is None or kept.until <= self._clock.monotonic() or _is_another(kept):
            return None
        facts = prefill.facts
        if (
            isinstance(kept.decode.confirmed, NotProbed)
            or not isinstance(facts, InstanceFacts)
            or not _fits(kept, facts)
        ):
            self.release(kept)
            return None
        return kept

    def put_back(self, session: str, kept: KeptTicket) -> None:
        """The ticket has not reached the prefill instance that it was taken for: the next one may fetch it, unless
        there is a newer one or its instance has been leaving for too long."""
        try:
            if not self._is_of_use(kept.decode) or self._state.has_ticket(session):
                self.release(kept)
            else:
                self._insert(session, kept)
        except Unavailable:
            self.release(kept)

    def drop(self, session: str) -> None:
        """The conversation continues without a prefill instance, so the ticket is released."""
        kept = self._pop(session)
        if kept is not None:
            self.release(kept)

    def release(self, kept: KeptTicket) -> None:
        """Have D free what it keeps, which nobody will fetch. Returns at once; may be called several times."""
        if kept.until > self._clock.monotonic():
            self._releases.start(kept.decode, kept.transfer_id)

    async def release_all(self) -> None:
        """Release all at the end of the last router, as no turn comes any more. Returns once all instances know."""
        now, rows = self._clock.monotonic(), self._state.tickets()
        kept = [one for row in rows if row.until > now and (one := self._pop(row.session)) is not None]
        try:
            await self._releases.send_all([(one.decode, one.transfer_id) for one in kept])
        except asyncio.CancelledError:
            logger.warning(
                "stopped before all %d hand-offs kept for next turns were released: the rest end after"
                " decoder_kv_blocks_ttl",
                len(kept),
            )
            raise

    async def watch(self) -> None:
        """Drop tickets that are of no use any more; runs until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            with suppress(Unavailable):
                self.look()

    def look(self) -> None:
        """Drop tickets that have expired, or whose instance has been leaving for too long or is gone."""
        now, here = self._clock.monotonic(), {one.member: one for one in self._pools}
        for row in self._state.tickets():
            decode = here.get(row.member)
            is_of_use = decode is not None and self._is_of_use(decode)
            if row.until <= now or decode is None or not is_of_use or _is_another(_kept(row, decode)):
                kept = self._pop(row.session)
                if kept is not None and kept.decode.draining:
                    self.release(kept)
        self._leaving = {member: since for member, since in self._leaving.items() if member in here}

    def _is_of_use(self, decode: Instance) -> bool:
        """Whether a turn may still come for what this instance keeps: it stays, or has not been leaving for long."""
        if not decode.draining:
            self._leaving.pop(decode.member, None)
            return True
        now = self._clock.monotonic()
        return now - self._leaving.setdefault(decode.member, now) < self._keep_while_draining_s

    def _insert(self, session: str, kept: KeptTicket) -> None:
        params = msgspec.json.encode(kept.params)
        row = TicketRow(session, kept.decode.member, kept.engine_id, kept.transfer_id, params, kept.until)
        for gone in self._state.keep_ticket(row, _MAX_CONVERSATIONS):
            decode = next((one for one in self._pools if one.member == gone.member), None)
            if decode is not None and gone.transfer_id != kept.transfer_id:  # a stream may tell of it twice
                self.release(_kept(gone, decode))

    def _pop(self, session: str) -> KeptTicket | None:
        try:
            row = self._state.take_ticket(session)
        except Unavailable as error:
            logger.warning("a turn is computed without the last one's KV: %s", error)
            return None
        decode = None if row is None else next((one for one in self._pools if one.member == row.member), None)
        return None if row is None or decode is None else _kept(row, decode)

    def take_from_body(self, session: str, decode: Instance, body: bytes) -> bytes:
        """A whole answer without its ticket, which is remembered."""
        content, ticket = _without_ticket(body)
        if ticket is not None:
            self._keep(session, decode, ticket)
        return content

    def take_from_events(self, session: str, decode: Instance, events: bytes) -> bytes:
        """The last events of a stream without the ticket, which is remembered."""
        if _MARK not in events:
            return events
        left = []
        for event in events.split(_EVENT_END)[:-1]:
            if event.startswith(_DATA + b"{"):
                event = _DATA + self.take_from_body(session, decode, event[len(_DATA) :])
            left.append(event + _EVENT_END)
        return b"".join(left)

    def _keep(self, session: str, decode: Instance, ticket: bytes) -> None:
        facts = decode.confirmed
        try:
            told = msgspec.json.decode(ticket, type=_Ticket)
            params = msgspec.json.decode(ticket, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        until = self._clock.monotonic() + _REMEMBERED_S
        engine_id = facts.engine_id if isinstance(facts, InstanceFacts) else ""
        kept = KeptTicket(decode, engine_id, told.remote_transfer_id, params, until)
        if not engine_id or len(ticket) > _MAX_TICKET or not self._is_of_use(decode):
            self.release(kept)
            self.drop(session)
            return
        try:
            self._insert(session, kept)
        except Unavailable as error:
            logger.warning("the next turn will be computed without this one's KV: %s", error)
            self.release(kept)


class Conversation:
    """What one request has to do with the turns before and after it. `keeps`: D keeps its KV for the next turn, and its
    answer brings the ticket."""

    __slots__ = ("_session", "_turns", "keeps")

    def __init__(self, turns: NextTurns, asked: PromptTraits) -> None:
        self._turns = turns
        self._session = f"{asked.model[:_MAX_MODEL]} {asked.session}"
        """Conversations of different models are different."""
        self.keeps = False

    def goes_on(self, instances: list[Instance]) -> None:
        """The answer has one choice, whose KV D keeps if all `instances` from which it may come are kvferry's: only
        their tickets can be removed from it."""
        known = [isinstance(one.confirmed, InstanceFacts) for one in instances if one.usable]
        self.keeps = bool(known) and all(known)

    def take(self, prefill: Instance) -> KeptTicket | None:
        """Where `prefill` fetches the KV of earlier turns; None: nowhere."""
        return self._turns.take(self._session, prefill)

    def drop(self) -> None:
        """Note that the conversation continues without a prefill instance."""
        self._turns.drop(self._session)

    def give_back(self, kept: KeptTicket, *, unused: bool) -> None:
        """P does not fetch it. If it is not `unused`, P may have begun to, and nobody else can any more."""
        if unused:
            self._turns.put_back(self._session, kept)
        else:
            self._turns.release(kept)

    def without_ticket(self, decode: Instance, content: bytes, *, events: bool) -> bytes:
        """A whole answer, or the last `events` of a stream, without its ticket, which is remembered."""
        if not self.keeps:
            return content
        take = self._turns.take_from_events if events else self._turns.take_from_body
        return take(self._session, decode, content)


def _without_ticket(body: bytes) -> tuple[bytes, bytes | None]:
    """Divide an answer from the ticket in it."""
    if _MARK not in body:
        return body, None
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body, None
    ticket = fields.pop(HAND_OFF_FIELD, None)
    if ticket is None:
        return body, None
    return msgspec.json.encode({**fields, HAND_OFF_FIELD: None}), bytes(ticket)


def _kept(row: TicketRow, decode: Instance) -> KeptTicket:
    params = msgspec.json.decode(row.params, type=dict[str, Any])
    return KeptTicket(decode, row.engine_id, row.transfer_id, params, row.until)


def _fits(kept: KeptTicket, prefill: InstanceFacts) -> bool:
    """Whether P reads what D writes, as far as both say."""
    facts = kept.decode.facts
    return not isinstance(facts, InstanceFacts) or facts.tickets.is_readable_by(prefill.tickets)


def _is_another(kept: KeptTicket) -> bool:
    """Whether the process that kept the blocks is known to be gone: another answers in its place."""
    facts = kept.decode.facts
    return not isinstance(facts, NotProbed) and getattr(facts, "engine_id", None) != kept.engine_id
