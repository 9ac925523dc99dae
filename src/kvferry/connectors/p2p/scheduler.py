"""The P2P connector beside the scheduler: joins what this instance offers and what it fetches. No tensors.

Owns the plan in the making; the rest is `Offers`' and `Fetches`'.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvferry.connectors.api import (
    ConnectorContext,
    Failed,
    Finish,
    Hit,
    Hold,
    Loaded,
    Match,
    Miss,
    Released,
    RequestView,
    SchedulerSide,
    StepView,
    TransferReport,
)
from kvferry.connectors.p2p.fetches import Fetches
from kvferry.connectors.p2p.offers import Offers
from kvferry.connectors.p2p.options import options_of
from kvferry.connectors.p2p.plan import P2pPlan
from kvferry.core.errors import KvferryError, LeakError
from kvferry.core.hand_off import Consume, Produce
from kvferry.core.ticket_seal import TicketSealer

log = logging.getLogger(__name__)


class P2pSchedulerSide(SchedulerSide[P2pPlan]):
    """See the module. `P2pOptions` says what can be set."""

    takes_parts = True
    gauges = frozenset({"num_produced"})

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        settings, sealer = options_of(context.config), TicketSealer(context.auth_token, context.clock)
        if not context.auth_token:
            log.warning(
                "without KVFERRY_AUTH_TOKEN any client can make a ticket; only those of this machine's loopback"
                " interface are taken"
            )
        self._keeps_all = settings.bidirectional_kv_xfer
        self._work = P2pPlan()
        self._offers = Offers(context, self._work, sealer, settings)
        self._fetches = Fetches(context, self._work, sealer)

    def set_addresses(self, addresses: Sequence[dict[str, Any]]) -> None:
        """Where this instance's ranks listen."""
        self._offers.set_addresses(addresses)

    def address_seal(self) -> str:
        """Of those, and of this engine."""
        return self._offers.address_seal()

    # Admission.

    def refusal(self, request: RequestView) -> KvferryError | None:
        """Why its ticket is not believed, if so."""
        return self._fetches.refusal(request)

    def arrived(self, request: RequestView) -> None:
        """Keep its ticket's lease alive while it waits."""
        self._fetches.arrived(request)

    def match(self, request: RequestView, num_computed_tokens: int) -> Match:
        """A promised hand-off can be loaded; a prefill for another waits while too much is held already."""
        match request.hand_off:
            case Consume():
                return self._fetches.match(request, num_computed_tokens)
            case Produce(source=source) as produce:
                room = self._offers.match(request, produce)
                if source is None or not isinstance(room, Miss) or room.error is not None:
                    return room
                return self._fetches.match(request, num_computed_tokens)
        return Miss()

    def allocated(self, request: RequestView, block_ids: Sequence[int], num_computed_tokens: int, hit: Hit) -> None:
        """The load goes out with the next plan."""
        self._fetches.allocated(request, block_ids, num_computed_tokens, hit)
        if isinstance(request.hand_off, Produce):
            self._offers.expect(request, request.hand_off)

    # Steps.

    def plan(self, step: StepView) -> P2pPlan | None:
        """Announcements of this step's chunks, and all that came up since the last plan."""
        self._offers.planned()
        for request in step.preempted:
            self._offers.restart(request)
        self._offers.void(step.chunks)
        for chunk in step.chunks:
            self._fetches.computed(chunk.request)
            self._offers.announce(chunk)
        return self._work.take()

    def has_work(self) -> bool:
        """Whether a plan waits."""
        return bool(self._work)

    def completed(self, report: TransferReport) -> None:
        """Loads that ended, blocks that are free again."""
        for event in report:
            match event:
                case Loaded() | Failed():
                    self._fetches.ended(event.request_id)
                case Released():
                    self._fetches.released(event.request_id)
                    self._offers.released(event.request_id)

    # The end of a request.

    def finish(self, request: RequestView, block_ids: Sequence[int]) -> Finish:
        """Blocks that were announced, or are still written to, stay until the worker sides say so."""
        if self._fetches.finish(request):
            self._offers.never_opened(request)  # expected at most: nothing was announced before the load
            return Hold(None)
        hand_off = request.hand_off
        if isinstance(hand_off, Consume) and (self._keeps_all if hand_off.keep is None else hand_off.keep):
            return self._offers.keep(request, block_ids)
        return self._offers.finish(request, block_ids)

    def release(self, transfer_id: str) -> bool:
        """The consumer will never come."""
        return self._offers.end(transfer_id)

    def refused(self, transfer_id: str) -> None:
        """A prefill was refused before it was admitted: who waits for it is told, with the next plan."""
        self._offers.refused(transfer_id)

    # Insight.

    def statistics(self) -> dict[str, float]:
        """Hand-offs in the making or under lease here, and loads asked for."""
        return {"num_produced": float(len(self._offers.names)), "fetches": float(self._fetches.num_begun)}

    def check(self) -> None:
        """Raise `LeakError` when a hand-off or a load is left."""
        if names := [*self._offers.names, *self._fetches.names]:
            raise LeakError(f"the P2P connector still keeps blocks of requests {', '.join(names[:8])}")
