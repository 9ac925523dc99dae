"""Tickets for the KV that decode instances keep of a conversation, for the prefill of its next turn.

D has the KV of the answer; P does not and would compute the answer's tokens again. With `--keep-for-next-turn`, D keeps
its blocks and returns a ticket. The router removes the ticket from the answer, and gives it to P with the next request
of the same conversation, whichever router of the port gets it. A ticket can be used once. Tickets that cannot be used
are released. A draining instance keeps its blocks for a while (`--keep-while-draining-s`): the next turn fetches them,
and its decode instance then has the whole conversation.
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


_EVENT_END = b"\n\n"
_DATA = b"data: "
_MARK = b'"remote_transfer_id"'
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Ticket(msgspec.Struct):
    remote_transfer_id: str


@dataclass(frozen=True)
class KeptTicket:
    """`decode` keeps blocks until `until`, under `transfer_id`; P gets `params` in order to fetch them."""

    decode: Instance
    engine_id: str
    transfer_id: str
    params: dict[str, Any]
    until: float


class NextTurns:
    """Tickets by conversation, shared by all routers of a port; the least recent conversations are dropped first. If a
    ticket is lost, the next turn is computed."""

    sweep_interval_s = 0.5
    ticket_ttl_s = 480.0
    """Default seconds for which D keeps blocks (`decoder_kv_blocks_ttl`)."""
    max_conversations = 8192
    max_ticket = 64 * 1024

    def __init__(
        self, pools: Pools, state: SharedState, clock: Clock, releases: Releases, *, keep_while_draining_s: float
    ) -> None:
        self._pools, self._state, self._clock, self._releases = pools, state, clock, releases
        self._keep_while_draining_s = keep_while_draining_s
        self._draining_since: dict[int, float] = {}
        """Start of draining, by the number of the instance."""

    def take(self, session: str, prefill: Instance) -> KeptTicket | None:
        """Take the ticket with which `prefill` fetches the KV of earlier turns. None if it can fetch nothing; a ticket
        that it cannot read is released. The process that keeps the KV may be gone."""
        ticket = self._pop(session)
        if ticket is None or ticket.until <= self._clock.monotonic() or _was_replaced(ticket):
            return None
        facts = prefill.facts
        if (
            isinstance(ticket.decode.confirmed, NotProbed)
            or not isinstance(facts, InstanceFacts)
            or not _can_read(ticket, facts)
        ):
            self.release(ticket)
            return None
        return ticket

    def return_ticket(self, session: str, ticket: KeptTicket) -> None:
        """Return a ticket that has not reached its prefill instance, for the next one. It is released if there is a
        newer ticket or its instance has been draining for too long."""
        try:
            if not self._is_usable(ticket.decode) or self._state.has_ticket(session):
                self.release(ticket)
            else:
                self._insert(session, ticket)
        except Unavailable:
            self.release(ticket)

    def drop(self, session: str) -> None:
        """Release the ticket of a conversation that continues without a prefill instance."""
        ticket = self._pop(session)
        if ticket is not None:
            self.release(ticket)

    def release(self, ticket: KeptTicket) -> None:
        """Let D free blocks that no instance will fetch. Returns at once; may be called several times."""
        if ticket.until > self._clock.monotonic():
            self._releases.start(ticket.decode, ticket.transfer_id)

    async def release_all(self) -> None:
        """Release all tickets at the end of the last router. Returns once all instances have got the releases."""
        now, rows = self._clock.monotonic(), self._state.tickets()
        tickets = [ticket for row in rows if row.until > now and (ticket := self._pop(row.session)) is not None]
        try:
            await self._releases.send_all([(ticket.decode, ticket.transfer_id) for ticket in tickets])
        except asyncio.CancelledError:
            logger.warning(
                "stopped before all %d hand-offs kept for next turns were released: the rest end after"
                " decoder_kv_blocks_ttl",
                len(tickets),
            )
            raise

    async def watch(self) -> None:
        """Periodically drop tickets that cannot be used. Runs until cancelled."""
        while True:
            await asyncio.sleep(self.sweep_interval_s)
            with suppress(Unavailable):
                self.sweep()

    def sweep(self) -> None:
        """Drop tickets that have expired, or whose instance has been draining for too long or is gone."""
        now, instances = self._clock.monotonic(), {instance.member: instance for instance in self._pools}
        for row in self._state.tickets():
            decode = instances.get(row.member)
            is_of_use = decode is not None and self._is_usable(decode)
            if row.until <= now or decode is None or not is_of_use or _was_replaced(_to_ticket(row, decode)):
                ticket = self._pop(row.session)
                if ticket is not None and ticket.decode.draining:
                    self.release(ticket)
        self._draining_since = {member: since for member, since in self._draining_since.items() if member in instances}

    def _is_usable(self, decode: Instance) -> bool:
        """True if a turn may still fetch KV from this instance: it is not draining, or not for long."""
        if not decode.draining:
            self._draining_since.pop(decode.member, None)
            return True
        now = self._clock.monotonic()
        return now - self._draining_since.setdefault(decode.member, now) < self._keep_while_draining_s

    def _insert(self, session: str, ticket: KeptTicket) -> None:
        params = msgspec.json.encode(ticket.params)
        row = TicketRow(session, ticket.decode.member, ticket.engine_id, ticket.transfer_id, params, ticket.until)
        for evicted in self._state.store_ticket(row, self.max_conversations):
            decode = next((instance for instance in self._pools if instance.member == evicted.member), None)
            if decode is not None and evicted.transfer_id != ticket.transfer_id:  # a stream may contain a ticket twice
                self.release(_to_ticket(evicted, decode))

    def _pop(self, session: str) -> KeptTicket | None:
        try:
            row = self._state.take_ticket(session)
        except Unavailable as error:
            logger.warning("a turn is computed without the last one's KV: %s", error)
            return None
        decode = (
            None if row is None else next((instance for instance in self._pools if instance.member == row.member), None)
        )
        return None if row is None or decode is None else _to_ticket(row, decode)

    def strip_body(self, session: str, decode: Instance, body: bytes) -> bytes:
        """Remove the ticket from an unstreamed answer, and store it."""
        content, ticket = _strip_ticket(body)
        if ticket is not None:
            self._store(session, decode, ticket)
        return content

    def strip_events(self, session: str, decode: Instance, events: bytes) -> bytes:
        """Remove the ticket from the last events of a stream, and store it."""
        if _MARK not in events:
            return events
        stripped = []
        for event in events.split(_EVENT_END)[:-1]:
            if event.startswith(_DATA + b"{"):
                event = _DATA + self.strip_body(session, decode, event[len(_DATA) :])
            stripped.append(event + _EVENT_END)
        return b"".join(stripped)

    def _store(self, session: str, decode: Instance, content: bytes) -> None:
        facts = decode.confirmed
        try:
            parsed = msgspec.json.decode(content, type=_Ticket)
            params = msgspec.json.decode(content, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        until = self._clock.monotonic() + self.ticket_ttl_s
        engine_id = facts.engine_id if isinstance(facts, InstanceFacts) else ""
        ticket = KeptTicket(decode, engine_id, parsed.remote_transfer_id, params, until)
        if not engine_id or len(content) > self.max_ticket or not self._is_usable(decode):
            self.release(ticket)
            self.drop(session)
            return
        try:
            self._insert(session, ticket)
        except Unavailable as error:
            logger.warning("the next turn will be computed without this one's KV: %s", error)
            self.release(ticket)


class Conversation:
    """The tickets of one request's conversation. `keeps_kv`: D keeps its KV for the next turn, and its answer
    contains the ticket."""

    max_model = 256
    """Characters of a model's name that are part of a conversation's key."""
    __slots__ = ("_session", "_turns", "keeps_kv")

    def __init__(self, turns: NextTurns, traits: PromptTraits) -> None:
        self._turns = turns
        self._session = f"{traits.model[: self.max_model]} {traits.session}"
        """The key of the conversation with this model: conversations with different models are different."""
        self.keeps_kv = False

    def keep_if_supported(self, instances: list[Instance]) -> None:
        """Let D keep the KV of an answer with one choice, if all `instances` that may give it are kvferry's: only their
        tickets can be removed from it."""
        is_kvferry = [isinstance(instance.confirmed, InstanceFacts) for instance in instances if instance.usable]
        self.keeps_kv = bool(is_kvferry) and all(is_kvferry)

    def take(self, prefill: Instance) -> KeptTicket | None:
        """Take the ticket with which `prefill` fetches the KV of earlier turns; None if there is none."""
        return self._turns.take(self._session, prefill)

    def drop(self) -> None:
        """Release the ticket, because the conversation continues without a prefill instance."""
        self._turns.drop(self._session)

    def return_ticket(self, ticket: KeptTicket, *, unused: bool) -> None:
        """Return a ticket that P does not use; unless it is `unused`, P may have begun to fetch and it is released."""
        if unused:
            self._turns.return_ticket(self._session, ticket)
        else:
            self._turns.release(ticket)

    def strip_ticket(self, decode: Instance, content: bytes, *, events: bool) -> bytes:
        """Remove the ticket from an unstreamed answer, or from the last `events` of a stream, and store it."""
        if not self.keeps_kv:
            return content
        strip = self._turns.strip_events if events else self._turns.strip_body
        return strip(self._session, decode, content)


def _strip_ticket(body: bytes) -> tuple[bytes, bytes | None]:
    """Separate an answer from the ticket in it."""
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


def _to_ticket(row: TicketRow, decode: Instance) -> KeptTicket:
    params = msgspec.json.decode(row.params, type=dict[str, Any])
    return KeptTicket(decode, row.engine_id, row.transfer_id, params, row.until)


def _can_read(ticket: KeptTicket, prefill: InstanceFacts) -> bool:
    """True if P reads the tickets that D writes, as far as their facts say."""
    facts = ticket.decode.facts
    return not isinstance(facts, InstanceFacts) or facts.tickets.is_readable_by(prefill.tickets)


def _was_replaced(ticket: KeptTicket) -> bool:
    """True if the process that kept the blocks is known to be gone: another one answers at its address."""
    facts = ticket.decode.facts
    return not isinstance(facts, NotProbed) and getattr(facts, "engine_id", None) != ticket.engine_id
