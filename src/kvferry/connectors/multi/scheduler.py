"""Several connectors beside one scheduler, as one. The connectors of the list are its children.

Owns which child loads for which request, and which children still keep the blocks of requests that have ended.

* One child hands off (`handing_off`), and fetches hand-offs, unless it does not read the ticket and another child does.
  The others see requests without hand-off: prompts of which they may have KV, and whose KV they keep.
* The child that has the most of a prompt loads; of those that have as much, the first. A hand-off that can be fetched
  is fetched, because it brings the first token. When one child has an answer, `PATIENCE_S` remain for the others.
* All children save.
* A child that raises is left out of that request (scheduler side), or of all later ones (worker side). The scheduler
  side learns of this by the first load that the child should have done, and then no longer calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from kvferry.connectors.api import (
    ConnectorContext,
    Failed,
    Finish,
    HandsOff,
    HasAnswer,
    HasStatistics,
    Hit,
    Hold,
    KeepsBlocks,
    Match,
    Miss,
    Pending,
    Release,
    Released,
    RequestView,
    ScheduledChunk,
    SchedulerSide,
    StepView,
    TransferReport,
    check_side,
    statistics_of,
)
from kvferry.connectors.multi.plan import MultiPlan
from kvferry.connectors.multi.settings import child_configs, child_gauges, handing_off, read_children
from kvferry.connectors.registry import ConnectorSpec, find_connector
from kvferry.core.block_hash import BlockHash
from kvferry.core.closing import close_all
from kvferry.core.errors import ChildLost, KvferryError, LeakError
from kvferry.core.hand_off import Consume, HandOff, PrefillResult, Produce, Ticket
from kvferry.core.instance_facts import TicketKinds
from kvferry.core.kept import TierShare
from kvferry.core.transfer_config import KVTransferConfig

log = logging.getLogger(__name__)

PATIENCE_S = 0.1
Result = TypeVar("Result")


class _WithoutHandOff:
    """A request as the children see it that have no part in its hand-off."""

    def __init__(self, request: RequestView) -> None:
        self._request = request

    @property
    def hand_off(self) -> HandOff:
        return None

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self._request.prompt_token_ids

    @property
    def salt(self) -> str:
        return self._request.salt

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        return self._request.block_hashes

    @property
    def prefill_result(self) -> PrefillResult | None:
        return self._request.prefill_result


class _AnsweredWithoutHandOff(_WithoutHandOff):
    """The same of a request that is answered here (`HasAnswer`), not of one that only prefills."""

    _request: Any

    @property
    def tokens(self) -> Sequence[int]:
        tokens: Sequence[int] = self._request.tokens
        return tokens

    @property
    def num_computed_tokens(self) -> int:
        return int(self._request.num_computed_tokens)

    @property
    def finish_reason(self) -> str | None:
        reason: str | None = self._request.finish_reason
        return reason


class MultiSchedulerSide(SchedulerSide[MultiPlan], HandsOff, KeepsBlocks[MultiPlan], HasStatistics):
    """Asks each connector of the list, loads from the one that has the most, and saves to all."""

    gauges = child_gauges(ConnectorSpec.scheduler_class)

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._clock, self._config = context.clock, context.config
        children = read_children(context)
        self._children = [spec.build_scheduler_side(own) for spec, own in children]
        self._configs = [own.config for _, own in children]
        self._index = handing_off(self._configs) or 0
        chosen = self._children[self._index]
        self._hands_off = chosen if isinstance(chosen, HandsOff) else None
        """The child that hands off, if there is one."""
        self._chosen: dict[str, int] = {}
        self._loads: dict[str, int] = {}
        self._holds: dict[str, list[int]] = {}
        self._held: set[str] = set()
        self._answered_at: dict[str, float] = {}
        self._lost: set[int] = set()
        self._by_layers: set[int] = set()
        """Children that are set to layerwise loads, which has been logged."""

    # Admission.

    def arrived(self, request: RequestView) -> None:
        """Announce the request to all children."""
        for index, child in enumerate(self._children):
            if index not in self._lost:
                self._try(index, partial(child.arrived, self._seen(index, request)), None)

    def refusal(self, request: RequestView) -> KvferryError | None:
        """Why the child that takes part in the hand-off refuses the request, if it does."""
        side = self._children[self._takes_part(request.hand_off)]
        return side.refusal(request) if isinstance(side, HandsOff) else None

    def match(self, request: RequestView, num_computed_tokens: int) -> Match:
        """The match of the child that has the most of the prompt."""
        matches = [self._match(index, request, num_computed_tokens) for index in range(len(self._children))]
        takes_part = self._takes_part(request.hand_off)
        own = matches[takes_part]
        if request.hand_off is not None and isinstance(own, Pending):
            return own
        if request.hand_off is not None and isinstance(own, Hit):
            return self._choose(request, takes_part, own)
        hits = {index: match for index, match in enumerate(matches) if isinstance(match, Hit)}
        if any(isinstance(match, Pending) for match in matches) and self._is_worth_waiting(request, bool(hits)):
            return Pending()
        self._answered_at.pop(request.request_id, None)
        if not hits:
            return own
        best = max(hits, key=lambda index: (hits[index].num_tokens, -index))
        return self._choose(request, best, hits[best])

    def _match(self, index: int, request: RequestView, num_computed_tokens: int) -> Match:
        nothing: Match = Miss()
        if index in self._lost:
            return nothing
        match = self._children[index].match
        found = self._try(index, partial(match, self._seen(index, request), num_computed_tokens), nothing)
        return self._whole(index, found)

    def _whole(self, index: int, match: Match) -> Match:
        """A match without layerwise loads, which `settings` refuses for kvferry's own connectors: if such a load
        failed, other children would have saved what the model computed from it."""
        if not (isinstance(match, Hit) and match.layerwise):
            return match
        if index not in self._by_layers:
            log.error(
                "connector %d of MultiConnector is set to layerwise loads, which are not possible there, and does not"
                " load: set load to async",
                index,
            )
            self._by_layers.add(index)
        return Miss()

    def _is_worth_waiting(self, request: RequestView, has_hit: bool) -> bool:
        """Whether to wait for children that still look the prompt up: always without a hit, as they have deadlines."""
        if not has_hit:
            return True
        now = self._clock.monotonic()
        return now - self._answered_at.setdefault(request.request_id, now) < PATIENCE_S

    def _choose(self, request: RequestView, index: int, hit: Hit) -> Hit:
        self._answered_at.pop(request.request_id, None)
        self._chosen[request.request_id] = index
        return hit

    def allocated(self, request: RequestView, block_ids: Sequence[int], num_computed_tokens: int, hit: Hit) -> None:
        """Have the child load whose match was chosen."""
        index = self._chosen[request.request_id]
        self._loads[request.request_id] = index
        self._children[index].allocated(self._seen(index, request), block_ids, num_computed_tokens, hit)

    # Steps.

    def plan(self, step: StepView) -> MultiPlan | None:
        """The plans of all children, and which of them loads and keeps what since the last plan."""
        plans = [self._plan(index, step) for index in range(len(self._children))]
        loads, self._loads = self._loads, {}
        holds, self._holds = self._holds, {}
        if not (loads or holds or any(plan is not None for plan in plans)):
            return None
        return MultiPlan(plans=plans, loads=loads, holds=holds)

    def _plan(self, index: int, step: StepView) -> Any:
        child = self._children[index]
        seen = StepView(
            [
                ScheduledChunk(self._seen(index, chunk.request), chunk.start, chunk.num_tokens, chunk.block_ids)
                for chunk in step.chunks
            ],
            [self._seen(index, request) for request in step.preempted],
        )
        return self._try(index, lambda: child.plan(seen), None)

    def saves(self, plan: MultiPlan | None) -> Sequence[tuple[str, Sequence[BlockHash]]]:
        """The saves of all children that keep blocks."""
        found: list[tuple[str, Sequence[BlockHash]]] = []
        for child, part in zip(self._children, plan.plans if plan is not None else (), strict=False):
            if part is not None and isinstance(child, KeepsBlocks):
                found += child.saves(part)
        return found

    def has_work(self) -> bool:
        """Whether a plan waits."""
        return bool(self._loads or self._holds) or any(child.has_work() for child in self._children)

    def completed(self, report: TransferReport) -> None:
        """Pass the report on: events of a load to the child that loaded, all others to all. Each child is called for
        each step, as it would be alone, because it may measure how long steps take."""
        for event in report:
            if isinstance(event, Failed) and isinstance(event.error, ChildLost):
                self._is_lost(self._chosen.get(event.request_id))
        for index, child in enumerate(self._children):
            part = [
                event
                for event in report
                if isinstance(event, Released) or self._chosen.get(event.request_id, index) == index
            ]
            self._try(index, partial(child.completed, part), None)
        for event in report:
            if isinstance(event, Released):
                self._held.discard(event.request_id)

    def _is_lost(self, index: int | None) -> None:
        if index is not None and index not in self._lost:
            log.warning("connector %d of MultiConnector is lost and no longer used", index)
            self._lost.add(index)

    # The end of a request.

    def finish(self, request: RequestView, block_ids: Sequence[int]) -> Finish:
        """Blocks stay as long as one child keeps them; the ticket is that of the child that hands off."""
        verdicts = [child.finish(self._seen(index, request), block_ids) for index, child in enumerate(self._children)]
        self._chosen.pop(request.request_id, None)
        self._answered_at.pop(request.request_id, None)
        ticket = verdicts[self._index].ticket
        keepers = [index for index, verdict in enumerate(verdicts) if isinstance(verdict, Hold)]
        if not keepers:
            return Release(ticket)
        self._holds[request.request_id] = keepers
        self._held.add(request.request_id)
        return Hold(ticket)

    def release(self, transfer_id: str) -> bool:
        """Release a hand-off of the child that hands off."""
        return self._hands_off is not None and self._hands_off.release(transfer_id)

    def stores_take_kv(self) -> bool:
        """Whether those of the child that hands off do."""
        return self._hands_off is None or self._hands_off.stores_take_kv()

    def refused(self, transfer_id: str) -> None:
        """Have the child that hands off report a refused prefill to consumers that wait for it."""
        if self._hands_off is not None:
            self._hands_off.refused(transfer_id)

    def make_room(self, num_blocks: int) -> None:
        """Have the child that hands off free blocks: it alone has leases."""
        if self._hands_off is not None:
            self._hands_off.make_room(num_blocks)

    def set_addresses(self, addresses: Sequence[dict[str, Any]]) -> None:
        """Pass the addresses of its ranks on to the child that hands off."""
        if self._hands_off is not None:
            self._hands_off.set_addresses(addresses)

    def address_seal(self) -> str:
        """The seal of the child that hands off; empty without one."""
        return self._hands_off.address_seal() if self._hands_off is not None else ""

    def tickets(self) -> TicketKinds:
        """It writes the tickets of the child that hands off, and reads those of all. If that child writes none, what it
        writes is not known: D may find the KV in another child's store."""
        kinds = [_tickets(child) for child in self._children]
        writes = kinds[self._index].writes
        if not writes and self._configs[self._index].produces:
            writes = None
        reads = [one.reads for one in kinds if one.reads is not None]
        known = len(reads) == len(kinds)
        found = TicketKinds(
            writes=writes, reads=tuple(sorted({kind for one in reads for kind in one})) if known else None
        )
        return found.within(produces=self._config.produces, consumes=self._config.consumes)

    def reset_cache(self) -> bool:
        """Empty the caches of all children; whether all could be emptied."""
        forgot = [child.reset_cache() for child in self._children if isinstance(child, KeepsBlocks)]
        return all(forgot)

    @classmethod
    def lossy_codecs(cls, config: KVTransferConfig) -> Sequence[str]:
        """The lossy codecs of the caches among the children, which agree."""
        lossy = [find_connector(child).lossy_codecs(child) for child in child_configs(config)]
        return next((names for names in lossy if names is not None), [])

    # Insight and end.

    def kept(self, hashes: Sequence[BlockHash], *, pin: bool | None) -> Sequence[Future[list[TierShare]]]:
        """What the tiers of all children that keep blocks have of a prompt."""
        keep = [child for child in self._children if isinstance(child, KeepsBlocks)]
        return [shares for child in keep for shares in child.kept(hashes, pin=pin)]

    def statistics(self) -> dict[str, float]:
        """The statistics of each child, with its number before the names."""
        return {
            f"{index}_{name}": value
            for index, child in enumerate(self._children)
            for name, value in statistics_of(child).items()
        }

    def check(self) -> None:
        """Raise `LeakError` when a child keeps something."""
        for child in self._children:
            check_side(child)
        if self._chosen or self._held or self._holds:
            raise LeakError(f"several connectors still keep {[*self._chosen, *self._held][:8]}")

    def close(self) -> None:
        """Close all children."""
        close_all(*(child.close for child in self._children))

    def _seen(self, index: int, request: RequestView) -> RequestView:
        if request.hand_off is None or index == self._takes_part(request.hand_off):
            return request
        answered = isinstance(request, HasAnswer) and not isinstance(request.hand_off, Produce)
        return _AnsweredWithoutHandOff(request) if answered else _WithoutHandOff(request)

    def _takes_part(self, hand_off: HandOff) -> int:
        """The child that takes part in this hand-off."""
        if not isinstance(hand_off, Consume) or _reads(self._children[self._index], hand_off.ticket):
            return self._index
        others = (index for index, child in enumerate(self._children) if _tickets(child).reads)
        return next((index for index in others if _reads(self._children[index], hand_off.ticket)), self._index)

    def _try(self, index: int, call: Callable[[], Result], otherwise: Result) -> Result:
        """What a call of a child returns; `otherwise` when it raises, so that the others continue."""
        try:
            return call()
        except Exception:
            log.exception("connector %d of MultiConnector failed; the others continue without it", index)
            return otherwise


def _tickets(side: object) -> TicketKinds:
    """The tickets that a child writes and reads; not known for a connector without hand-offs."""
    return side.tickets() if isinstance(side, HandsOff) else TicketKinds()


def _reads(side: object, ticket: Ticket) -> bool:
    return not isinstance(side, HandsOff) or side.reads(ticket)
