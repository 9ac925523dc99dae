"""The scheduler side of the P2P connector: the fetches of this instance, and with `Offers` its hand-offs. No tensors.

Owns the next plan, and the state of each request that has a ticket to fetch: it waits, loads, or has ended its load. A
request has at most one load, since a hand-off can be fetched only once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvferry.connectors.api import (
    ConnectorContext,
    Failed,
    Fetchable,
    Finish,
    HandsOff,
    HasStatistics,
    Hit,
    Hold,
    Loaded,
    Match,
    Miss,
    Pending,
    Released,
    RequestView,
    SchedulerSide,
    StepView,
    TransferReport,
)
from kvferry.connectors.p2p.offers import Offers
from kvferry.connectors.p2p.plan import Load, P2pPlan
from kvferry.core.errors import ConfigError, KvferryError, LayoutMismatch, LeakError, ProtocolError, TransferTimeout
from kvferry.core.messages.hand_off import OTHER_PROMPT, Consume, Produce, Ticket
from kvferry.core.messages.instance_facts import TicketKinds
from kvferry.core.messages.ticket_seal import TicketSealer
from kvferry.transport.options import options_of

logger = logging.getLogger(__name__)


@dataclass
class _Fetch:
    """The fetch of a request. `num_promised`: number of prompt tokens whose KV the other side has. `is_ready`: the
    producer has finished; `deadline`: end of the wait for this, once the wait has begun, in seconds of the monotonic
    clock."""

    ticket: Ticket
    num_promised: int
    state: Literal["waiting", "loading", "over"] = "waiting"
    is_ready: bool = True
    deadline: float | None = None


class P2pSchedulerSide(SchedulerSide[P2pPlan], HandsOff, HasStatistics):
    """Decides which KV is handed off, fetched and held. Its settings are `TransportOptions`."""

    takes_sections = True
    gauges = frozenset({"num_produced"})

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        settings = options_of(context.config)
        if not context.auth_token:
            logger.warning(
                "without KVFERRY_AUTH_TOKEN any client can make a ticket; only tickets with loopback"
                " addresses are accepted"
            )
        self._config, self._layout = context.config, context.layout
        self._keeps_all, self._unsealed_s = settings.bidirectional_kv_xfer, settings.unsealed_s
        self._sealer = TicketSealer(context.auth_token, context.clock)
        self._work = P2pPlan()
        self._offers = Offers(context, self._work, self._sealer, settings)
        self._fetches: dict[str, _Fetch] = {}
        self._cancelled: set[str] = set()
        self._num_begun = 0

    def set_addresses(self, addresses: Sequence[dict[str, Any]]) -> None:
        self._offers.set_addresses(addresses)

    def tickets(self) -> TicketKinds:
        """Tickets with addresses at which KV is read."""
        kinds = TicketKinds(writes=("p2p",), reads=("p2p",))
        return kinds.within(produces=self._config.produces, consumes=self._config.consumes)

    def reads(self, ticket: Ticket) -> bool:
        return ticket.has_address

    def address_seal(self) -> str:
        return self._offers.address_seal()

    # Admission.

    def refusal(self, request: RequestView) -> KvferryError | None:
        ticket = _ticket_of(request)
        return None if ticket is None else self._sealer.refusal(ticket)

    def arrived(self, request: RequestView) -> None:
        """Renew the lease of the request's ticket from now on."""
        fetch = self._find(request)
        if isinstance(fetch, _Fetch) and request.request_id not in self._fetches:
            fetch.is_ready = not fetch.ticket.is_early
            self._fetches[request.request_id] = fetch
            self._work.waits[request.request_id] = fetch.ticket

    def match(self, request: RequestView, num_computed_tokens: int) -> Match:
        """A `Hit` for a hand-off that can be fetched. `Pending` for a prefill for another instance while too many
        blocks are held, and for a hand-off whose prefill has not ended, unless there is room to reserve its blocks
        now."""
        hand_off = request.hand_off
        if isinstance(hand_off, Produce):
            admission = self._offers.match(request, hand_off)
            if hand_off.source is None or not isinstance(admission, Miss) or admission.error is not None:
                return admission
        fetch = self._find(request)
        if not isinstance(fetch, _Fetch):
            return Miss(fetch)
        if fetch.state != "waiting":
            return Miss()
        if isinstance(hand_off, Produce) and fetch.num_promised <= num_computed_tokens:
            return Miss()  # `_on_computed` abandons the ticket with the first chunk
        if not fetch.is_ready and not self.context.has_room(-(-fetch.num_promised // self._layout.block_size)):
            return self._wait(fetch)
        return Hit(max(0, fetch.num_promised - num_computed_tokens))

    def _wait(self, fetch: _Fetch) -> Match:
        """Wait without blocks, until the event `Fetchable`."""
        now = self.context.clock.monotonic()
        fetch.deadline = fetch.deadline or now + self._unsealed_s
        if now < fetch.deadline:
            return Pending(is_reported=True)
        return Miss(TransferTimeout(f"the prefill of this request has not ended within {self._unsealed_s:g} s"))

    def _find(self, request: RequestView) -> _Fetch | KvferryError | None:
        """The request's fetch, which is created if necessary; or the reason why its ticket cannot be used. None: there
        is nothing to fetch."""
        ticket = _ticket_of(request)
        if ticket is None or request.request_id in self._fetches:
            return self._fetches.get(request.request_id)
        return (
            self._unusable(ticket)
            or _prompt_mismatch(request, ticket)
            or _Fetch(ticket, _num_promised(request, ticket))
        )

    def _unusable(self, ticket: Ticket) -> KvferryError | None:
        """The reason why this ticket cannot be used on this instance; None: it can."""
        if not self._config.consumes:
            return ConfigError(
                "this instance has kv_role kv_producer and cannot fetch hand-offs; use kv_consumer or kv_both"
            )
        if (error := self._sealer.refusal(ticket)) is not None:
            return error
        if any(not host or not 0 < port < 2**16 for host, port in ticket.addresses):
            return ProtocolError("the ticket does not say where the KV is (remote_host, remote_port)")
        if ticket.tp_size < 1 or max(ticket.tp_size, self._layout.tp_size) % min(ticket.tp_size, self._layout.tp_size):
            return LayoutMismatch("tp_size", self._layout.tp_size, ticket.tp_size)
        if len(ticket.addresses) != ticket.tp_size:
            return ProtocolError(
                f"the ticket is of {ticket.tp_size} ranks and says where {len(ticket.addresses)} are (remote_ranks)"
            )
        return None

    def allocated(self, request: RequestView, block_ids: Sequence[int], num_computed_tokens: int, hit: Hit) -> None:
        """Put the load into the next plan."""
        fetch = self._find(request)
        assert isinstance(fetch, _Fetch), "a hit without a ticket"
        self._fetches[request.request_id] = fetch
        fetch.state = "loading"
        self._num_begun += 1
        self._work.waits.pop(request.request_id, None)
        block_size = self._layout.block_size
        self._work.loads[request.request_id] = Load(
            request.request_id,
            fetch.ticket,
            list(block_ids[: -(-fetch.num_promised // block_size)]),
            num_computed_tokens // block_size,
            fetch.num_promised,
            list(request.prompt_token_ids),
            request.salt,
            longer=isinstance(request.hand_off, Produce),
        )
        if isinstance(request.hand_off, Produce):
            self._offers.expect(request, request.hand_off)

    # Steps.

    def plan(self, step: StepView) -> P2pPlan | None:
        """Announcements of this step's chunks, and all other work since the last plan."""
        for request in step.preempted:
            self._offers.restart(request)
        self._offers.void(step.chunks)
        for chunk in step.chunks:
            self._on_computed(chunk.request)
            self._offers.announce(chunk)
        return self._work.take()

    def _on_computed(self, request: RequestView) -> None:
        """Abandon the ticket of a request that runs: a load that has not begun by now will never begin."""
        fetch = self._fetches.get(request.request_id)
        if fetch is not None and fetch.state == "waiting":
            fetch.state = "over"
            self._work.unwanted[request.request_id] = fetch.ticket

    def has_work(self) -> bool:
        return bool(self._work)

    def completed(self, report: TransferReport) -> None:
        """Record ended loads, and blocks that are no longer needed or written to."""
        for event in report:
            match event:
                case Loaded() | Failed() if event.request_id in self._fetches:
                    self._fetches[event.request_id].state = "over"
                case Fetchable() if event.request_id in self._fetches:
                    self._fetches[event.request_id].is_ready = True
                case Released():
                    self._cancelled.discard(event.request_id)
                    self._offers.released(event.request_id)

    # The end of a request.

    def finish(self, request: RequestView, block_ids: Sequence[int]) -> Finish:
        """Announced blocks, and blocks to which a load still writes, stay under `Hold`."""
        is_written = self._end_fetch(request)
        self._fetches.pop(
            request.request_id, None
        )  # last, because `finish` is called again if one of the calls above raises
        if is_written:
            self._offers.end_unopened(request)  # no block was announced before the load
            return Hold(None)
        hand_off = request.hand_off
        if isinstance(hand_off, Consume) and (self._keeps_all if hand_off.keep is None else hand_off.keep):
            return self._offers.keep(request, block_ids)
        return self._offers.finish(request, block_ids)

    def _end_fetch(self, request: RequestView) -> bool:
        """End the request's fetch. Returns True if a load may still write to its blocks."""
        if request.request_id in self._cancelled:  # called again
            return True
        request_id, fetch, ticket = request.request_id, self._find(request), _ticket_of(request)
        if isinstance(fetch, _Fetch):
            if fetch.state == "over":
                return False
            self._work.waits.pop(request_id, None)
            if fetch.state == "loading" and self._work.loads.pop(request_id, None) is None:  # it was sent with a plan
                self._work.cancels.append(request_id)
                self._cancelled.add(request_id)
                return True
            self._work.unwanted[request_id] = fetch.ticket
        elif ticket is not None and isinstance(self._unusable(ticket), LayoutMismatch | None):
            # The ticket is for another prompt: vLLM ends a request that its front end refused with a prompt of one
            # token. No other request will fetch it.
            self._work.unwanted[request_id] = ticket
        return False

    def release(self, transfer_id: str) -> bool:
        return self._offers.end(transfer_id)

    def refused(self, transfer_id: str) -> None:
        self._offers.refused(transfer_id)

    def make_room(self, num_blocks: int) -> None:
        self._offers.make_room(num_blocks)

    # Statistics and checks.

    def statistics(self) -> dict[str, float]:
        """Numbers of hand-offs that are being made or are under lease, and of loads that have begun."""
        return {"num_produced": float(len(self._offers.names)), "fetches": float(self._num_begun)}

    def check(self) -> None:
        if names := [*self._offers.names, *self._offers.admitted, *self._fetches, *self._cancelled]:
            raise LeakError(f"the P2P connector still keeps blocks of requests {', '.join(names[:8])}")


def _ticket_of(request: RequestView) -> Ticket | None:
    """The ticket that a request has to fetch; None: there is none."""
    match request.hand_off:
        case Consume(ticket=ticket):
            return ticket
        case Produce(source=source):
            return source
    return None


def _prompt_mismatch(request: RequestView, ticket: Ticket) -> KvferryError | None:
    """The reason why this ticket is not for this prompt; None: it is."""
    tokens = request.prompt_token_ids
    if not isinstance(request.hand_off, Consume) or ticket.agrees_with(tokens, request.salt):
        return None
    if ticket.remote_num_tokens == len(tokens):
        return ProtocolError(OTHER_PROMPT)
    return ProtocolError(
        f"the ticket is for another prompt, of {ticket.remote_num_tokens} tokens, this one has {len(tokens)}:"
        " the prompt must be the same on both instances"
    )


def _num_promised(request: RequestView, ticket: Ticket) -> int:
    """Number of prompt tokens whose KV the other side has. A prefill always computes its last token."""
    tokens = request.prompt_token_ids
    if isinstance(request.hand_off, Produce):
        return min(ticket.common_prefix(tokens, request.salt), len(tokens) - 1)
    return ticket.remote_num_tokens or len(tokens)
