"""KV that is loaded from outside the engine, or held for a peer: the scheduler's interface to the connector.

Owns the requests that wait for a load, the blocks held for peers, and the preemptions that the connector does not know
yet. It does not know the queues, the token budget or the order of requests: it answers the scheduler, which acts on the
answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvferry.connectors.api import (
    Failed,
    Finish,
    HandsOff,
    Hit,
    Hold,
    Loaded,
    Match,
    Miss,
    Release,
    ScheduledChunk,
    SchedulerSide,
    StepPlan,
    StepView,
    TransferEvent,
    TransferReport,
    check_side,
)
from kvferry.core.clock import Clock
from kvferry.core.errors import HandOffFailed, KvferryError, LeakError, TransferError
from kvferry.core.messages.hand_off import Consume, PrefillResult, Produce
from kvferry.engine.blocks.block_pool import BlockPool
from kvferry.engine.scheduling.sequence import LoadMeetingPoint, Sequence, Status
from kvferry.engine.scheduling.step import Chunk
from kvferry.observe.metric_fields import counter, counter_by, gauge

log = logging.getLogger(__name__)


@dataclass
class ExternalKVStatistics:
    """Gauges now and counters since the start."""

    num_loading: int = gauge("kvferry:num_requests_loading", "Requests waiting for their KV, with blocks reserved.")
    num_held: int = gauge("kvferry:num_hand_offs_held", "Hand-offs prefilled here and not yet fetched.")
    num_external_hits: int = counter(
        "vllm:external_prefix_cache_hits", "Tokens whose KV was found through the connector."
    )
    num_load_failures: dict[str, int] = counter_by(
        "kind", "kvferry:kv_load_failures", "KV that could not be loaded, by error."
    )


class ExternalKV:
    """Calls the connector for the scheduler; without a connector there is nothing to load or to hold.

    The connector's exceptions pass through, except where a docstring says otherwise: the scheduler knows the request.
    `fail_on_lost_hand_off`: the failure policy is `fail`.
    """

    def __init__(
        self, connector: SchedulerSide[StepPlan] | None, pool: BlockPool, clock: Clock, *, fail_on_lost_hand_off: bool
    ) -> None:
        self._connector = connector
        self._hands_off = connector if connector is not None and isinstance(connector, HandsOff) else None
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
        """The producer's result, if the ticket is trusted and is for exactly this prompt."""
        hand_off = sequence.hand_off
        if not isinstance(hand_off, Consume) or not hand_off.ticket.is_of(sequence.prompt_token_ids, sequence.salt):
            return None
        if self._hands_off is not None and self._hands_off.refusal(sequence) is not None:
            return None
        return hand_off.ticket.prefill_result

    def arrived(self, sequence: Sequence) -> None:
        """Record that the request has joined the queue."""
        if self._connector is not None:
            self._connector.arrived(sequence)

    def match(self, sequence: Sequence, num_cached_tokens: int) -> Match:
        """The KV that can be loaded beyond the first `num_cached_tokens` of the prompt (vLLM's
        `get_num_new_matched_tokens`). After a `Miss` the connector is not called again."""
        if self._connector is None or sequence.load.is_settled or not sequence.reuses_prefix:
            return Miss()
        if not sequence.can_use_remote_kv():
            sequence.load.is_settled = True
            return Miss()
        match = self._connector.match(sequence, num_cached_tokens)
        sequence.load.is_settled = isinstance(match, Miss)
        return match

    def failure_of(self, sequence: Sequence, error: KvferryError) -> HandOffFailed | None:
        """Count a failed load. Returns the error with which the failure policy ends the request; None: recompute.

        A prefill that would have fetched an earlier turn's KV is always recomputed: the hand-off only saves it work.
        """
        kind = type(error).__name__
        self._counters.num_load_failures[kind] = self._counters.num_load_failures.get(kind, 0) + 1
        only_saves_work = isinstance(sequence.hand_off, Produce) and sequence.hand_off.source is not None
        if not self._fail_on_lost_hand_off or only_saves_work:
            return None
        return HandOffFailed(f"the KV of this request could not be loaded: {error}")

    def make_room(self, num_blocks: int) -> None:
        """Have the connector release held blocks, because a request waits for `num_blocks` more. They become free some
        steps later."""
        if self._hands_off is not None:
            self._hands_off.make_room(num_blocks)

    # Loads.

    def begin_load(self, sequence: Sequence, num_cached: int, hit: Hit) -> bool:
        """Begin to load a hit into the sequence's blocks. Returns True if the sequence runs at once, because it loads
        layer by layer or computes the tokens before a meeting point; False if it waits for its KV."""
        assert self._connector is not None, "only a connector has hits"
        self._connector.allocated(sequence, tuple(sequence.block_ids), num_cached, hit)
        self._counters.num_external_hits += hit.num_tokens - hit.num_computed_meanwhile
        sequence.request.timeline.stamp("transfer_started", self._clock.wall())
        if hit.layerwise:
            sequence.load.layerwise_base = num_cached
            sequence.num_computed_tokens = num_cached + hit.num_tokens
            sequence.load.is_settled = True
        elif hit.num_computed_meanwhile:
            sequence.load.meeting = LoadMeetingPoint(
                num_cached + hit.num_computed_meanwhile, num_cached + hit.num_tokens
            )
        else:
            sequence.status = Status.LOADING
            sequence.load.target = num_cached + hit.num_tokens
            self._loading[sequence.request_id] = sequence
        return hit.layerwise or sequence.load.meeting is not None

    def meet(self, sequence: Sequence) -> int | None:
        """The number of tokens with KV if everything before the meeting point is computed and everything behind it
        loaded; else None, and a sequence that has computed its part waits for the load."""
        meeting = sequence.load.meeting
        assert meeting is not None, "only before a meeting"
        if sequence.num_computed_tokens < meeting.first:
            return None
        if meeting.is_loaded:
            sequence.load.meeting = None
            return meeting.last
        sequence.status, sequence.load.target = Status.LOADING, meeting.last
        self._loading[sequence.request_id] = sequence
        return None

    def end_load(self, sequence: Sequence, num_tokens: int | None) -> int | None:
        """Record that a load brought the KV of the first `num_tokens` (None: all promised ones). Returns the number
        of tokens with KV; None: the sequence did not wait for the load, and continues to run."""
        sequence.request.timeline.stamp("transfer_done", self._clock.wall())
        if (meeting := sequence.load.meeting) is not None:
            sequence.load.is_settled = meeting.is_loaded = True
            meeting.last = _reached(meeting.first, num_tokens, meeting.last)
        if self._loading.pop(sequence.request_id, None) is None:
            return None
        sequence.load.is_settled, sequence.load.meeting = True, None
        return _reached(sequence.num_computed_tokens, num_tokens, sequence.load.target)

    @staticmethod
    def settled(chunks: Iterable[Chunk], report: TransferReport) -> TransferReport:
        """The report with layerwise loads of this step marked as failed if they are incomplete or missing: the step has
        used their KV. All other events stay unchanged."""
        promised = {
            chunk.sequence.request_id: chunk.start for chunk in chunks if chunk.sequence.load.layerwise_base is not None
        }
        settled = [_complete_or_failed(event, promised) for event in report]
        reported = {event.request_id for event in settled if isinstance(event, Loaded | Failed)}
        missing = TransferError("the connector did not report a layerwise load with its step")
        return [*settled, *(Failed(request_id, missing) for request_id in promised if request_id not in reported)]

    def abandon_load(self, sequence: Sequence) -> None:
        """End a failed or cancelled load: the sequence is back at the KV that it had before."""
        sequence.load.is_settled, sequence.load.meeting = True, None
        self._loading.pop(sequence.request_id, None)
        if sequence.load.layerwise_base is not None:
            sequence.num_computed_tokens, sequence.load.layerwise_base = sequence.load.layerwise_base, None

    def hold_blocks(self, sequence: Sequence, name: str) -> None:
        """Hold the blocks of a sequence whose load does not end, until the connector reports `Released` for this
        name."""
        self._held[name], sequence.block_ids = sequence.block_ids, []

    # Plans and reports.

    def preempted(self, sequence: Sequence) -> None:
        """Record that the sequence's blocks were released; the connector gets it with the next plan."""
        self._preempted.append(sequence)

    def plan(self, chunks: Iterable[Chunk]) -> StepPlan | None:
        """The connector's plan for its worker sides in the next step. None: there is no connector."""
        plan = None
        if self._connector is not None:
            views = [self._view(chunk) for chunk in chunks]
            plan = self._connector.plan(StepView(views, tuple(self._preempted)))
        self._preempted.clear()
        return plan

    def plan_between_steps(self) -> StepPlan | None:
        """The plan for newly held blocks, which the worker sides execute at once, so that a consumer need not wait for
        another step. None: nothing to do. A plan that fails is logged; the next step plans as always."""
        if self._connector is None or not self._has_new_hold:
            return None
        self._has_new_hold = False
        try:
            return self._connector.plan(StepView([], ()))
        except Exception:
            log.exception("the connector's plan between two steps failed")
            return None

    def released(self, request_id: str) -> None:
        """Release the blocks held for this request, if any."""
        self._pool.release(self._held.pop(request_id, []))

    def completed(self, report: TransferReport) -> None:
        """Pass a report of the worker sides on to the connector's scheduler side."""
        if self._connector is not None:
            self._connector.completed(report)

    def finish(self, sequence: Sequence) -> Finish:
        """Release the blocks of a finished sequence, or hold them for the connector."""
        self._loading.pop(sequence.request_id, None)
        blocks, sequence.block_ids = sequence.block_ids, []
        if self._connector is None:
            self._pool.release(blocks)
            return Release()
        answer = self._finish_with_retry(self._connector, sequence, tuple(blocks))
        if isinstance(answer, Hold):
            self._held[sequence.request_id] = blocks
            self._has_new_hold = True
        else:
            self._pool.release(blocks)
        return answer

    @staticmethod
    def _finish_with_retry(connector: SchedulerSide[StepPlan], sequence: Sequence, blocks: tuple[int, ...]) -> Finish:
        """The connector's `finish`, retried once. If it raises twice, the blocks are held for good, because a transfer
        may still read or write them."""
        try:
            return connector.finish(sequence, blocks)
        except Exception:
            log.exception("the connector failed at the end of request %s", sequence.request_id)
        try:
            return connector.finish(sequence, blocks)
        except Exception:
            log.exception(
                "%d KV blocks of request %s are never reused, because the connector failed twice",
                len(blocks),
                sequence.request_id,
            )
            return Hold(None)

    @staticmethod
    def _view(chunk: Chunk) -> ScheduledChunk:
        return ScheduledChunk(chunk.sequence, chunk.start, chunk.num_tokens, tuple(chunk.sequence.block_ids))

    # Insight.

    @property
    def has_work(self) -> bool:
        """True if the connector wants a step, even if no request runs."""
        return self._connector is not None and self._connector.has_work()

    @property
    def num_loading(self) -> int:
        """Number of requests that wait for their KV."""
        return len(self._loading)

    def holds(self, request_id: str) -> bool:
        """True if blocks of this request are held."""
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
        """Raise `LeakError` if a resource is still held. Call it when no request is left."""
        if self._loading:
            raise LeakError(f"{len(self._loading)} requests that have ended still wait for their KV")
        if not self._held:
            check_side(self._connector)


def _complete_or_failed(event: TransferEvent, promised: Mapping[str, int]) -> TransferEvent:
    if not isinstance(event, Loaded) or event.num_tokens is None:
        return event
    num_promised = promised.get(event.request_id, 0)
    if event.num_tokens >= num_promised:
        return event
    error = TransferError(
        f"a layerwise load brought the KV of {event.num_tokens} tokens instead of the promised {num_promised}"
    )
    return Failed(event.request_id, error)


def _reached(num_computed: int, num_tokens: int | None, num_promised: int) -> int:
    """Number of tokens with KV after a load that brought the first `num_tokens` (None: all promised ones), for a
    sequence with `num_computed`. There are no blocks for more than `num_promised`."""
    return num_promised if num_tokens is None else max(num_computed, min(num_tokens, num_promised))
