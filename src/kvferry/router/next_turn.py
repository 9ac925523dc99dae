"""The KV that decode instances keep of a conversation, for the prefill instance that computes its next turn.

D has the KV of the answer, P does not and would compute the answer's tokens again. With `--keep-for-next-turn`, D keeps
its blocks and returns a ticket. The router removes the ticket from the answer, and gives it to P with the next request
of the same conversation. Owns those tickets; each can be used once, and is released if it is of no use.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.instance_facts import InstanceFacts
from kvferry.router.instance import Instance, Unasked
from kvferry.router.leg_bodies import HAND_OFF_FIELD
from kvferry.router.releases import Releases

logger = logging.getLogger(__name__)

_LONGEST_TICKET = 64 * 1024
_MOST_CONVERSATIONS = 8192
_REMEMBERED_S = 480.0
"""As long as D keeps blocks unless told otherwise (`decoder_kv_blocks_ttl`)."""

_LOOK_S = 0.5

_EVENT_END = b"\n\n"
_DATA = b"data: "
_MARK = b'"remote_transfer_id"'
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Ticket(msgspec.Struct):
    remote_transfer_id: str


@dataclass(frozen=True)
class Kept:
    """`decode` keeps blocks until `until`, under `transfer_id`; `params` is what P gets in order to fetch them."""

    decode: Instance
    engine_id: str
    transfer_id: str
    params: dict[str, Any]
    until: float


class TurnKeeper(Protocol):
    """The tickets of some conversations. Raises nothing: at worst a ticket is lost, and the next turn is computed."""

    async def take(self, session: str) -> Kept | None:
        """Remove and return a conversation's ticket."""

    async def put_back(self, session: str, kept: Kept) -> None:
        """The ticket has not reached the prefill instance that it was taken for: the next one may fetch it, unless
        there is a newer one."""

    async def keep(self, session: str, kept: Kept) -> None:
        """Keep a new ticket, and release the one before."""

    async def drop(self, session: str) -> None:
        """Release the ticket, if there is one."""


class KeptTickets:
    """Tickets by conversation; those of conversations that were silent longest are dropped first."""

    def __init__(self, instances: Iterable[Instance], clock: Clock, releases: Releases) -> None:
        """`instances` is called again whenever the list is needed."""
        self.instances, self.clock, self._releases = instances, clock, releases
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self.on_change: Callable[[Kept, bool], object] = lambda kept, is_here: None
        """Told of every ticket that is kept from now on, and of every one that is not any more."""

    def __len__(self) -> int:
        return len(self._kept)

    async def take(self, session: str) -> Kept | None:
        """As `TurnKeeper`; None if there is nothing to fetch, or the process that keeps it may be gone: it is released
        then, as it may also be there."""
        kept = self._pop(session)
        if kept is None or kept.until <= self.clock.monotonic() or _is_another(kept):
            return None
        if isinstance(kept.decode.facts, Unasked):
            self.release(kept)
            return None
        return kept

    async def put_back(self, session: str, kept: Kept) -> None:
        """Keep a ticket that was taken in vain, unless there is a newer one or its instance is leaving."""
        if session in self._kept or kept.decode.draining:
            self.release(kept)
        else:
            self._insert(session, kept)

    async def keep(self, session: str, kept: Kept) -> None:
        """Keep a new ticket, and release the one before."""
        before = self._pop(session)
        if before is not None and before.transfer_id != kept.transfer_id:  # a stream may tell of it twice
            self.release(before)
        if kept.decode.draining:
            self.release(kept)
        else:
            self._insert(session, kept)

    async def drop(self, session: str) -> None:
        """Release the ticket, if there is one."""
        kept = self._pop(session)
        if kept is not None:
            self.release(kept)

    def release(self, kept: Kept) -> None:
        """Nobody will fetch it. Returns at once; may be called several times."""
        if kept.until > self.clock.monotonic():
            self._releases.start(kept.decode, kept.transfer_id)

    async def release_all(self) -> None:
        """At the end, when no turn comes any more. Returns once all instances have been told."""
        kept = [one for session in list(self._kept) if (one := self._pop(session)) is not None]
        now = self.clock.monotonic()
        held = [(one.decode, one.transfer_id) for one in kept if one.until > now]
        try:
            await self._releases.send_all(held)
        except asyncio.CancelledError:
            logger.warning(
                "stopped before all %d hand-offs kept for next turns were released: the rest end after"
                " decoder_kv_blocks_ttl",
                len(held),
            )
            raise

    def _insert(self, session: str, kept: Kept) -> None:
        self._kept[session] = kept
        self.on_change(kept, True)
        while len(self._kept) > _MOST_CONVERSATIONS:
            if (oldest := self._pop(next(iter(self._kept)))) is not None:
                self.release(oldest)

    def _pop(self, session: str) -> Kept | None:
        kept = self._kept.pop(session, None)
        if kept is not None:
            self.on_change(kept, False)
        return kept

    async def watch(self) -> None:
        """Drop tickets that are of no use any more; runs until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Drop tickets that have expired, or whose instance is drained or gone."""
        now, here = self.clock.monotonic(), set(self.instances)
        for session, kept in list(self._kept.items()):
            if kept.decode.draining and kept.decode in here:
                self.release(kept)
            if kept.until <= now or kept.decode.draining or kept.decode not in here or _is_another(kept):
                self._pop(session)


