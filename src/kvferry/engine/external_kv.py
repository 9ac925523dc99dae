"""KV that comes from outside of the engine, or is kept for somebody outside: the scheduler's dealings with a connector.

Owns which requests wait for a load, which blocks are held for peers, and what the connector has yet to be told. It does
not know the queues, the token budget or the order of requests: it answers the scheduler, which acts on the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from kvferry.connectors.api import (
    Finish,
    Hit,
    Hold,
    Match,
    Miss,
    ScheduledChunk,
    SchedulerSide,
    StepPlan,
    StepView,
    TransferReport,
)
from kvferry.core.clock import Clock
from kvferry.core.errors import HandOffFailed, KvferryError, LeakError
from kvferry.core.hand_off import Consume, PrefillResult, Produce
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.sequence import Meeting, Sequence, Status
from kvferry.engine.step import Chunk
from kvferry.observe.figures import counter, counter_by, gauge

log = logging.getLogger(__name__)


@dataclass
class ExternalKVStatistics:
    """Gauges now and counters since the start."""

    num_loading: int = gauge("kvferry:num_requests_loading", "Requests waiting for their KV, with blocks reserved.")
    num_held: int = gauge("kvferry:num_hand_offs_held", "Hand-offs prefilled here and not yet fetched.")
    num_external_hits: int = counter("vllm:external_prefix_cache_hits", "Tokens found through the connector.")
    num_load_failures: dict[str, int] = counter_by(
        "kind", "kvferry:kv_load_failures", "KV that could not be loaded, by error."
    )


class ExternalKV:
    """The scheduler's only way to the connector; without a connector it answers that there is nothing to load.

    What the connector raises passes through, except where a docstring says otherwise: the scheduler knows whose request
    it was. `fail_on_lost_hand_off`: the failure policy is `fail`.
    """

    def __init__(
        self, connector: SchedulerSide[StepPlan] | None, pool: BlockPool, clock: Clock, *, fail_on_lost_hand_off: bool
    ) -> None:
        self._connector = connector
        self._pool = pool
        self._clock = clock
        self._fail_on_lost_hand_off = fail_on_lost_hand_off
        self._loading: dict[str, Sequence] = {}
        self._held: dict[str, list[int]] = {}
        self._preempted: list[Sequence] = []
        self._has_new_hold = False
        self._counters = ExternalKVStatistics()

    # Before a request runs.

    def promised_result(self, sequence: Sequence) -> PrefillResult | None:
        """What the producer sampled, if the ticket is trusted and is for this prompt and not a prefix of it."""
        hand_off = sequence.hand_off
        if not isinstance(hand_off, Consume) or not hand_off.ticket.is_of(sequence.prompt_token_ids):
            return None
        if self._connector is not None and self._connector.refusal(sequence) is not None:
            return None
        return hand_off.ticket.prefill_result

    def arrived(self, sequence: Sequence) -> None:
        """The request has joined the queue."""
        if self._connector is not None:
            self._connector.arrived(sequence)

    def match(self, sequence: Sequence, num_cached_tokens: int) -> Match:
        """How much can be loaded beyond `num_cached_tokens`. After a `Miss` the connector is not asked again."""
        if self._connector is None or sequence.is_load_settled or not sequence.reuses_prefix:
            return Miss()
        if not sequence.can_use_offered():
            sequence.is_load_settled = True
            return Miss()
        match = self._connector.match(sequence, num_cached_tokens)
        sequence.is_load_settled = isinstance(match, Miss)
        return match

    def failure_of(self, sequence: Sequence, error: KvferryError) -> HandOffFailed | None:
        """A load was lost, and is counted: the error that the failure policy ends the request with; None: recompute.

        A prefill that would have fetched an earlier turn's KV is always recomputed: the hand-off only saves it work.
        """
        kind = type(error).__name__
        self._counters.num_load_failures[kind] = self._counters.num_load_failures.get(kind, 0) + 1
        only_saves_work = isinstance(sequence.hand_off, Produce) and sequence.hand_off.source is not None
        if not self._fail_on_lost_hand_off or only_saves_work:
            return None
        return HandOffFailed(f"the KV of this request could not be loaded: {error}")

    # Loads.

    def begin_load(self, sequence: Sequence, num_cached: int, hit: Hit) -> bool:
        """The sequence has blocks for a hit. True: it runs at once, layer by layer or before a meeting; False: it waits
        for its KV."""
        assert self._connector is not None, "only a connector has hits"
        self._connector.allocated(sequence, tuple(sequence.block_ids), num_cached, hit)
        self._counters.num_external_hits += hit.num_tokens - hit.num_computed_meanwhile
        sequence.request.timeline.stamp("transfer_started", self._clock.wall())
        if hit.layerwise:
            sequence.layerwise_base = num_cached
            sequence.num_computed_tokens = num_cached + hit.num_tokens
            sequence.is_load_settled = True
        elif hit.num_computed_meanwhile:
            sequence.meeting = Meeting(num_cached + hit.num_computed_meanwhile, num_cached + hit.num_tokens)
        else:
            sequence.status = Status.LOADING
            sequence.load_target = num_cached + hit.num_tokens
            self._loading[sequence.request_id] = sequence
        return hit.layerwise or sequence.meeting is not None

    def meet(self, sequence: Sequence) -> int | None:
        """Some more is computed before a meeting. Returns how many tokens have their KV once both ends have come to the
        place. None: not yet; where only the load has yet to come, the sequence waits for its KV from now on."""
        meeting = sequence.meeting
        assert meeting is not None, "only before a meeting"
        if sequence.num_computed_tokens < meeting.first:
            return None
        if meeting.is_loaded:
            sequence.meeting = None
            return meeting.last
        sequence.status, sequence.load_target = Status.LOADING, meeting.last
        self._loading[sequence.request_id] = sequence
        return None

    def end_load(self, sequence: Sequence, num_tokens: int | None) -> int | None:
        """The KV has come, of the first `num_tokens` (None: of all that was promised). Returns how many tokens have
        their KV now; None: the sequence has been running, and goes on."""
        sequence.request.timeline.stamp("transfer_done", self._clock.wall())
        if (meeting := sequence.meeting) is not None:
            sequence.is_load_settled = meeting.is_loaded = True
            meeting.last = _reached(meeting.first, num_tokens, meeting.last)
        if self._loading.pop(sequence.request_id, None) is None:
            return None
        sequence.is_load_settled, sequence.meeting = True, None
        return _reached(sequence.num_computed_tokens, num_tokens, sequence.load_target)

    def abandon_load(self, sequence: Sequence) -> None:
        """The KV will not come, or is not wanted any more: back to what the sequence had before."""
        sequence.is_load_settled, sequence.meeting = True, None
        self._loading.pop(sequence.request_id, None)
        if sequence.layerwise_base is not None:
            sequence.num_computed_tokens, sequence.layerwise_base = sequence.layerwise_base, None

    # Plans and reports.

    def preempted(self, sequence: Sequence) -> None:
        """Its blocks go to others; the connector learns it with the next plan that is made."""
        self._preempted.append(sequence)

    def plan(self, chunks: Iterable[Chunk]) -> StepPlan | None:
        """What the worker sides do in the next step."""
        plan = None
        if self._connector is not None:
            views = [self._view(chunk) for chunk in chunks]
            plan = self._connector.plan(StepView(views, tuple(self._preempted)))
        self._preempted.clear()
        return plan

    def plan_between_steps(self) -> StepPlan | None:
        """What the worker sides do at once when a prefill has just ended, whose blocks are now held: a consumer need
        not wait for another step. None: nothing. A plan that fails is logged, and made again with the next step."""
        if self._connector is None or not self._has_new_hold:
            return None
        self._has_new_hold = False
        try:
            return self._connector.plan(StepView([], ()))
        except Exception:
            log.exception("the connector's plan between two steps failed")
            return None

    def released(self, request_id: str) -> None:
        """Nobody needs the blocks held for this request any more; it may be told again."""
        self._pool.release(self._held.pop(request_id, []))

    def completed(self, report: TransferReport) -> None:
        """Pass a report of the worker sides on to the connector's scheduler side."""
        if self._connector is not None:
            self._connector.completed(report)

    def finish(self, sequence: Sequence) -> dict[str, Any] | None:
        """The sequence has ended: its blocks go back to the pool, or are held. Returns the ticket for its answer."""
        self._loading.pop(sequence.request_id, None)
        blocks, sequence.block_ids = sequence.block_ids, []
        if self._connector is None:
            self._pool.release(blocks)
            return None
        answer = self._ask_finish(self._connector, sequence, tuple(blocks))
        if isinstance(answer, Hold):
            self._held[sequence.request_id] = blocks
            self._has_new_hold = True
        else:
            self._pool.release(blocks)
        return answer.ticket

    @staticmethod
    def _ask_finish(connector: SchedulerSide[StepPlan], sequence: Sequence, blocks: tuple[int, ...]) -> Finish:
        """Who keeps the blocks. If the connector raises twice, the blocks are never used again, since somebody may
        still read or write them."""
        try:
            return connector.finish(sequence, blocks)
        except Exception:
            log.exception("the connector failed at the end of request %s", sequence.request_id)
        try:
            return connector.finish(sequence, blocks)
        except Exception:
            log.exception("%d KV blocks of request %s are lost to the pool", len(blocks), sequence.request_id)
            return Hold(None)

    @staticmethod
    def _view(chunk: Chunk) -> ScheduledChunk:
        return ScheduledChunk(chunk.sequence, chunk.start, chunk.num_tokens, tuple(chunk.sequence.block_ids))

    # Insight.

    @property
    def has_work(self) -> bool:
        """Whether the connector wants a step, even if no request runs."""
        return self._connector is not None and self._connector.has_work()

    @property
    def num_loading(self) -> int:
        """Requests that wait for their KV."""
        return len(self._loading)

    def holds(self, request_id: str) -> bool:
        """Whether blocks of this request are held."""
        return request_id in self._held

    @property
    def held_blocks(self) -> set[int]:
        """All blocks held for peers."""
        return set().union(*self._held.values())

    def statistics(self) -> ExternalKVStatistics:
        """A copy of the gauges and counters."""
        failures = dict(self._counters.num_load_failures)
        return replace(
            self._counters, num_loading=len(self._loading), num_held=len(self._held), num_load_failures=failures
        )

    def check(self) -> None:
        """Raise `LeakError` when something is still kept. For when no request is left."""
        if self._loading:
            raise LeakError(f"{len(self._loading)} requests that have ended still wait for their KV")
        if self._connector is not None and not self._held:
            self._connector.check()


def _reached(num_computed: int, num_tokens: int | None, num_promised: int) -> int:
    """How far the KV reaches behind `num_computed` tokens, of which a load says that it brought the first `num_tokens`
    (None: all). More than was promised has no blocks."""
    return num_promised if num_tokens is None else max(num_computed, min(num_tokens, num_promised))
