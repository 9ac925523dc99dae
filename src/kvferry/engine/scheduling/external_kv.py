"""KV that is loaded from outside the engine, or held for the connector: the scheduler's interface to the connector.

Owns the requests that wait for a load, the blocks held for the connector, and the preemptions that the connector does
not know yet. It does not know the queues, the token budget or the order of requests: it answers the scheduler, which
acts on the answer.

Blocks are held after the end of their request: for a hand-off, while a load into them has not ended, or because the
connector failed at the request's end.
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

logger = logging.getLogger(__name__)


@dataclass
class ExternalKVStatistics:
    """Gauges, and counters since the start."""

    num_loading: int = gauge("kvferry:num_requests_loading", "Requests waiting for their KV, with blocks reserved.")
    num_held: int = gauge(
        "kvferry:num_hand_offs_held",
        "Requests whose KV blocks are held after their end, for hand-offs and for loads that have not ended.",
    )
    num_external_hits: int = counter(
        "vllm:external_prefix_cache_hits", "Tokens whose KV was found through the connector."
    )
    num_load_failures: dict[str, int] = counter_by(
        "kind", "kvferry:kv_load_failures", "KV that could not be loaded, by error."
    )


class ExternalKV:
    """Calls the connector for the scheduler. Without a connector, nothing is loaded or held.

    Unless a docstring says otherwise, the connector's exceptions pass through to the scheduler, which knows the
    request. `fail_on_load_failure`: a failed load ends its request (`kv_load_failure_policy` is `fail`).
    """

    def __init__(
        self, connector: SchedulerSide[StepPlan] | None, pool: BlockPool, clock: Clock, *, fail_on_load_failure: bool
    ) -> None:
        self._connector = connector
        self._hands_off = connector if connector is not None and isinstance(connector, HandsOff) else None
        self._pool = pool
        self._clock = clock
        self._fail_on_lost_hand_off = fail_on_load_failure
        self._loading: dict[str, Sequence] = {}
        self._held: dict[str, list[int]] = {}
        self._preempted: list[Sequence] = []
        self._has_new_hold = False
        self._counters = ExternalKVStatistics()

    # Before a request runs.

    def promised_result(self, sequence: Sequence) -> PrefillResult | None:
        """The result of P's prefill in the ticket; None unless the ticket is trusted and is for exactly this prompt."""
        hand_off = sequence.hand_off
        if not isinstance(hand_off, Consume) or not hand_off.ticket.is_of(sequence.prompt_token_ids, sequence.salt):
            return None
        if self._hands_off is not None and self._hands_off.refusal(sequence) is not None:
            return None
        return hand_off.ticket.prefill_result

    def on_arrived(self, sequence: Sequence) -> None:
        """Record that the request has joined the queue."""
        if self._connector is not None:
            self._connector.arrived(sequence)

    def match(self, sequence: Sequence, num_cached_tokens: int) -> Match:
        """The KV that can be loaded after the first `num_cached_tokens` tokens of the prompt (vLLM's
        `get_num_new_matched_tokens`). After a `Miss`, the connector is not called again for the sequence."""
        if self._connector is None or sequence.load.is_settled or not sequence.reuses_prefix:
            return Miss()
        if not sequence.can_use_remote_kv():
            sequence.load.is_settled = True
            return Miss()
        match = self._connector.match(sequence, num_cached_tokens)
        sequence.load.is_settled = isinstance(match, Miss)
        return match

    def record_load_failure(self, sequence: Sequence, error: KvferryError) -> HandOffFailed | None:
        """Count a failed load, and apply the failure policy. Returns the error with which the request ends; None: the
        KV is computed here.

        A prefill that was to fetch the KV of an earlier turn is always computed: that KV would only have saved work.
        """
        kind = type(error).__name__
        self._counters.num_load_failures[kind] = self._counters.num_load_failures.get(kind, 0) + 1
        only_saves_work = isinstance(sequence.hand_off, Produce) and sequence.hand_off.source is not None
        if not self._fail_on_lost_hand_off or only_saves_work:
            return None
        return HandOffFailed(f"the KV of this request could not be loaded: {error}")

    def make_room(self, num_blocks: int) -> None:
        """Ask the connector to release held blocks, because a request waits for `num_blocks` more. Blocks become free
        some steps later."""
        if self._hands_off is not None:
            self._hands_off.make_room(num_blocks)

    # Loads.

    def begin_load(self, sequence: Sequence, num_cached: int, hit: Hit) -> bool:
        """Begin to load a hit into the sequence's blocks. Returns True if the sequence runs at once, because its KV is
        loaded layer by layer, or because it computes the tokens before a meeting point while the later ones are loaded.
        False: it waits for its KV."""
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

    def tokens_after_meeting(self, sequence: Sequence) -> int | None:
        """The number of tokens with KV, if all tokens before the meeting point are computed and all later ones loaded.
        Otherwise None; if only the load is missing, the sequence now waits for it."""
        meeting = sequence.load.meeting
        assert meeting is not None, "only before a meeting"
        if sequence.num_computed_tokens < meeting.start:
            return None
        if meeting.is_loaded:
            sequence.load.meeting = None
            return meeting.end
        sequence.status, sequence.load.target = Status.LOADING, meeting.end
        self._loading[sequence.request_id] = sequence
        return None

    def end_load(self, sequence: Sequence, num_tokens: int | None) -> int | None:
        """Record that a load has ended, with the KV of the first `num_tokens` tokens (None: of all promised ones).
        Returns the number of tokens with KV; None: the sequence did not wait for the load, and continues to run."""
        sequence.request.timeline.stamp("transfer_done", self._clock.wall())
        if (meeting := sequence.load.meeting) is not None:
            sequence.load.is_settled = meeting.is_loaded = True
            meeting.end = _reached(meeting.start, num_tokens, meeting.end)
        if self._loading.pop(sequence.request_id, None) is None:
            return None
        sequence.load.is_settled, sequence.load.meeting = True, None
        return _reached(sequence.num_computed_tokens, num_tokens, sequence.load.target)

    @staticmethod
    def fail_incomplete_loads(chunks: Iterable[Chunk], report: TransferReport) -> TransferReport:
        """The report, in which layerwise loads of this step are marked as failed if they are incomplete or missing,
        because the step has used their KV. All other events stay unchanged."""
        promised = {
            chunk.sequence.request_id: chunk.start for chunk in chunks if chunk.sequence.load.layerwise_base is not None
        }
        events = [_complete_or_failed(event, promised) for event in report]
        reported = {event.request_id for event in events if isinstance(event, Loaded | Failed)}
        missing = TransferError("the connector did not report a layerwise load with its step")
        return [*events, *(Failed(request_id, missing) for request_id in promised if request_id not in reported)]

    def abandon_load(self, sequence: Sequence) -> None:
        """End a failed or cancelled load. The sequence has the KV that it had before the load."""
        sequence.load.is_settled, sequence.load.meeting = True, None
        self._loading.pop(sequence.request_id, None)
        if sequence.load.layerwise_base is not None:
            sequence.num_computed_tokens, sequence.load.layerwise_base = sequence.load.layerwise_base, None

    def hold_blocks(self, sequence: Sequence, hold_id: str) -> None:
        """Hold the blocks of a sequence whose load does not end, until the connector reports `Released` with this
        `hold_id`, which is usually the request's id."""
        self._held[hold_id], sequence.block_ids = sequence.block_ids, []

    # Plans and reports.

    def on_preempted(self, sequence: Sequence) -> None:
        """Record that the sequence's blocks were released. The connector learns this with the next plan."""
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
        """The plan for newly held blocks. The worker sides execute it at once, so that a consumer need not wait for the
        next step. None: nothing to do. If the connector raises, this is logged, and the next step plans as always."""
        if self._connector is None or not self._has_new_hold:
            return None
        self._has_new_hold = False
        try:
            return self._connector.plan(StepView([], ()))
        except Exception:
            logger.exception("the connector's plan between two steps failed")
            return None

    def release_held(self, request_id: str) -> None:
        """Release the blocks that are held under this id, if any."""
        self._pool.release(self._held.pop(request_id, []))

    def on_completed(self, report: TransferReport) -> None:
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
        """Call the connector's `finish`, a second time if it raises. If it raises twice, the blocks are held forever,
        because a transfer may still read or write them."""
        try:
            return connector.finish(sequence, blocks)
        except Exception:
            logger.exception("the connector failed at the end of request %s", sequence.request_id)
        try:
            return connector.finish(sequence, blocks)
        except Exception:
            logger.exception(
                "%d KV blocks of request %s will never be reused, because the connector failed twice",
                len(blocks),
                sequence.request_id,
            )
            return Hold(None)

    @staticmethod
    def _view(chunk: Chunk) -> ScheduledChunk:
        return ScheduledChunk(chunk.sequence, chunk.start, chunk.num_tokens, tuple(chunk.sequence.block_ids))

    # Inspection.

    @property
    def has_work(self) -> bool:
        """True if the connector wants a step, even if no request runs."""
        return self._connector is not None and self._connector.has_work()

    @property
    def num_loading(self) -> int:
        """Number of requests that wait for their KV."""
        return len(self._loading)

    def holds(self, request_id: str) -> bool:
        """True if blocks are held under this id."""
        return request_id in self._held

    @property
    def held_blocks(self) -> set[int]:
        """Ids of all blocks that are held for the connector."""
        return set().union(*self._held.values())

    def statistics(self) -> ExternalKVStatistics:
        """A copy of the gauges and counters."""
        failures = dict(self._counters.num_load_failures)
        return replace(
            self._counters, num_loading=len(self._loading), num_held=len(self._held), num_load_failures=failures
        )

    def check(self) -> None:
        """Raise `LeakError` if a request still waits for a load or, unless blocks are held, if the connector's
        scheduler side still has a resource. Call this when no request is left."""
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
    """Number of tokens with KV after a load of the first `num_tokens` (None: of all promised ones), for a sequence that
    had `num_computed`. The sequence has blocks for at most `num_promised`."""
    return num_promised if num_tokens is None else max(num_computed, min(num_tokens, num_promised))
