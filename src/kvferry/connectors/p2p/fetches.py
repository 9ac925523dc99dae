"""The hand-offs that this instance fetches: from a request's arrival until its load has ended. No tensors.

Owns what is known of each request that has something to fetch: waiting, loading, or over. A request has at most one
load, since a hand-off can be had once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvferry.connectors.api import ConnectorContext, Hit, Match, Miss, RequestView
from kvferry.connectors.p2p.plan import Load, P2pPlan, Wait
from kvferry.core.errors import ConfigError, KvferryError, LayoutMismatch, ProtocolError
from kvferry.core.hand_off import Consume, Produce, Ticket
from kvferry.core.ticket_seal import TicketSealer


class _State(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    OVER = "over"


@dataclass
class _Fetch:
    """`num_promised`: of how many of the prompt's tokens the other side has the KV."""

    ticket: Ticket
    num_promised: int
    state: _State = _State.WAITING


class Fetches:
    """The hand-offs that this engine fetches as D: what is known of each request's ticket, and how far its load has
    come."""

    def __init__(self, context: ConnectorContext, work: P2pPlan, sealer: TicketSealer) -> None:
        self._config, self._layout, self._work = context.config, context.layout, work
        self._sealer = sealer
        self._fetches: dict[str, _Fetch] = {}
        self._cancelled: set[str] = set()
        self.num_begun = 0

    def arrived(self, request: RequestView) -> None:
        """A request has come: from now on its ticket's lease is kept alive."""
        fetch = self._find(request)
        if isinstance(fetch, _Fetch) and request.request_id not in self._fetches:
            self._fetches[request.request_id] = fetch
            self._work.waits.append(Wait(request.request_id, fetch.ticket))

    def _find(self, request: RequestView) -> _Fetch | KvferryError | None:
        """What is known of a request, or would be if it arrived now; None when it has nothing to fetch."""
        ticket = ticket_of(request)
        if ticket is None or request.request_id in self._fetches:
            return self._fetches.get(request.request_id)
        return self._refusal(ticket) or self._misfit(request, ticket) or _Fetch(ticket, _num_promised(request, ticket))

    def match(self, request: RequestView, num_computed_tokens: int) -> Match:
        """What can be loaded beyond what is here; a `Miss` once there was a load."""
        fetch = self._find(request)
        if not isinstance(fetch, _Fetch):
            return Miss(fetch)
        if fetch.state is not _State.WAITING:
            return Miss()
        if isinstance(request.hand_off, Produce) and fetch.num_promised <= num_computed_tokens:
            return Miss()  # the first chunk gives the ticket up
        return Hit(max(0, fetch.num_promised - num_computed_tokens))

    def refusal(self, request: RequestView) -> KvferryError | None:
        """Why what its ticket says is not believed, if so."""
        ticket = ticket_of(request)
        return None if ticket is None else self._sealer.refusal(ticket)

    def _refusal(self, ticket: Ticket) -> KvferryError | None:
        """Why this ticket cannot be used here, if so."""
        if not self._config.consumes:
            return ConfigError("this instance has kv_role kv_producer: it fetches no hand-offs")
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

    def _misfit(self, request: RequestView, ticket: Ticket) -> KvferryError | None:
        """Why this ticket is not for this prompt, if so."""
        tokens = request.prompt_token_ids
        if isinstance(request.hand_off, Consume) and not (ticket.remote_num_tokens >= 0 and ticket.agrees_with(tokens)):
            return ProtocolError(
                f"the ticket is for another prompt, of {ticket.remote_num_tokens} tokens, this one has {len(tokens)}:"
                " the prompt must be the same on both instances"
            )
        return None

    def allocated(self, request: RequestView, block_ids: Sequence[int], num_computed_tokens: int, hit: Hit) -> None:
        """The load goes out with the next plan."""
        fetch = self._find(request)
        assert isinstance(fetch, _Fetch), "a hit without a ticket"
        self._fetches[request.request_id] = fetch
        fetch.state = _State.LOADING
        self.num_begun += 1
        self._forget_wait(request)
        self._work.loads.append(
            Load(
                request.request_id,
                fetch.ticket,
                list(block_ids[: -(-fetch.num_promised // self._layout.block_size)]),
                num_computed_tokens // self._layout.block_size,
                fetch.num_promised,
                list(request.prompt_token_ids),
                longer=isinstance(request.hand_off, Produce),
            )
        )

    def computed(self, request: RequestView) -> None:
        """The request runs: if it has not loaded by now, it never will."""
        fetch = self._fetches.get(request.request_id)
        if fetch is not None and fetch.state is _State.WAITING:
            fetch.state = _State.OVER
            self._work.unwanted.append(Wait(request.request_id, fetch.ticket))

    def ended(self, request_id: str) -> None:
        """A load has ended, well or not."""
        if request_id in self._fetches:
            self._fetches[request_id].state = _State.OVER

    def released(self, request_id: str) -> None:
        """A load that was cancelled writes nothing more."""
        self._cancelled.discard(request_id)

    def finish(self, request: RequestView) -> bool:
        """The request ended. True: its blocks may still be written to, until the worker sides release them."""
        writing = self._end(request)
        self._fetches.pop(request.request_id, None)  # last: should anything go wrong before, it can be asked again
        return writing

    def _end(self, request: RequestView) -> bool:
        fetch = self._find(request)
        if not isinstance(fetch, _Fetch):
            self._give_up_misfit(request)
            return False
        if fetch.state is _State.OVER:
            return False
        self._forget_wait(request)
        if fetch.state is _State.LOADING and not self._take_back(request):
            self._work.cancels.append(request.request_id)
            self._cancelled.add(request.request_id)
            return True
        self._work.unwanted.append(Wait(request.request_id, fetch.ticket))
        return False

    def _give_up_misfit(self, request: RequestView) -> None:
        """A ticket that was for another prompt is of no use any more. vLLM ends a request that its front end refused
        with a prompt of one token, whatever it was."""
        ticket = ticket_of(request)
        if ticket is not None and self._refusal(ticket) is None:
            self._work.unwanted.append(Wait(request.request_id, ticket))

    def _forget_wait(self, request: RequestView) -> None:
        """No plan need carry it any more, where none has."""
        self._work.waits = [wait for wait in self._work.waits if wait.request_id != request.request_id]

    def _take_back(self, request: RequestView) -> bool:
        """Undo a load that no plan has carried yet. False: it has begun."""
        loads = self._work.loads
        self._work.loads = [load for load in loads if load.request_id != request.request_id]
        return len(self._work.loads) < len(loads)

    @property
    def names(self) -> list[str]:
        """Requests that something is kept of."""
        return [*self._fetches, *self._cancelled]


def _num_promised(request: RequestView, ticket: Ticket) -> int:
    """Of how many tokens the other side has the KV; that of the last one is no use to a prefill."""
    tokens = request.prompt_token_ids
    if isinstance(request.hand_off, Produce):
        return min(ticket.common_prefix(tokens), len(tokens) - 1)
    return ticket.remote_num_tokens or len(tokens)


def ticket_of(request: RequestView) -> Ticket | None:
    """What a request has to fetch, if anything."""
    match request.hand_off:
        case Consume(ticket=ticket):
            return ticket
        case Produce(source=source):
            return source
    return None
