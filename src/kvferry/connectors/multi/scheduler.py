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
from kvferry.core.closing import close_all
from kvferry.core.errors import ChildLost, KvferryError, LeakError
from kvferry.core.messages.hand_off import Consume, HandOff, Produce, Ticket
from kvferry.core.messages.instance_facts import TicketKinds
from kvferry.core.messages.kept import TierShare
from kvferry.core.settings.transfer_config import KVTransferConfig

log = logging.getLogger(__name__)

PATIENCE_S = 0.1
Result = TypeVar("Result")


class _WithoutHandOff:
    """A request as children see it that take no part in its hand-off."""

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
    """Asks each connector of the list, loads from the one that has the most, and saves to all."""

    gauges = child_gauges(ConnectorSpec.scheduler_class)

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._clock, self._config = context.clock, context.config
        children = read_children(context)
        self.children = [spec.build_scheduler_side(own) for spec, own in children]
        self._configs = [own.config for _, own in children]
        self._index = handing_off(self._configs) or 0
        chosen = self.children[self._index]
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
        for index, child in enumerate(self.children):
            if index not in self._lost:
                self._try(index, partial(child.arrived, self._seen(index, request)), None)

    def refusal(self, request: RequestView) -> KvferryError | None:
        """Why the child that takes part in the hand-off refuses the request, if it does."""
        side = self.children[self._takes_part(request.hand_off)]
        return side.refusal(request) if isinstance(side, HandsOff) else None

    def match(self, request: RequestView, num_computed_tokens: int) -> Match:
        """The match of the child that has the most of the prompt."""
        matches = [self._match(index, request, num_computed_tokens) for index in range(len(self.children))]
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
        match = self.children[index].match
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
        """Whether to wait for children that still look up the prompt: always without a hit, as they have deadlines."""
        if not has_hit:
            return True
        now = self._clock.monotonic()
        return now - self._answered_at.setdefault(request.request_id, now) < PATIENCE_S

    def _choose(self, request: RequestView, index: int, hit: Hit) -> Hit:
        self._answered_at.pop(request.request_id, None)
        self._chosen[request.request_id] = index
        return hit

    def allocated(self, request: RequestView, block_ids: Sequence[int], num_computed_tokens: int, hit: Hit) -> None:
        index = self._chosen[request.request_id]
        self._loads[request.request_id] = index
        self.children[index].allocated(self._seen(index, request), block_ids, num_computed_tokens, hit)

    # Steps.

    def plan(self, step: StepView) -> MultiPlan | None:
        """The plans of all children, and which of them loads and keeps what since the last plan."""
        plans = [self._plan(index, step) for index in range(len(self.children))]
        loads, self._loads = self._loads, {}
        holds, self._holds = self._holds, {}
        if not (loads or holds or any(plan is not None for plan in plans)):
            return None
        return MultiPlan(plans=plans, loads=loads, holds=holds)

    def _plan(self, index: int, step: StepView) -> Any:
        child = self.children[index]
        seen = StepView(
            [
                ScheduledChunk(self._seen(index, chunk.request), chunk.start, chunk.num_tokens, chunk.block_ids)
                for chunk in step.chunks
            ],
            [self._seen(index, request) for request in step.preempted],
        )
        return self._try(index, lambda: child.plan(seen), None)

    def on_answer(self, wake: Wake) -> None:
        for child in self.children:
            child.on_answer(wake)

    def saves(self, plan: MultiPlan | None) -> Sequence[tuple[str, Sequence[BlockHash]]]:
        found: list[tuple[str, Sequence[BlockHash]]] = []
        for child, part in zip(self.children, plan.plans if plan is not None else (), strict=False):
            if part is not None and isinstance(child, KeepsBlocks):
                found += child.saves(part)
        return found

    def has_work(self) -> bool:
        return bool(self._loads or self._holds) or any(child.has_work() for child in self.children)

    def completed(self, report: TransferReport) -> None:
        """Pass the report on: events of a load to the child that loaded, what stores took to the one that hands off,
        and all others to all. Each child is called for each step, as it would be alone, because it may measure how long
        steps take."""
        for event in report:
            if isinstance(event, Failed) and isinstance(event.error, ChildLost):
                self._is_lost(self._chosen.get(event.request_id))
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

    def _is_lost(self, index: int | None) -> None:
        if index is not None and index not in self._lost:
            log.warning("connector %d of MultiConnector is lost and no longer used", index)
            self._lost.add(index)

    # The end of a request.

    def finish(self, request: RequestView, block_ids: Sequence[int]) -> Finish:
        """Blocks stay as long as one child keeps them; the ticket is that of the child that hands off."""
        verdicts = [child.finish(self._seen(index, request), block_ids) for index, child in enumerate(self.children)]
        self._chosen.pop(request.request_id, None)
        self._answered_at.pop(request.request_id, None)
        ticket = verdicts[self._index].ticket
        keepers = [index for index, verdict in enumerate(verdicts) if isinstance(verdict, Hold)]
        if not keepers:
            return Release(ticket)
        self._holds[request.request_id] = keepers
        self._held.add(request.request_id)
        delays = any(isinstance(verdict, Hold) and verdict.delays_answer for verdict in verdicts)
        return Hold(ticket, delays_answer=delays)

    def release(self, transfer_id: str) -> bool:
        return self._hands_off is not None and self._hands_off.release(transfer_id)

    def stores_take_kv(self) -> bool:
        return self._hands_off is None or self._hands_off.stores_take_kv()

    def refused(self, transfer_id: str) -> None:
        if self._hands_off is not None:
            self._hands_off.refused(transfer_id)

    def make_room(self, num_blocks: int) -> None:
        """Have the child that hands off free blocks: it alone has leases."""
        if self._hands_off is not None:
            self._hands_off.make_room(num_blocks)

    def set_addresses(self, addresses: Sequence[dict[str, Any]]) -> None:
        if self._hands_off is not None:
            self._hands_off.set_addresses(addresses)

    def address_seal(self) -> str:
        return self._hands_off.address_seal() if self._hands_off is not None else ""

    def tickets(self) -> TicketKinds:
        """The kinds that the child that hands off writes, and those that any child reads. If that child writes none, it
        is not known what is written: D may find the KV in another child's store."""
        kinds = [_tickets(child) for child in self.children]
        writes = kinds[self._index].writes
        if not writes and self._configs[self._index].produces:
            writes = None
        reads = [kind.reads for kind in kinds if kind.reads is not None]
        known = len(reads) == len(kinds)
        found = TicketKinds(
            writes=writes, reads=tuple(sorted({name for names in reads for name in names})) if known else None
        )
        return found.within(produces=self._config.produces, consumes=self._config.consumes)

    def keeps_keys(self) -> bool:
        return any(child.keeps_keys() for child in self.children if isinstance(child, KeepsBlocks))

    def reset_cache(self) -> bool:
        forgot = [child.reset_cache() for child in self.children if isinstance(child, KeepsBlocks)]
        return all(forgot)

    @classmethod
    def lossy_codecs(cls, config: KVTransferConfig) -> Sequence[str]:
        """The lossy codecs of the caches among the children, which agree."""
        lossy = [lossy_codecs(find_connector(child), child) for child in child_configs(config)]
        return next((names for names in lossy if names is not None), [])

    # Statistics and checks, and the end.

    def kept(self, hashes: Sequence[BlockHash], *, pin: bool | None) -> Sequence[Future[list[TierShare]]]:
        keep = [child for child in self.children if isinstance(child, KeepsBlocks)]
        return [shares for child in keep for shares in child.kept(hashes, pin=pin)]

    def statistics(self) -> dict[str, float]:
        """The statistics of each child, with its number before the names."""
        return child_statistics(self.children)

    def check(self) -> None:
        for child in self.children:
            check_side(child)
        if self._chosen or self._held or self._holds:
            raise LeakError(f"several connectors still keep {[*self._chosen, *self._held][:8]}")

    def close(self) -> None:
        close_all(*(child.close for child in self.children))

    def _seen(self, index: int, request: RequestView) -> RequestView:
        takes_part = request.hand_off is None or index == self._takes_part(request.hand_off)
        return request if takes_part else _WithoutHandOff(request)

    def _takes_part(self, hand_off: HandOff) -> int:
        """The child that takes part in this hand-off."""
        if not isinstance(hand_off, Consume) or _reads(self.children[self._index], hand_off.ticket):
            return self._index
        others = (index for index, child in enumerate(self.children) if _tickets(child).reads)
        return next((index for index in others if _reads(self.children[index], hand_off.ticket)), self._index)

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
