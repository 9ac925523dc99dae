"""One hand-off as the router sees it: what P was asked, what came of it, and what P may hold for D.

Owns P's leg and what it says. Does not know to whom the ticket goes.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvferry.core.errors import ProtocolError
from kvferry.core.messages.hand_off import Count, RankAddress
from kvferry.core.messages.instance_facts import InstanceFacts, KVSource
from kvferry.core.messages.timeline import Timeline
from kvferry.http.headers import RawHeaders
from kvferry.router.choice.decisions import PrefillUsage
from kvferry.router.instances.instance import VllmFacts
from kvferry.router.instances.pools import RolePool
from kvferry.router.protocols.form import Form
from kvferry.router.request.leg import Leg
from kvferry.router.request.next_turn import Conversation, KeptTicket
from kvferry.router.request.record import RequestRecord
from kvferry.router.request.releases import Releases

PrefillOutcome = Literal["waiting", "ticket", "nothing", "refused", "failed"]
"""What P's leg has come to. `nothing`: P has computed, and keeps nothing for another instance; `refused`: it found an
error in the request, and its answer is the client's."""


class HandOff:
    """A hand-off from the moment that P is asked. `given`: a decode instance has the ticket, and fetches with it or
    gives it up. `kept`: what P was to fetch of the conversation's earlier turns."""

    __slots__ = (
        "_conversation", "_held", "_kept", "_record", "beside", "form", "given", "is_as_promised", "is_without_kv",
        "leg", "outcome", "prefill", "ticket",
    )  # fmt: skip

    def __init__(
        self, leg: Leg, form: Form, kept: KeptTicket | None, conversation: Conversation | None, record: RequestRecord
    ) -> None:
        self.prefill, self.form, self.leg = leg.instance, form, leg
        self._kept, self._conversation, self._record = kept, conversation, record
        self.outcome: PrefillOutcome = "waiting"
        self.ticket: Any = form.early
        """What D is sent: the early ticket, if there is one, and P's once that has come."""
        self.is_as_promised, self.is_without_kv = True, False
        """Whether P's ticket is of the engine that the early one named, and whether no store took its KV."""
        self.given, self._held = False, True
        self.beside: Leg | None = None
        """D's leg, where it was called with the early ticket."""
        self.prefill.load.num_tickets += 1
        leg.on_change = self._look

    def _look(self) -> bool:
        """Take in what has become of P's leg. False: there is nothing to decide, as D has the ticket that P has now
        written, and has not answered yet."""
        leg = self.leg
        if self.outcome != "waiting":
            return True
        if leg.has_failed:
            self._fail(leg.failure)
            if leg.was_unreachable:
                self.settle()
        elif leg.state == "ended" and leg.head.status >= 400:
            self.outcome = "refused"
            self.settle()
        elif leg.state == "ended":
            try:
                return self._read(leg.take())
            except ProtocolError:
                self._fail("wrong_ticket")
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self._fail("broken_answer")
        return True

    def _read(self, answer: bytes) -> bool:
        """Take in what P says of the hand-off. Returns whether there is something to decide."""
        prefill, facts = self.prefill, self.prefill.facts
        params = self.form.read_ticket(answer, from_kvferry=isinstance(facts, InstanceFacts))
        if params is None:
            self.outcome = "nothing"
            self.settle()
        else:
            self.outcome, self.ticket = "ticket", params
            origin, self.is_without_kv = about_ticket(params)
            early = self.form.early
            if early is not None and origin is not None:
                self.is_as_promised = origin.engine_id == early.get("remote_engine_id", origin.engine_id)
            if self.form.early_is_all:
                pass  # which says nothing of the instance
            elif isinstance(facts, InstanceFacts) and (origin is None or origin.engine_id != facts.engine_id):
                prefill.invalidate()  # Another process is at this address now.
            elif isinstance(facts, VllmFacts) and origin is not None and origin.port:
                prefill.amend(facts.with_origin(origin))
        self._record.prefilled(self.leg, prefill_usage(answer))
        is_fetching = self.beside is not None and self.beside.state == "sent"
        return not (params is not None and self.is_as_promised and is_fetching)

    def _fail(self, reason: str) -> None:
        self.outcome = "failed"
        self._record.failed(self.leg, reason)

    # What becomes of what P holds.

    def give_up(self) -> None:
        """D gets nothing from P: nor will P fetch the KV of earlier turns, which another may do if P has not begun
        to."""
        self.leg.close()
        kept, self._kept = self._kept, None
        if kept is not None and self._conversation is not None:
            self._conversation.give_back(kept, unused=self.leg.was_unreachable)

    def abandon(self) -> None:
        """P's leg is of no use any more, and P holds nothing."""
        self.leg.close()
        self.outcome = "failed"
        self.settle()

    def settle(self) -> bool:
        """P holds nothing (any more), or is told now to release it; returns whether it may have held something."""
        held, self._held = self._held, False
        self.prefill.load.num_tickets -= held
        return held

    def release(self, releases: Releases, decodes: RolePool, client_headers: RawHeaders) -> None:
        """Have P free what nobody will fetch. Returns at once."""
        if self.outcome == "waiting" and self._kept is not None:
            self.give_up()
        if not self.settle():
            return
        match self.form.released_by:
            case "p":
                releases.start(self.prefill, self.form.transfer_id)
            case "d" if self.outcome == "ticket" and not self.given and (one := decodes.pick()):
                releases.refuse(one, self.ticket, client_headers)


class _Details(msgspec.Struct):
    cached_tokens: Count = 0


class _Usage(msgspec.Struct):
    prompt_tokens: Count = 0
    prompt_tokens_details: _Details | None = None


class _Result(msgspec.Struct):
    timeline: Timeline | None = None


class _Params(msgspec.Struct):
    prefill_result: _Result | None = None


class _PrefillAnswer(msgspec.Struct):
    usage: _Usage | None = None
    kv_transfer_params: _Params | None = None


_ANSWER = msgspec.json.Decoder(_PrefillAnswer)


def prefill_usage(answer: bytes) -> PrefillUsage:
    """Read it from P's answer, whatever else is in it; of an answer with wrong numbers, nothing."""
    try:
        found = _ANSWER.decode(answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return PrefillUsage()
    usage, params = found.usage or _Usage(), found.kv_transfer_params
    result, details = params.prefill_result if params else None, usage.prompt_tokens_details
    num_cached = min(details.cached_tokens if details else 0, usage.prompt_tokens)
    return PrefillUsage(usage.prompt_tokens, num_cached, result.timeline if result else None)


class _Ticket(msgspec.Struct):
    remote_engine_id: str
    remote_host: str | None = None
    remote_port: int | None = None
    remote_ranks: list[RankAddress] | None = None
    remote_address_seal: str = ""
    remote_prefixes: Any = None
    """A key of kvferry's connectors only."""
    remote_stores: list[str] | None = None


_TICKET = msgspec.json.Decoder(_Ticket)


def about_ticket(params: msgspec.Raw) -> tuple[KVSource | None, bool]:
    """Where a ticket comes from, None if it does not say, and without a port if D cannot ask there before P has
    answered; and whether no store took its KV, so that D would have to compute the prompt."""
    try:
        ticket = _TICKET.decode(params)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None, False
    port = (ticket.remote_port or 0) if ticket.remote_prefixes is not None else 0
    host, ranks, seal = ticket.remote_host or "", ticket.remote_ranks, ticket.remote_address_seal
    origin = KVSource(engine_id=ticket.remote_engine_id, host=host, port=port, ranks=ranks, seal=seal)
    return origin, ticket.remote_stores == []
