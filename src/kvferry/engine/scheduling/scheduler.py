"""Decides, step by step, which tokens of which sequences are computed. No tensors, no clock of its own.

Owns the sequences. `SequenceQueues` keeps their order, `SequenceBlocks` allocates their blocks, `Drafter` drafts tokens
for them, and `ExternalKV`, its only interface to a connector, tracks loads and blocks held for peers. It does not know
how tokens are computed.

A step schedules the tokens of each running sequence that have no KV yet (one while decoding, a chunk while prefilling),
the most urgent sequence first, within the token budget. The rest of the budget admits waiting sequences. When blocks
run out, the least urgent running sequence is preempted: its blocks are released, and it is recomputed later.

An exception in one request's part of a step ends that request (`_isolated`) and no other.
"""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvferry.connectors.api import (
    Failed,
    Hit,
    Hold,
    Loaded,
    Match,
    Miss,
    Pending,
    Prefilled,
    Released,
    Saved,
    SchedulerSide,
    StepPlan,
    TransferEvent,
    TransferReport,
)
from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.clock import Clock
from kvferry.core.errors import (
    DeadlineExceeded,
    GrammarFailed,
    InvalidRequest,
    KvferryError,
    QueueFull,
    RequestError,
    RequestFailed,
)
from kvferry.core.messages.hand_off import PrefillResult
from kvferry.core.request import EngineOutput, FinishReason, Request
from kvferry.core.sampling import sampling_digest
from kvferry.engine.blocks.block_pool import BlockPool
from kvferry.engine.scheduling.drafter import Drafter, DraftStatistics
from kvferry.engine.scheduling.external_kv import ExternalKV
from kvferry.engine.scheduling.limits import SchedulerLimits
from kvferry.engine.scheduling.queues import SequenceQueues
from kvferry.engine.scheduling.sequence import Sequence, Status
from kvferry.engine.scheduling.sequence_blocks import SequenceBlocks
from kvferry.engine.scheduling.step import Chunk, SampledToken, Step
from kvferry.engine.scheduling.step_budget import StepBudget
from kvferry.observe.metric_fields import counter, gauge

logger = logging.getLogger(__name__)
NONE_FAILED: Mapping[str, KvferryError] = {}


@dataclass
class SchedulerStatistics:
    """Gauges, and counters since the start. Prefix cache counters are in tokens."""

    num_running: int = gauge("vllm:num_requests_running", "Requests being computed.")
    num_waiting: int = 0
    """Requests in the queue; requests that wait for their KV are in `ExternalKVStatistics.num_loading`."""
    num_preemptions: int = counter("vllm:num_preemptions", "Requests that were preempted because blocks ran out.")
    num_context_recomputes: int = counter(
        "kvferry:num_recomputed",
        "Requests computed again because their KV was of the other side of the trained context.",
    )
    num_tokens_not_adopted: int = counter(
        "kvferry:first_tokens_not_adopted",
        "Hand-offs whose first token D sampled again, because P had another model or other sampling parameters.",
    )
    drafts: DraftStatistics = field(default_factory=DraftStatistics)
    num_prefix_queries: int = counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.")
    num_prefix_hits: int = counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.")


class _Isolated:
    """A context manager: if the body raises, only one sequence ends. A class rather than a generator with
    `@contextmanager`, which is slower: it is entered for each chunk of each step."""

    __slots__ = ("_scheduler", "_sequence")

    def __init__(self, scheduler: Scheduler, sequence: Sequence) -> None:
        self._scheduler, self._sequence = scheduler, sequence

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._scheduler.fail_unexpected(self._sequence, error)
        return True


