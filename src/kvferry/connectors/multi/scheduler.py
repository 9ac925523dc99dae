"""The scheduler side of `MultiConnector`, which combines several connectors, its children.

Owns the choice of the child that loads for each request, and the set of children that still keep the blocks of ended
requests.

* One child hands off (`handing_off`), and fetches hand-offs, unless it does not read the ticket and another child does.
  The other children see requests without a hand-off: prompts whose KV they may have or store.
* The child that has the most tokens of a prompt loads; if several have as many, the first of them. A hand-off that can
  be fetched is fetched, because it brings the first token. Once one child has answered, the others have
  `MultiSchedulerSide.max_lookup_wait_s`.
* All children save.
* A child that raises takes no further part in this request (scheduler side), or in any later one (worker side). The
  scheduler side learns of this by the first load that the child should have done, and then no longer calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from kvferry.connectors.api import (
    ConnectorContext,
    Failed,
    Finish,
    HandsOff,
    HasStatistics,
    Hit,
    Hold,
    Match,
    Miss,
    Pending,
    Release,
    Released,
    RequestView,
    Saved,
    ScheduledChunk,
    SchedulerSide,
    StepView,
    TransferEvent,
    TransferReport,
    Wake,
    check_side,
)
from kvferry.connectors.caching import KeepsBlocks, lossy_codecs
from kvferry.connectors.multi.plan import MultiPlan
from kvferry.connectors.multi.settings import child_configs, child_gauges, child_statistics, handing_off, read_children
from kvferry.connectors.registry import ConnectorSpec, find_connector
from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.errors import ChildLost, KvferryError, LeakError
from kvferry.core.messages.hand_off import Consume, HandOff, Produce, Ticket
from kvferry.core.messages.instance_facts import TicketKinds
from kvferry.core.messages.kept import TierShare
from kvferry.core.runtime.closing import close_all
from kvferry.core.settings.transfer_config import KVTransferConfig

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class _WithoutHandOff:
    """The view of a request for children that take no part in its hand-off."""

    hand_off: HandOff = None
    request_id: Any = property(attrgetter("request.request_id"))
    prompt_token_ids: Any = property(attrgetter("request.prompt_token_ids"))
    salt: Any = property(attrgetter("request.salt"))
    block_hashes: Any = property(attrgetter("request.block_hashes"))
    prefill_result: Any = property(attrgetter("request.prefill_result"))
    transfer_params: Any = property(attrgetter("request.transfer_params"))

    tokens: Any = property(attrgetter("request.tokens"))
    num_computed_tokens: Any = property(attrgetter("request.num_computed_tokens"))

    def __init__(self, request: RequestView) -> None:
        self.request = request

    @property
    def finish_reason(self) -> str | None:
        """None for a prefill, whose answer another instance gives."""
        return None if isinstance(self.request.hand_off, Produce) else self.request.finish_reason


class MultiSchedulerSide(SchedulerSide[MultiPlan], HandsOff, KeepsBlocks[MultiPlan], HasStatistics):
    """Calls each connector of the list, loads from the one that has the most tokens, and saves to all."""

    max_lookup_wait_s = 0.1

    gauges = child_gauges(ConnectorSpec.scheduler_class)

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._clock, self._config = context.clock, context.config
        children = read_children(context)
        self.children = [spec.build_scheduler_side(child_context) for spec, child_context in children]
        self._configs = [child_context.config for _, child_context in children]
        self._index = handing_off(self._configs) or 0
        child = self.children[self._index]
        self._hands_off = child if isinstance(child, HandsOff) else None
        """The child that hands off; None: there is none."""
        self._chosen: dict[str, int] = {}
        self._loads: dict[str, int] = {}
        self._holds: dict[str, list[int]] = {}
        self._held: set[str] = set()
        self._first_hit_at: dict[str, float] = {}
        self._lost: set[int] = set()
        self._layerwise: set[int] = set()
        """Children with layerwise loads in their settings, for which a warning was logged."""

    # Admission.

    def arrived(self, request: RequestView) -> None:
        for index, child in enumerate(self.children):
            if index not in self._lost:
                self._try(index, partial(child.arrived, self._view_for(index, request)), None)

    def refusal(self, request: RequestView) -> KvferryError | None:
        """The reason why the child that takes part in the hand-off refuses the request; None: it does not refuse it."""
        side = self.children[self._hand_off_child(request.hand_off)]
        return side.refusal(request) if isinstance(side, HandsOff) else None

    def match(self, request: RequestView, num_computed_tokens: int) -> Match:
        """The match of the child that has the most of the prompt."""
        matches = [self._match(index, request, num_computed_tokens) for index in range(len(self.children))]
        hand_off_index = self._hand_off_child(request.hand_off)
        hand_off_match = matches[hand_off_index]
        if request.hand_off is not None and isinstance(hand_off_match, Pending):
            return hand_off_match
        if request.hand_off is not None and isinstance(hand_off_match, Hit):
            return self._choose(request, hand_off_index, hand_off_match)
        hits = {index: match for index, match in enumerate(matches) if isinstance(match, Hit)}
        if any(isinstance(match, Pending) for match in matches) and self._is_worth_waiting(request, bool(hits)):
            return Pending()
        self._first_hit_at.pop(request.request_id, None)
        if not hits:
            return hand_off_match
        best = max(hits, key=lambda index: (hits[index].num_tokens, -index))
        return self._choose(request, best, hits[best])

    def _match(self, index: int, request: RequestView, num_computed_tokens: int) -> Match:
        miss: Match = Miss()
        if index in self._lost:
            return miss
        method = self.children[index].match
        match = self._try(index, partial(method, self._view_for(index, request), num_computed_tokens), miss)
        return self._without_layerwise(index, match)

    def _without_layerwise(self, index: int, match: Match) -> Match:
        """The match, or a miss if it is layerwise, which `settings` refuses for kvferry's own connectors. If such a
        load failed, other children would have saved KV that the model computed from it."""
        if not (isinstance(match, Hit) and match.layerwise):
            return match
        if index not in self._layerwise:
            logger.error(
                "connector %d of MultiConnector is set to layerwise loads, which are not possible there, and does not"
                " load: set load to async",
                index,
            )
            self._layerwise.add(index)
        return Miss()

    def _is_worth_waiting(self, request: RequestView, has_hit: bool) -> bool:
        """True if the request waits for children that still look up the prompt. Without a hit it always waits, because
        lookups have deadlines."""
        if not has_hit:
            return True
        now = self._clock.monotonic()
        return now - self._first_hit_at.setdefault(request.request_id, now) < self.max_lookup_wait_s

    def _choose(self, request: RequestView, index: int, hit: Hit) -> Hit:
        self._first_hit_at.pop(request.request_id, None)
        self._chosen[request.request_id] = index
        return hit

    def allocated(self, request: RequestView, block_ids: Sequence[int], num_computed_tokens: int, hit: Hit) -> None:
        index = self._chosen[request.request_id]
        self._loads[request.request_id] = index
        self.children[index].allocated(self._view_for(index, request), block_ids, num_computed_tokens, hit)

    # Steps.

    def plan(self, step: StepView) -> MultiPlan | None:
        """The plans of all children, with the loads and holds since the last plan."""
        plans = [self._plan(index, step) for index in range(len(self.children))]
        loads, self._loads = self._loads, {}
        holds, self._holds = self._holds, {}
        if not (loads or holds or any(plan is not None for plan in plans)):
            return None
        return MultiPlan(plans=plans, loads=loads, holds=holds)

    def _plan(self, index: int, step: StepView) -> Any:
        child = self.children[index]
        view = StepView(
            [
                ScheduledChunk(self._view_for(index, chunk.request), chunk.start, chunk.num_tokens, chunk.block_ids)
                for chunk in step.chunks
            ],
            [self._view_for(index, request) for request in step.preempted],
        )
        return self._try(index, lambda: child.plan(view), None)

    def on_answer(self, wake: Wake) -> None:
        for child in self.children:
            child.on_answer(wake)

    def saves(self, plan: MultiPlan | None) -> Sequence[tuple[str, Sequence[BlockHash]]]:
        saves: list[tuple[str, Sequence[BlockHash]]] = []
        for child, part in zip(self.children, plan.plans if plan is not None else (), strict=False):
            if part is not None and isinstance(child, KeepsBlocks):
                saves += child.saves(part)
        return saves

    def has_work(self) -> bool:
        return bool(self._loads or self._holds) or any(child.has_work() for child in self.children)

    def completed(self, report: TransferReport) -> None:
        """Pass the report on: events of a load to the child that loaded, `Saved` to the one that hands off, and all
        others to all. Each child is called in each step, as if it were alone, because it may measure the time of
        steps."""
        for event in report:
            if isinstance(event, Failed) and isinstance(event.error, ChildLost):
                self._mark_lost(self._chosen.get(event.request_id))
        for index, child in enumerate(self.children):
            part = [event for event in report if self._concerns(index, event)]
            self._try(index, partial(child.completed, part), None)
        for event in report:
            if isinstance(event, Released):
                self._held.discard(event.request_id)

    def _concerns(self, index: int, event: TransferEvent) -> bool:
        match event:
            case Released():
                return True
            case Saved():
                return index == self._index
        return self._chosen.get(event.request_id, index) == index

    def _mark_lost(self, index: int | None) -> None:
        if index is not None and index not in self._lost:
            logger.warning("connector %d of MultiConnector is lost and no longer used", index)
            self._lost.add(index)

    # The end of a request.

    def finish(self, request: RequestView, block_ids: Sequence[int]) -> Finish:
        """Blocks stay as long as one child keeps them; the ticket is from the child that hands off."""
        outcomes = [
            child.finish(self._view_for(index, request), block_ids) for index, child in enumerate(self.children)
        ]
        self._chosen.pop(request.request_id, None)
        self._first_hit_at.pop(request.request_id, None)
        ticket = outcomes[self._index].ticket
        holders = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, Hold)]
        if not holders:
            return Release(ticket)
        self._holds[request.request_id] = holders
        self._held.add(request.request_id)
        delays_answer = any(isinstance(outcome, Hold) and outcome.delays_answer for outcome in outcomes)
        return Hold(ticket, delays_answer=delays_answer)

    def release(self, transfer_id: str) -> bool:
        return self._hands_off is not None and self._hands_off.release(transfer_id)

    def stores_take_kv(self) -> bool:
        return self._hands_off is None or self._hands_off.stores_take_kv()

    def refused(self, transfer_id: str) -> None:
        if self._hands_off is not None:
            self._hands_off.refused(transfer_id)

    def make_room(self, num_blocks: int) -> None:
        """Have the child that hands off free blocks, because only this child has leases."""
        if self._hands_off is not None:
            self._hands_off.make_room(num_blocks)

    def set_addresses(self, addresses: Sequence[dict[str, Any]]) -> None:
        if self._hands_off is not None:
            self._hands_off.set_addresses(addresses)

    def address_seal(self) -> str:
        return self._hands_off.address_seal() if self._hands_off is not None else ""

    def tickets(self) -> TicketKinds:
        """The kinds that the child that hands off writes, and the kinds that any child reads. If that child writes
        none, the written kinds are not known: D may find the KV in another child's store."""
        kinds = [_tickets(child) for child in self.children]
        writes = kinds[self._index].writes
        if not writes and self._configs[self._index].produces:
            writes = None
        reads = [kind.reads for kind in kinds if kind.reads is not None]
        are_reads_known = len(reads) == len(kinds)
        ticket_kinds = TicketKinds(
            writes=writes, reads=tuple(sorted({name for names in reads for name in names})) if are_reads_known else None
        )
        return ticket_kinds.within(produces=self._config.produces, consumes=self._config.consumes)

    def keeps_keys(self) -> bool:
        return any(child.keeps_keys() for child in self.children if isinstance(child, KeepsBlocks))

    def reset_cache(self) -> bool:
        results = [child.reset_cache() for child in self.children if isinstance(child, KeepsBlocks)]
        return all(results)

    @classmethod
    def lossy_codecs(cls, config: KVTransferConfig) -> Sequence[str]:
        """The lossy codecs of the caches among the children. They are the same for all caches."""
        lossy = [lossy_codecs(find_connector(child), child) for child in child_configs(config)]
        return next((names for names in lossy if names is not None), [])

    # Statistics and checks, and the end.

    def stored_blocks(self, hashes: Sequence[BlockHash], *, pin: bool | None) -> Sequence[Future[list[TierShare]]]:
        caches = [child for child in self.children if isinstance(child, KeepsBlocks)]
        return [shares for child in caches for shares in child.stored_blocks(hashes, pin=pin)]

    def statistics(self) -> dict[str, float]:
        """The statistics of each child, with its index before the names."""
        return child_statistics(self.children)

    def check(self) -> None:
        for child in self.children:
            check_side(child)
        if self._chosen or self._held or self._holds:
            raise LeakError(f"several connectors still keep {[*self._chosen, *self._held][:8]}")

    def close(self) -> None:
        close_all(*(child.close for child in self.children))

    def _view_for(self, index: int, request: RequestView) -> RequestView:
        sees_hand_off = request.hand_off is None or index == self._hand_off_child(request.hand_off)
        return request if sees_hand_off else _WithoutHandOff(request)

    def _hand_off_child(self, hand_off: HandOff) -> int:
        """The child that takes part in this hand-off."""
        if not isinstance(hand_off, Consume) or _reads(self.children[self._index], hand_off.ticket):
            return self._index
        others = (index for index, child in enumerate(self.children) if _tickets(child).reads)
        return next((index for index in others if _reads(self.children[index], hand_off.ticket)), self._index)

    def _try(self, index: int, call: Callable[[], Result], default: Result) -> Result:
        """Call a child. Returns `default` if the child raises, so that the others continue."""
        try:
            return call()
        except Exception:
            logger.exception("connector %d of MultiConnector failed; the others continue without it", index)
            return default


def _tickets(side: object) -> TicketKinds:
    """The kinds of tickets that a child writes and reads; not known for a connector without hand-offs."""
    return side.tickets() if isinstance(side, HandsOff) else TicketKinds()


def _reads(side: object, ticket: Ticket) -> bool:
    return not isinstance(side, HandsOff) or side.reads(ticket)