class NextTurns:
    """Tickets by conversation; those of conversations that were silent longest are dropped first."""

    def __init__(self, own: KeptTickets) -> None:
        self.own = own
        self.keeper_of: Callable[[str], TurnKeeper] = lambda session: own

    async def take(self, session: str, prefill: Instance) -> Kept | None:
        """Where `prefill` fetches the KV of earlier turns; None if there is nothing that it can fetch."""
        keeper = self.keeper_of(session)
        if not isinstance(prefill.facts, InstanceFacts):
            await keeper.drop(session)
            return None
        kept = await keeper.take(session)
        if kept is None or _fits(kept.decode, prefill.facts):
            return kept
        self.release(kept)
        return None

    async def put_back(self, session: str, kept: Kept) -> None:
        """The ticket has not reached the prefill instance that it was taken for: the next one may fetch it, or it is
        released."""
        await self.keeper_of(session).put_back(session, kept)

    async def drop(self, session: str) -> None:
        """The conversation continues without a prefill instance, so the ticket is released."""
        await self.keeper_of(session).drop(session)

    def release(self, kept: Kept) -> None:
        """A ticket that was taken is of no use. Returns at once."""
        self.own.release(kept)

    async def take_from_body(self, session: str, decode: Instance, body: bytes) -> bytes:
        """A whole answer without its ticket, which is remembered."""
        content, ticket = _without_ticket(body)
        if ticket is not None:
            await self._keep(session, decode, ticket)
        return content

    async def take_from_events(self, session: str, decode: Instance, events: bytes) -> bytes:
        """The last events of a stream without the ticket, which is remembered."""
        if _MARK not in events:
            return events
        left = []
        for event in events.split(_EVENT_END)[:-1]:
            if event.startswith(_DATA + b"{"):
                event = _DATA + await self.take_from_body(session, decode, event[len(_DATA) :])
            left.append(event + _EVENT_END)
        return b"".join(left)

    async def _keep(self, session: str, decode: Instance, ticket: bytes) -> None:
        facts = decode.facts
        try:
            told = msgspec.json.decode(ticket, type=_Ticket)
            params = msgspec.json.decode(ticket, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        until = self.own.clock.monotonic() + _REMEMBERED_S
        engine_id = facts.engine_id if isinstance(facts, InstanceFacts) else ""
        kept = Kept(decode, engine_id, told.remote_transfer_id, params, until)
        if not engine_id or len(ticket) > _LONGEST_TICKET:
            self.release(kept)
            await self.drop(session)
        else:
            await self.keeper_of(session).keep(session, kept)


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


def _fits(decode: Instance, prefill: InstanceFacts) -> bool:
    """Whether P reads what D writes, as far as both say."""
    return not isinstance(decode.facts, InstanceFacts) or decode.facts.tickets.fit(prefill.tickets)


def _is_another(kept: Kept) -> bool:
    """Whether the process that kept the blocks is known to be gone: another answers in its place."""
    facts = kept.decode.facts
    return not isinstance(facts, Unasked) and getattr(facts, "engine_id", None) != kept.engine_id