class Scheduler:
    """Owns all sequences of an engine and decides what each step computes. Used from the engine's thread only."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        model_identity: str,
        clock: Clock,
        connector: SchedulerSide[StepPlan] | None = None,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self._model = model_identity
        self._clock = clock
        self.external_kv = ExternalKV(connector, pool, clock, fail_on_load_failure=limits.fail_on_load_failure)
        self._sequences: dict[str, Sequence] = {}
        self._queues = SequenceQueues()
        self._blocks = SequenceBlocks(pool, limits.block_size)
        self.drafter = Drafter(limits.speculation, limits, pool, self._blocks) if limits.speculation else None
        self.budget = StepBudget(limits.max_num_batched_tokens, limits.itl_target_s)
        self._outputs: list[EngineOutput] = []
        self._delayed_outputs: dict[str, EngineOutput] = {}
        """Last outputs of requests that have ended, until the blocks held for them are released."""
        self._order = 0
        self._counters = SchedulerStatistics()
        self.num_faults = 0
        """Grows with each failure of a step or a request. The engine calls `audit` after a step in which it has
        grown."""

    # Adding and aborting requests.

    def add(self, request: Request) -> None:
        """Put a request into the queue. Raises `InvalidRequest` if it can never run or its id is in use, `QueueFull` at
        `max_waiting`."""
        self.limits.require_runnable(request, self.pool.num_blocks * self.limits.block_size)
        if request.request_id in self._sequences or self.external_kv.holds(request.request_id):
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if self._queues.num_waiting >= self.limits.max_waiting:
            raise QueueFull(f"{self._queues.num_waiting} requests are waiting already; try again later")
        self._order += 1
        sequence = self._sequence(request, self._order)
        self._sequences[request.request_id] = sequence
        if request.deadline is not None:
            self._queues.add_deadline(sequence, request.deadline)
        with self._isolated(sequence):
            self._begin(sequence)

    def prompt_block_hashes(self, request: Request) -> list[BlockHash]:
        """The hashes of the full blocks of a prompt. From any thread. Raises `InvalidRequest` if the request can never
        run."""
        self.limits.require_runnable(request, self.pool.num_blocks * self.limits.block_size)
        return list(self._sequence(request, 0).block_hashes)

    def _sequence(self, request: Request, order: int) -> Sequence:
        return Sequence(
            request,
            order=order,
            block_size=self.limits.block_size,
            model_identity=self._model,
            trained_context=self.limits.trained_context,
        )

    def _begin(self, sequence: Sequence) -> None:
        request = sequence.request
        stamp = "decode_queued" if sequence.consumes else "prefill_queued"
        request.timeline.stamp(stamp, self._clock.wall())
        if (result := self.external_kv.promised_result(sequence)) is not None:
            self._adopt(sequence, result)
        if sequence.status is not Status.FINISHED:
            self._queues.enqueue(sequence)
            self.external_kv.on_arrived(sequence)

    def abort(self, request_id: str) -> None:
        """End a request at once. Unknown ids are ignored, since the request may just have ended."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, "abort")

    @property
    def has_work(self) -> bool:
        """True if there is something to do now, or may be when a transfer has advanced."""
        return bool(self._sequences or self._outputs or self._delayed_outputs or self.external_kv.has_work)

    # The step.

    def schedule(self) -> Step:
        """The next step. It has no chunks if all requests wait for transfers or blocks, or there are none."""
        self._expire()
        chunks: list[Chunk] = []
        max_tokens = self.budget.tokens(self._num_decoding())
        self._admit(chunks, self._schedule_running(chunks, max_tokens))
        chunks = [chunk for chunk in chunks if chunk.sequence.status is Status.RUNNING]
        if self.drafter is not None:
            chunks = self.drafter.with_drafts(chunks, max_tokens, self._queues.num_running, self._isolated)
        try:
            return Step(chunks, self.external_kv.plan(chunks))
        except Exception as error:  # noqa: BLE001 - the connector's error: this step is dropped, the next one may work
            self.fail_step(chunks, error)
            return Step([])

    def _num_decoding(self) -> int:
        """Number of sequences that get the next token of their answer in this step. 0 without an `itl_target_s`,
        because only that needs it."""
        if self.limits.itl_target_s is None:
            return 0
        running = self._queues.running()
        return sum(sequence.num_missing_tokens == 1 and sequence.status is Status.RUNNING for sequence in running)

    def record_step_duration(self, step: Step, seconds: float) -> None:
        """Record the duration of a step, from `schedule` to its results."""
        if step.chunks:
            num_prompt_tokens = sum(chunk.num_tokens for chunk in step.chunks if chunk.num_tokens > 1)
            num_decoding = sum(chunk.num_tokens == 1 for chunk in step.chunks)
            self.budget.observe(num_decoding, num_prompt_tokens, seconds)
            if self.drafter is not None and not num_prompt_tokens:
                self.drafter.step_took(step.num_tokens, seconds)

    def uniform_decodes(self) -> list[Sequence]:
        """For simulations: the running sequences, if all of them only decode and no request waits, so that all steps
        until the next event are alike. Otherwise, an empty list."""
        running = [] if self._queues.num_waiting else self._queues.running()
        return (
            running
            if all(sequence.num_missing_tokens == 1 and sequence.load.meeting is None for sequence in running)
            else []
        )

    def plan_between_steps(self) -> StepPlan | None:
        """The plan that the worker sides execute after `update`, before the next step; None: nothing."""
        return self.external_kv.plan_between_steps()

    def fail_incomplete_loads(self, chunks: list[Chunk], report: TransferReport) -> TransferReport:
        """The report, in which layerwise loads of the step that are not complete are marked as failed."""
        return self.external_kv.fail_incomplete_loads(chunks, report)

    def update(
        self,
        step: Step,
        sampled: Mapping[str, abc.Sequence[SampledToken]],
        failed: Mapping[str, KvferryError] = NONE_FAILED,
    ) -> None:
        """Record the computed and sampled tokens of a step. `sampled`: new tokens by request id. `failed`: errors of
        requests whose load failed during the step, by request id. These are also in the report for `on_transferred`,
        which is called afterwards."""
        for chunk in step.chunks:
            if chunk.sequence.status is Status.RUNNING:
                with self._isolated(chunk.sequence):
                    self._advance(chunk, sampled.get(chunk.sequence.request_id, ()), failed)

    def fail(self, request_id: str, error: Exception) -> None:
        """End a request because of an error; unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._fail(sequence, error)

    def fail_step(self, chunks: list[Chunk], error: Exception) -> None:
        """End the requests of a step that has failed as a whole."""
        logger.error("a step of %d requests failed", len(chunks), exc_info=error)
        self.num_faults += 1
        for chunk in chunks:
            self.fail(chunk.sequence.request_id, error)

    def fail_all(self, error: Exception) -> None:
        """End every request."""
        for request_id in list(self._sequences):
            self.fail(request_id, error)

    def on_transferred(self, report: TransferReport) -> None:
        """Handle a report of the connector's worker sides. A repeated event has no further effect."""
        for event in report:
            sequence = self._sequences.get(event.request_id)
            if isinstance(event, Released):
                self.external_kv.release_held(event.request_id)
                if (delayed := self._delayed_outputs.pop(event.request_id, None)) is not None:
                    self._outputs.append(delayed)
            elif sequence is not None and not isinstance(event, Saved):
                with self._isolated(sequence):
                    self._on_transfer_event(sequence, event)
        self.external_kv.on_completed(report)

    def _on_transfer_event(self, sequence: Sequence, event: TransferEvent) -> None:
        match event:
            case Loaded(num_tokens=num_tokens):
                self._on_loaded(sequence, num_tokens)
            case Failed(error=error, held_under=held_under):
                self._on_load_failed(sequence, error, held_under)
            case Prefilled(result=result) if sequence.prefill_result is None and not sequence.load.rejects_first_token:
                self._adopt(sequence, result)

    def take_outputs(self) -> list[EngineOutput]:
        """The outputs of requests since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def statistics(self) -> SchedulerStatistics:
        """The gauges and counters, as a copy."""
        drafts = replace(self.drafter.counters) if self.drafter is not None else DraftStatistics()
        num_running, num_waiting = self._queues.num_running, self._queues.num_waiting
        return replace(self._counters, num_running=num_running, num_waiting=num_waiting, drafts=drafts)

    @property
    def is_empty(self) -> bool:
        """True if no request is left, and no blocks are held for peers."""
        return not (self._sequences or self.external_kv.held_blocks)

    def check(self) -> None:
        """Raise `LeakError` if no request is left but resources are still in use. Does nothing while there are
        requests."""
        if self._sequences:
            return
        self._queues.check()
        self.pool.check(num_held=len(self.external_kv.held_blocks))
        self.external_kv.check()

    # Admission.

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Start waiting sequences while the budget, the blocks and `max_num_seqs` allow it. Sequences whose match is
        `Pending` are skipped."""
        skipped: list[Sequence] = []
        while self._queues.num_waiting and budget > 0:
            if self._queues.num_running + self.external_kv.num_loading >= self.limits.max_num_seqs:
                break
            sequence = self._queues.next_waiting()
            with self._isolated(sequence):
                match = self._try_admission(sequence)
                if isinstance(match, Pending):
                    skipped.append(sequence)
                elif match is None:
                    skipped.append(sequence)
                    break
                elif sequence.status is Status.RUNNING:
                    budget -= self._schedule_chunk(sequence, chunks, budget)
        self._queues.requeue(skipped)

    def _try_admission(self, sequence: Sequence) -> Match | None:
        """Try to start a waiting sequence. Returns the connector's match; unless it is `Pending`, the sequence now
        runs, loads or has ended. None: there are not enough free blocks."""
        cached, match = self._match(sequence)
        if (
            isinstance(match, Pending) or sequence.finish_reason is not None
        ):  # its hand-off failed, and the policy is `fail`
            return match
        return match if self._reserve(sequence, cached, match) else None

    def has_room(self, num_blocks: int) -> bool:
        """True if blocks may be reserved for KV that is not computed yet (`ConnectorContext.has_room`)."""
        limits = self.limits
        longest = min(-(-limits.max_model_len // limits.block_size), self.pool.num_blocks)
        num_free_slots = limits.max_num_seqs - self._queues.num_running - self.external_kv.num_loading
        # One place is left free for a request that computes all of its KV.
        return num_free_slots > 1 and self.pool.num_free - num_blocks >= max(longest, self.pool.num_blocks // 2)

    def _match(self, sequence: Sequence) -> tuple[list[int], Match]:
        """The prompt's blocks in the prefix cache, and the connector's match beyond them."""
        cached = self._blocks.cached_block_ids(sequence)
        match = self.external_kv.match(sequence, len(cached) * self.limits.block_size)
        if isinstance(match, Miss) and match.error is not None:
            self._on_hand_off_failed(sequence, match.error)
        return cached, match

    def _reserve(self, sequence: Sequence, cached: list[int], match: Match) -> bool:
        """Reserve blocks, and begin to run or to load. False: there are not enough blocks now."""
        if not self._blocks.reserve(sequence, cached):
            self.external_kv.make_room(self._blocks.num_blocks_missing(sequence, cached))
            return False
        num_cached = sequence.num_computed_tokens
        self._count_prefix(sequence, num_cached)
        if not isinstance(match, Hit) or self.external_kv.begin_load(sequence, num_cached, match):
            self._start_running(sequence)
        return True

    def _count_prefix(self, sequence: Sequence, num_cached: int) -> None:
        self._counters.num_prefix_queries += len(sequence.tokens)
        self._counters.num_prefix_hits += num_cached
        if sequence.num_restarts == 0 and sequence.prefill_result is None:
            sequence.num_cached_tokens = num_cached

    def _count_loaded(self, sequence: Sequence, num_tokens: int) -> None:
        """Count tokens whose KV came from a store or an earlier turn as cached, as vLLM does. Tokens of a hand-off do
        not count: P has computed them, and its result has its own number of cached tokens."""
        if sequence.num_restarts == 0 and sequence.prefill_result is None and not sequence.consumes:
            num_cached = sequence.num_cached_tokens + num_tokens
            sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)

    def _start_running(self, sequence: Sequence) -> None:
        self._queues.start(sequence)
        now = self._clock.wall()
        decoding = sequence.num_missing_tokens == 1 and sequence.num_output_tokens > 0
        sequence.request.timeline.stamp("decode_started" if decoding else "prefill_started", now)

    # Running sequences.

    def _schedule_running(self, chunks: list[Chunk], budget: int) -> int:
        for sequence in self._queues.running():
            if budget <= 0:
                break
            if sequence.status is Status.RUNNING:
                with self._isolated(sequence):
                    budget -= self._schedule_chunk(sequence, chunks, budget)
        return budget

    def _schedule_chunk(self, sequence: Sequence, chunks: list[Chunk], budget: int) -> int:
        """Schedule as many tokens of a sequence as the budget and the blocks allow. Returns their number."""
        num_tokens = min(sequence.num_missing_tokens, budget)
        num_needed = self._blocks.num_blocks_needed(sequence, num_tokens)
        if num_needed > 0:
            if not self._preempt_for(sequence, num_needed, chunks):
                return 0
            self._blocks.extend(sequence, num_needed)
        chunks.append(Chunk(sequence, sequence.num_computed_tokens, num_tokens))
        return num_tokens

    def _preempt_for(self, sequence: Sequence, num_blocks: int, chunks: list[Chunk]) -> bool:
        """Preempt the least urgent sequences until `num_blocks` blocks are free. Returns False if `sequence` itself was
        preempted."""
        scheduled = {chunk.sequence.request_id for chunk in chunks}
        while num_blocks > self.pool.num_free:
            victim = self._queues.select_victim(scheduled)
            self._preempt(victim)
            self._counters.num_preemptions += 1
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Release the sequence's blocks and put it back into the queue; it will be recomputed."""
        self._queues.stop(sequence)
        self._blocks.release_all(sequence)
        sequence.load.layerwise_base = sequence.load.meeting = None
        sequence.num_restarts += 1
        sequence.prompt_logprobs.clear()
        self.external_kv.on_preempted(sequence)
        self._queues.enqueue(sequence)

    # After the model ran.

    def _advance(self, chunk: Chunk, sampled: abc.Sequence[SampledToken], failed: Mapping[str, KvferryError]) -> None:
        sequence = chunk.sequence
        if self.drafter is not None:
            self.drafter.on_verified(chunk, len(sampled))
        if sequence.load.layerwise_base is not None:
            if sequence.request_id in failed:
                return  # `_on_load_failed` resets the sequence to the tokens before the load
            self._count_loaded(sequence, chunk.start - sequence.load.layerwise_base)
            sequence.load.layerwise_base = None
        sequence.num_computed_tokens = chunk.start + chunk.num_tokens
        self._blocks.cache_full_blocks(sequence)
        if sequence.load.meeting is not None:
            self._meet(sequence)
        if not sampled:
            return
        if sequence.num_output_tokens == 0:
            sequence.request.timeline.stamp("prefill_done", self._clock.wall())
        if sequence.prefill_result is None:
            sequence.prefill_result = PrefillResult(
                first_token=sampled[0].token_id,
                seed=sequence.seed,
                logprobs=sampled[0].logprobs,
                num_cached_tokens=sequence.num_cached_tokens,
                drawn_by=self._sampling_digest(sequence) if sequence.produces else "",
                timeline=sequence.request.timeline,
            )
        self._append(sequence, sampled[0])
        for token in sampled[1:]:
            if sequence.status is not Status.RUNNING:
                return  # it has ended, or was preempted
            sequence.num_computed_tokens += 1  # the previous token, which was drafted
            self._blocks.cache_full_blocks(sequence)
            self._append(sequence, token)
        if chunk.draft and sequence.status is Status.RUNNING:
            self._blocks.trim(sequence)

    def _append(self, sequence: Sequence, sampled: SampledToken) -> None:
        """Add a token to the answer, and end the sequence if it is the last one."""
        sequence.tokens.append(sampled.token_id)
        timeline = sequence.request.timeline
        timeline.stamp("first_token", self._clock.wall())
        output = EngineOutput(
            request_id=sequence.request_id,
            token_ids=[sampled.token_id],
            logprobs=[sampled.logprobs] if sampled.logprobs is not None else [],
            num_cached_tokens=sequence.num_cached_tokens,
        )
        if sequence.num_output_tokens == 1 and sequence.prompt_logprobs:
            output.prompt_logprobs = sequence.prompt_logprobs
        reason, output.stop_reason = self.limits.end_of(sequence, sampled.token_id)
        if sequence.matcher is not None and reason != "stop":
            try:
                sequence.matcher.accept(sampled.token_id)
            except GrammarFailed as error:
                self._finish(sequence, "error", error=error)
                return
            if sequence.matcher.is_complete:
                reason, output.is_complete = "stop", sampled.token_id not in self.limits.eos_token_ids
        if reason is None:
            self._outputs.append(output)
            self._leave_trained_context(sequence)
        else:
            self._finish(sequence, reason, output)

    def _leave_trained_context(self, sequence: Sequence) -> None:
        """Preempt a sequence that has just grown beyond the trained context: all its KV must be computed again."""
        is_new = sequence.is_long and not sequence.hash_chain.is_long(len(sequence.tokens) - 1)
        if is_new and sequence.status is Status.RUNNING:
            self._preempt(sequence)
            self._counters.num_context_recomputes += 1

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        output: EngineOutput | None = None,
        error: RequestError | None = None,
    ) -> None:
        """End a sequence. Its blocks are released, or held for the connector."""
        self._queues.remove(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        del self._sequences[sequence.request_id]
        output = output or EngineOutput(request_id=sequence.request_id)
        output.finish_reason, output.error = reason, error
        self._outputs.append(output)  # first, so that the request has an answer whatever fails below
        outcome = self.external_kv.finish(sequence)
        output.kv_transfer_params = outcome.ticket
        if isinstance(outcome, Hold) and outcome.delays_answer and reason in ("stop", "length"):
            self._delayed_outputs[sequence.request_id] = self._outputs.pop()
        if reason in ("stop", "length") and not sequence.produces:  # this instance computed all of the answer
            self.pool.finished(sequence.block_hashes, sequence.num_output_tokens)
        sequence.request.timeline.stamp("done", self._clock.wall())
        output.timeline = sequence.request.timeline
        output.num_cached_tokens = sequence.num_cached_tokens

    # Failures.

    def _isolated(self, sequence: Sequence) -> _Isolated:
        return _Isolated(self, sequence)

    def fail_unexpected(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence because of an unexpected exception in its part of a step. Other sequences continue."""
        logger.error("request %s failed unexpectedly", sequence.request_id, exc_info=error)
        self._fail(sequence, error)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self.num_faults += 1
        if sequence.status is Status.FINISHED:
            return
        reported = (
            error if isinstance(error, RequestError) else RequestFailed(f"the engine failed on this request: {error!r}")
        )
        self._finish(sequence, "error", error=reported)

    def audit(self) -> None:
        """Raise `LeakError` unless the blocks in use are exactly the blocks of sequences and the held ones, and all
        tokens of blocks in the prefix cache are computed."""
        used = {block for sequence in self._sequences.values() for block in sequence.block_ids}
        self.pool.check(num_held=len(used | self.external_kv.held_blocks))
        for sequence in self._sequences.values():
            self._blocks.check(sequence)

    # Hand-offs and loads.

    def _adopt(self, sequence: Sequence, result: PrefillResult) -> None:
        """Use the first token that P sampled as the first of the answer, before the KV has arrived. The token is
        ignored if P has another model or other sampling parameters, or if its id is outside of the vocabulary. This
        instance then samples the first token itself."""
        if result.drawn_by != self._sampling_digest(sequence):
            self._reject_first_token(sequence)
            return
        if result.first_token >= self.limits.vocab_size:
            logger.warning(
                "request %s: the first token in its ticket is not in this model's vocabulary", sequence.request_id
            )
            return
        sequence.adopt(result)
        self._append(sequence, SampledToken(result.first_token, result.logprobs))

    def _reject_first_token(self, sequence: Sequence) -> None:
        sequence.load.rejects_first_token = True
        self._counters.num_tokens_not_adopted += 1
        if self._counters.num_tokens_not_adopted == 1:
            logger.warning(
                "request %s: P sampled the first token with another model or other sampling parameters, so it is"
                " sampled again. Further requests are counted only (kvferry:first_tokens_not_adopted). Give all"
                " instances the same checkpoint with the same generation_config.json, and both legs the same request",
                sequence.request_id,
            )

    def _sampling_digest(self, sequence: Sequence) -> str:
        return sampling_digest(self._model, sequence.request.sampling, self.limits.eos_token_ids)

    def _on_loaded(self, sequence: Sequence, num_tokens: int | None) -> None:
        loaded = self.external_kv.end_load(sequence, num_tokens)
        if loaded is None:
            return
        if not sequence.can_use_remote_kv(num_tokens):
            self._start_running(sequence)
            self._preempt(sequence)
            self._counters.num_context_recomputes += 1
            return
        # Without the producer's token the last prompt token is computed once more, for its logits.
        self._on_kv_available(sequence, loaded)
        self._start_running(sequence)

    def _meet(self, sequence: Sequence) -> None:
        """Called when a sequence has computed tokens while its later tokens are loaded. If all tokens before the loaded
        ones (the meeting point) are computed, continue after the loaded tokens, or wait for them."""
        num_tokens = self.external_kv.tokens_after_meeting(sequence)
        if sequence.status is Status.LOADING:
            self._queues.stop(sequence)
        elif num_tokens is not None:
            self._on_kv_available(sequence, num_tokens)

    def _on_kv_available(self, sequence: Sequence, num_tokens: int) -> None:
        """Record that the KV of the first `num_tokens` tokens is there because of a load."""
        before = sequence.num_computed_tokens
        sequence.num_computed_tokens = min(num_tokens, len(sequence.tokens) - 1)
        self._count_loaded(sequence, sequence.num_computed_tokens - before)
        self._blocks.cache_full_blocks(sequence)

    def _on_load_failed(self, sequence: Sequence, error: KvferryError, held_under: str) -> None:
        self.external_kv.abandon_load(sequence)
        if held_under:
            self.external_kv.hold_blocks(sequence, held_under)
            self._preempt(sequence)
        self._on_hand_off_failed(sequence, error)
        if sequence.status is Status.LOADING:
            self._start_running(sequence)

    def _on_hand_off_failed(self, sequence: Sequence, error: KvferryError) -> None:
        if (failure := self.external_kv.record_load_failure(sequence, error)) is not None:
            self._finish(sequence, "error", error=failure)

    def _expire(self) -> None:
        for sequence in self._queues.take_expired(self._clock.monotonic()):
            error = DeadlineExceeded(f"the request's deadline passed after {sequence.num_output_tokens} tokens")
            self._finish(sequence, "error", error=error)
