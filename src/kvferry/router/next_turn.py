"""What decode instances keep of a conversation, for the prefill instance that computes its next turn.

D has the KV of the answer, P has not: without it, P computes the answer's tokens once more. With
`--keep-for-next-turn` D keeps its blocks and answers with a ticket, which is taken off on its way to the client and
goes to P with the next request of the same conversation. Owns those tickets; each is good for once, and is released
where it turns out to be of no use.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.core.clock import Clock
from kvferry.router.instance import Instance, InstanceFacts
from kvferry.router.legs import HAND_OFF_FIELD
from kvferry.router.releases import Releases

_LONGEST_TICKET = 64 * 1024
_MOST_CONVERSATIONS = 8192
_REMEMBERED_S = 480.0
"""As long as D keeps blocks unless told otherwise (`decoder_kv_blocks_ttl`)."""

_LOOK_S = 0.5

_EVENT_END = b"\n\n"
_DATA = b"data: "
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Ticket(msgspec.Struct):
    remote_transfer_id: str


@dataclass(frozen=True)
class Kept:
    """`decode` keeps blocks until `until`, under `transfer_id`; `params` is what P is told so that it fetches them."""

    decode: Instance
    engine_id: str
    transfer_id: str
    params: dict[str, Any]
    until: float


class NextTurns:
    """By conversation; those that were silent longest are forgotten first."""

    def __init__(self, instances: Iterable[Instance], clock: Clock, releases: Releases) -> None:
        """`instances` is asked anew each time."""
        self._instances, self._clock, self._releases = instances, clock, releases
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def take(self, session: str, prefill: Instance) -> Kept | None:
        """From where `prefill` fetches the turns before; None when there is nothing to fetch."""
        kept = self._kept.pop(session, None)
        if kept is None or kept.until <= self._clock.monotonic() or not _is_same(kept):
            return None
        if not isinstance(prefill.facts, InstanceFacts):
            self._release(kept)
            return None
        return kept

    def put_back(self, session: str, kept: Kept) -> None:
        """It has not reached the prefill instance that it was taken for: it is the next one's to fetch, or to release
        as ever."""
        if session in self._kept or kept.decode.draining:
            self._release(kept)
        else:
            self._insert(session, kept)

    def drop(self, session: str) -> None:
        """The conversation goes on without a prefill instance."""
        kept = self._kept.pop(session, None)
        if kept is not None:
            self._release(kept)

    def take_from_body(self, session: str, decode: Instance, body: bytes) -> bytes:
        """A whole answer without the ticket that it brings, which is remembered."""
        return self._without_ticket(session, decode, body)

    def take_from_events(self, session: str, decode: Instance, events: bytes) -> bytes:
        """The last events of a stream, likewise."""
        if b'"remote_transfer_id"' not in events:
            return events
        return b"".join(
            _DATA + self._without_ticket(session, decode, event[len(_DATA) :]) + _EVENT_END
            if event.startswith(_DATA + b"{")
            else event + _EVENT_END
            for event in events.split(_EVENT_END)[:-1]
        )

    def _without_ticket(self, session: str, decode: Instance, body: bytes) -> bytes:
        if b'"remote_transfer_id"' not in body:
            return body
        try:
            fields = _FIELDS.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return body
        ticket = fields.pop(HAND_OFF_FIELD, None)
        if ticket is None:
            return body
        self._keep(session, decode, bytes(ticket))
        return msgspec.json.encode({**fields, HAND_OFF_FIELD: None})

    def _keep(self, session: str, decode: Instance, ticket: bytes) -> None:
        facts = decode.facts
        try:
            told = msgspec.json.decode(ticket, type=_Ticket)
            params = msgspec.json.decode(ticket, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        self.drop(session)
        until = self._clock.monotonic() + _REMEMBERED_S
        engine_id = facts.engine_id if isinstance(facts, InstanceFacts) else ""
        kept = Kept(decode, engine_id, told.remote_transfer_id, params, until)
        if decode.draining or not engine_id or len(ticket) > _LONGEST_TICKET:
            self._release(kept)
            return
        self._insert(session, kept)

    def _insert(self, session: str, kept: Kept) -> None:
        self._kept[session] = kept
        while len(self._kept) > _MOST_CONVERSATIONS:
            self._release(self._kept.popitem(last=False)[1])

    def _release(self, kept: Kept) -> None:
        if kept.until > self._clock.monotonic():
            self._releases.start(kept.decode, kept.transfer_id)

    async def watch(self) -> None:
        """Forget what is of no use any more; runs until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Forget what has had its time, or whose instance is drained or gone."""
        now, here = self._clock.monotonic(), set(self._instances)
        for session, kept in list(self._kept.items()):
            if kept.decode.draining and kept.decode in here:
                self._release(kept)
            if kept.until <= now or kept.decode.draining or kept.decode not in here or not _is_same(kept):
                del self._kept[session]


def _is_same(kept: Kept) -> bool:
    """Whether the process that keeps it is, as far as is known, still there."""
    facts = kept.decode.facts
    return isinstance(facts, InstanceFacts) and facts.engine_id == kept.engine_id
