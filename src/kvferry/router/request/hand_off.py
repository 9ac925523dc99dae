"""One hand-off as the router sees it: P's leg, its outcome, and the KV that P may hold for D.

Owns P's leg and its answer. Does not know which decode instance gets the ticket.
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
"""The outcome of P's leg. `nothing`: P has computed the prompt and keeps no KV for another instance; `refused`: P found
an error in the request, and its answer is the client's."""


class HandOff:
    """A hand-off from the moment that P's leg is sent. `decode_has_ticket`: a decode instance has the ticket, and
    fetches with it or gives it up. `previous_ticket`: for P to fetch the KV of the conversation's earlier turns."""

    __slots__ = (
        "_conversation", "_is_held", "_previous_ticket", "_record", "decode_has_ticket", "decode_leg", "form",
        "is_without_kv", "leg", "matches_early_ticket", "outcome", "prefill", "ticket",
    )  # fmt: skip

    def __init__(
        self,
        leg: Leg,
        form: Form,
        previous_ticket: KeptTicket | None,
        conversation: Conversation | None,
        record: RequestRecord,
    ) -> None:
        self.prefill, self.form, self.leg = leg.instance, form, leg
        self._previous_ticket, self._conversation, self._record = previous_ticket, conversation, record
        self.outcome: PrefillOutcome = "waiting"
        self.ticket: Any = form.early
        """The ticket for D: the early ticket, if there is one, until P's ticket has arrived."""
        self.matches_early_ticket = True
        """P's ticket comes from the engine that the early ticket names."""
        self.is_without_kv = False
        """No store took P's KV."""
        self.decode_has_ticket, self._is_held = False, True
        self.decode_leg: Leg | None = None
        """D's leg, if it was called with the early ticket."""
        self.prefill.load.num_tickets += 1
        leg.on_change = self._on_leg_change

    def _on_leg_change(self) -> bool:
        """Update the outcome from P's leg. Return False if the request has nothing to decide: D already has the same
        ticket, and has not answered yet."""
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
                return self._read_answer(leg.take())
            except ProtocolError:
                self._fail("wrong_ticket")
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self._fail("broken_answer")
        return True

    def _read_answer(self, answer: bytes) -> bool:
        """Read the ticket in P's answer. Return True if the request has something to decide."""
        prefill, facts = self.prefill, self.prefill.facts
        params = self.form.read_ticket(answer, from_kvferry=isinstance(facts, InstanceFacts))
        if params is None:
            self.outcome = "nothing"
            self.settle()
        else:
            self.outcome, self.ticket = "ticket", params
            source, self.is_without_kv = inspect_ticket(params)
            early = self.form.early
            if early is not None and source is not None:
                self.matches_early_ticket = source.engine_id == early.get("remote_engine_id", source.engine_id)
            if self.form.early_is_final:
                pass  # the early ticket contains no fact of the instance
            elif isinstance(facts, InstanceFacts) and (source is None or source.engine_id != facts.engine_id):
                prefill.invalidate()  # Another process is at this address now.
            elif isinstance(facts, VllmFacts) and source is not None and source.port:
                prefill.replace_facts(facts.with_source(source))
        self._record.prefilled(self.leg, prefill_usage(answer))
        is_fetching = self.decode_leg is not None and self.decode_leg.state == "sent"
        return not (params is not None and self.matches_early_ticket and is_fetching)

    def _fail(self, reason: str) -> None:
        self.outcome = "failed"
        self._record.failed(self.leg, reason)

    # Release of P's KV.

    def give_up(self) -> None:
        """End P's leg without a hand-off. The ticket of earlier turns goes back for the next P, unless P may have begun
        to fetch. The caller settles or releases afterwards."""
        self.leg.close()
        ticket, self._previous_ticket = self._previous_ticket, None
        if ticket is not None and self._conversation is not None:
            self._conversation.return_ticket(ticket, unused=self.leg.was_unreachable)

    def void_rendezvous(self) -> None:
        """End P's leg after D's leg has failed: the ticket of their rendezvous is void, so P holds no KV to release."""
        self.leg.close()
        self.outcome = "failed"
        self.settle()

    def settle(self) -> bool:
        """Record that P holds no KV, or is sent a release now. Return True if it may have held some."""
        was_held, self._is_held = self._is_held, False
        self.prefill.load.num_tickets -= was_held
        return was_held

    def release(self, releases: Releases, decodes: RolePool, client_headers: RawHeaders) -> None:
        """Let P free KV that no instance will fetch. Does not wait for P."""
        if self.outcome == "waiting" and self._previous_ticket is not None:
            self.give_up()
        if not self.settle():
            return
        match self.form.released_by:
            case "p":
                releases.start(self.prefill, self.form.transfer_id)
            case "d" if self.outcome == "ticket" and not self.decode_has_ticket and (decode := decodes.pick()):
                releases.release_through(decode, self.ticket, client_headers)


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
    """Read the usage from P's answer; empty if its numbers are invalid."""
    try:
        parsed = _ANSWER.decode(answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return PrefillUsage()
    usage, params = parsed.usage or _Usage(), parsed.kv_transfer_params
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
    """A key that only kvferry's connectors write."""
    remote_stores: list[str] | None = None


_TICKET = msgspec.json.Decoder(_Ticket)


def inspect_ticket(params: msgspec.Raw) -> tuple[KVSource | None, bool]:
    """The source of a ticket's KV, and True if no store took its KV, so that D would have to compute the prompt. The
    source is None if the ticket contains none, and has no port if D cannot ask there before P has answered."""
    try:
        ticket = _TICKET.decode(params)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None, False
    port = (ticket.remote_port or 0) if ticket.remote_prefixes is not None else 0
    host, ranks, seal = ticket.remote_host or "", ticket.remote_ranks, ticket.remote_address_seal
    source = KVSource(engine_id=ticket.remote_engine_id, host=host, port=port, ranks=ranks, seal=seal)
    return source, ticket.remote_stores == []
