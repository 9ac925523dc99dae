"""One hand-off as the router sees it: what P was asked, what came of it, and what P may hold for D."""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from kvferry.core.errors import ProtocolError
from kvferry.core.instance_facts import InstanceFacts, KVSource
from kvferry.http.headers import RawHeaders
from kvferry.router.instances.instance import Instance, Unasked, VllmFacts
from kvferry.router.instances.pools import RolePool
from kvferry.router.protocols.form import Form
from kvferry.router.request.leg import Leg, LegState
from kvferry.router.request.leg_bodies import ticket_origin
from kvferry.router.request.next_turn import Kept
from kvferry.router.request.releases import Releases


class PrefillOutcome(Enum):
    """What P's leg has come to. `NOTHING`: P has computed, and keeps nothing for another instance; `REFUSED`: it found
    an error in the request, and its answer is the client's."""

    WAITING = auto()
    TICKET = auto()
    NOTHING = auto()
    REFUSED = auto()
    FAILED = auto()


class HandOff:
    """From the moment that P is asked. `ticket`: D's, once P has answered; `given`: a decode instance has it, and
    fetches with it or gives it up. `kept`: what P was to fetch of the conversation's earlier turns."""

    __slots__ = ("_held", "failure", "form", "given", "kept", "leg", "outcome", "prefill", "ticket")

    def __init__(self, prefill: Instance, form: Form, leg: Leg, kept: Kept | None) -> None:
        self.prefill, self.form, self.leg, self.kept = prefill, form, leg, kept
        self.outcome = PrefillOutcome.WAITING
        self.ticket: msgspec.Raw | None = None
        self.failure = ""
        """Why it failed, as a label for metrics, if its answer could not be used."""
        self.given, self._held = False, True
        prefill.num_tickets += 1

    def look(self) -> bytes | None:
        """Take in what has become of P's leg; returns P's answer when it is a good one."""
        leg = self.leg
        if self.outcome is not PrefillOutcome.WAITING:
            return None
        if leg.state is LegState.LOST or (leg.state is not LegState.SENT and leg.verdict != "served"):
            self.outcome = PrefillOutcome.FAILED
            if leg.was_unreachable:
                self.settle()
            return None
        if leg.state is not LegState.ENDED:
            return None
        if leg.status >= 400:
            self.outcome = PrefillOutcome.REFUSED
            self.settle()
            return None
        return self._read(leg.take())

    def _read(self, answer: bytes) -> bytes | None:
        prefill = self.prefill
        try:
            ticket = self.form.read_ticket(answer, from_kvferry=isinstance(prefill.facts, InstanceFacts))
        except ProtocolError:
            self.outcome, self.failure = PrefillOutcome.FAILED, "wrong_ticket"
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.outcome, self.failure = PrefillOutcome.FAILED, "broken_answer"
            return None
        if ticket is None:
            self.outcome = PrefillOutcome.NOTHING
            self.settle()
            return answer
        self.outcome, self.ticket = PrefillOutcome.TICKET, ticket
        origin = self.origin
        if isinstance(prefill.facts, InstanceFacts) and (origin is None or origin.engine_id != prefill.facts.engine_id):
            prefill.learn(Unasked())  # Another process is at this address now; `Health` asks it.
        elif isinstance(prefill.facts, VllmFacts) and origin is not None and origin.port:
            prefill.learn(prefill.facts.with_origin(origin))
        return answer

    def abandon(self) -> None:
        """P's leg is of no use any more, and P holds nothing."""
        self.leg.close()
        self.outcome = PrefillOutcome.FAILED
        self.settle()

    @property
    def origin(self) -> KVSource | None:
        """Where the ticket came from, if it says so."""
        return None if self.ticket is None else ticket_origin(self.ticket)

    def is_as_promised(self) -> bool:
        """Whether D, which was called with the early ticket, asks the engine that has answered."""
        origin, early = self.origin, self.form.early
        return origin is None or early is None or origin.engine_id == early.get("remote_engine_id", origin.engine_id)

    def settle(self) -> bool:
        """P holds nothing (any more), or is told now to release it; returns whether it may have held something."""
        held, self._held = self._held, False
        self.prefill.num_tickets -= held
        return held

    def release(self, releases: Releases, decodes: RolePool, client_headers: RawHeaders) -> None:
        """Have P free what nobody will fetch. Returns at once."""
        if not self.settle():
            return
        match self.form.released_by:
            case "p":
                releases.start(self.prefill, self.form.transfer_id)
            case "d" if self.ticket is not None and not self.given and (decode := decodes.pick()) is not None:
                releases.refuse(decode, self.ticket, client_headers)
