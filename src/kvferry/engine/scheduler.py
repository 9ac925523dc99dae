"""Decides, step by step, which tokens of which sequences are computed. No tensors, no clock of its own.

Owns the sequences, their queues and, through the block pool, their blocks. It does not know how tokens are computed
(the model runner), nor what is loaded from elsewhere or kept for others (`ExternalKV`, its only way to a connector).

An exception in one request's part of a step ends that request (`_isolated`) and no other.

A step gives each running sequence what it lacks (one token while decoding, a chunk while prefilling), oldest and
most urgent first, within the token budget; what is left of the budget admits waiting ones. When blocks run out,
the least urgent running sequence gives up its blocks and begins again later (preemption by recompute).
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvferry.connectors.api import (
    Failed,
    Hit,
    Loaded,
    Match,
    Miss,
    Pending,
    Prefilled,
    Released,
    SchedulerSide,
    StepPlan,
    TransferReport,
)
from kvferry.core.block_hash import BlockHash
from kvferry.core.clock import Clock
from kvferry.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    LeakError,
    QueueFull,
    RequestError,
    RequestFailed,
)
from kvferry.core.hand_off import PrefillResult
from kvferry.core.request import EngineOutput, FinishReason, Request
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.external_kv import ExternalKV
from kvferry.engine.limits import SchedulerLimits
from kvferry.engine.sequence import Sequence, Status
from kvferry.engine.step import Chunk, Sampled, Step
from kvferry.observe.figures import counter, gauge

log = logging.getLogger(__name__)
NONE_FAILED: Mapping[str, KvferryError] = {}


@dataclass
class SchedulerStatistics:
    """Gauges now and counters since the start. Prefix cache figures are in tokens."""

    num_running: int = gauge("vllm:num_requests_running", "Requests being computed.")
    num_waiting: int = 0
    """For their turn; those that wait for their KV are `ExternalKVStatistics.num_loading`."""
    num_preemptions: int = counter("vllm:num_preemptions", "Requests that had to give up their blocks.")
    num_recomputed: int = counter(
        "kvferry:num_recomputed", "Requests that grew beyond the trained context and were computed anew."
    )
    num_prefix_queries: int = counter("vllm:prefix_cache_queries", "Tokens looked for in the prefix cache.")
    num_prefix_hits: int = counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.")


class Scheduler:
    """Owns all sequences of an engine and decides what each step computes. Used from the engine's thread only."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        model_fingerprint: str,
        clock: Clock,
        connector: SchedulerSide[StepPlan] | None = None,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self._fingerprint = model_fingerprint
        self._clock = clock
        self.external = ExternalKV(connector, pool, clock, fail_on_lost_hand_off=limits.fail_on_lost_hand_off)
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._running: list[Sequence] = []
        self._outputs: list[EngineOutput] = []
        self._order = 0
        self._counters = SchedulerStatistics()
        self.num_faults = 0
        """How often something broke that should not: after each, `audit` is due."""

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Put a request into the queue. Raises `InvalidRequest` when it can never run, `QueueFull` at the bound."""
        self.limits.require_runnable(request, self.pool.num_blocks * self.limits.block_size)
        if request.request_id in self._sequences or self.external.holds(request.request_id):
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if len(self._waiting) >= self.limits.max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests are waiting already; try again later")
        self._order += 1
        sequence = self._sequence(request, self._order)
        self._sequences[request.request_id] = sequence
        with self._isolated(sequence):
            self._begin(sequence)

    def block_names(self, request: Request) -> list[BlockHash]:
        """The hashes of the full blocks of its prompt. Any thread. Raises `InvalidRequest` as `add` does."""
        self.limits.require_runnable(request, self.pool.num_blocks * self.limits.block_size)
        return list(self._sequence(request, 0).block_hashes)

    def _sequence(self, request: Request, order: int) -> Sequence:
        return Sequence(
            request,
            order=order,
            block_size=self.limits.block_size,
            model_fingerprint=self._fingerprint,
            trained_context=self.limits.trained_context,
        )

    def _begin(self, sequence: Sequence) -> None:
        request = sequence.request
        stamp = "decode_queued" if sequence.consumes else "prefill_queued"
        request.timeline.stamp(stamp, self._clock.wall())
        if (result := self.external.promised_result(sequence)) is not None:
            self._adopt(sequence, result)
        if sequence.status is not Status.FINISHED:
            self._enqueue(sequence)
            self.external.arrived(sequence)

    def abort(self, request_id: str) -> None:
        """End a request at once; unknown ids are ignored, since it may just have ended by itself."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, "abort")

    @property
    def has_work(self) -> bool:
        """Whether a step would do something, or may once a transfer moves on."""
        return bool(self._sequences or self._outputs or self.external.has_work)

    # The step.

    def schedule(self) -> Step:
        """What to compute next. An empty step means that everything waits for transfers, or nothing is there."""
        self._expire()
        chunks: list[Chunk] = []
        budget = self._schedule_running(chunks, self.limits.max_num_batched_tokens)
        self._admit(chunks, budget)
        chunks = [chunk for chunk in chunks if chunk.sequence.status is Status.RUNNING]
        try:
            return Step(chunks, self.external.plan(chunks))
        except Exception as error:  # noqa: BLE001 - the connector's mistake: this step is not made, the next may be
            self.fail_step(chunks, error)
            return Step([])

    def plan_between_steps(self) -> StepPlan | None:
        """What the worker sides do at once, after `update`, rather than with the next step; None: nothing."""
        return self.external.plan_between_steps()

    def update(self, step: Step, sampled: dict[str, Sampled], failed: Mapping[str, KvferryError] = NONE_FAILED) -> None:
        """Note what the step computed and sampled. `failed`: requests whose load failed during it; `transferred`
        follows with the same failures."""
        for chunk in step.chunks:
            if chunk.sequence.status is Status.RUNNING:
                with self._isolated(chunk.sequence):
                    self._advance(chunk, sampled.get(chunk.sequence.request_id), failed)

    def fail(self, request_id: str, error: Exception) -> None:
        """End a request because of an error; unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._fail(sequence, error)

    def fail_step(self, chunks: list[Chunk], error: Exception) -> None:
        """A step as a whole failed: its requests end."""
        log.error("a step of %d requests failed", len(chunks), exc_info=error)
        self.num_faults += 1
        for chunk in chunks:
            self.fail(chunk.sequence.request_id, error)

    def fail_all(self, error: Exception) -> None:
        """End every request."""
        for request_id in list(self._sequences):
            self.fail(request_id, error)

    def transferred(self, report: TransferReport) -> None:
        """Act on a report of the connector's worker sides. An event that is reported twice has no further effect."""
        for event in report:
            sequence = self._sequences.get(event.request_id)
            if isinstance(event, Released):
                self.external.released(event.request_id)
            elif sequence is not None:
                with self._isolated(sequence):
                    self._hand_off_moved(sequence, event)
        self.external.completed(report)

    def _hand_off_moved(self, sequence: Sequence, event: Loaded | Failed | Prefilled) -> None:
        match event:
            case Loaded(num_tokens=num_tokens):
                self._loaded(sequence, num_tokens)
            case Failed(error=error):
                self._load_failed(sequence, error)
            case Prefilled(result=result) if sequence.prefill_result is None:
                self._adopt(sequence, result)

    def take_outputs(self) -> list[EngineOutput]:
        """What happened to requests since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def statistics(self) -> SchedulerStatistics:
        """A copy of the gauges and counters."""
        return replace(self._counters, num_running=len(self._running), num_waiting=len(self._waiting))

    @property
    def is_empty(self) -> bool:
        """Whether no request is left, and no blocks are held for peers."""
        return not (self._sequences or self.external.held_blocks)

    def check(self) -> None:
        """Raise `LeakError` when no request is left, yet something is still kept."""
        if self._sequences:
            return
        if self._waiting or self._running:
            raise LeakError("the queues hold sequences that have ended")
        self.pool.check(num_held=len(self.external.held_blocks))
        self.external.check()

    # Admission.

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        heapq.heappush(self._waiting, (sequence.rank, sequence))

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        passed_over: list[tuple[tuple[int, int], Sequence]] = []
        while self._waiting and budget > 0:
            if len(self._running) + self.external.num_loading >= self.limits.max_num_seqs:
                break
            entry = heapq.heappop(self._waiting)
            sequence = entry[1]
            with self._isolated(sequence):
                match = self._try_admission(sequence)
                if isinstance(match, Pending):
                    passed_over.append(entry)
                elif match is None:
                    passed_over.append(entry)
                    break
                elif sequence.status is Status.RUNNING:
                    budget -= self._give_chunk(sequence, chunks, budget)
        for entry in passed_over:
            heapq.heappush(self._waiting, entry)

    def _try_admission(self, sequence: Sequence) -> Match | None:
        """What the connector said; the sequence then runs, loads or has ended. None: there are not blocks enough."""
        cached, match = self._match(sequence)
        if isinstance(match, Pending) or sequence.finish_reason is not None:  # lost, and the policy is to fail
            return match
        return match if self._reserve(sequence, cached, match) else None

    def _match(self, sequence: Sequence) -> tuple[list[int], Match]:
        """Blocks of the own prefix cache, and what the connector has beyond them."""
        reusable = sequence.hashes() if sequence.reuses_prefix else []
        # At least one known token must be computed here: its logits give the next one.
        usable = (len(sequence.tokens) - 1) // self.limits.block_size
        cached = self.pool.match(reusable[:usable])
        match = self.external.match(sequence, len(cached) * self.limits.block_size)
        if isinstance(match, Miss) and match.error is not None:
            self._hand_off_lost(sequence, match.error)
        return cached, match

    def _reserve(self, sequence: Sequence, cached: list[int], match: Match) -> bool:
        """Take blocks for the whole of what is known, so that nobody begins who cannot go on. False: not now."""
        lacking = sequence.num_blocks_for(len(sequence.tokens)) - len(cached)
        if lacking > self.pool.num_free_after_acquiring(cached):
            return False
        self.pool.acquire(cached)
        sequence.block_ids = list(cached)
        sequence.block_ids += self.pool.allocate(lacking)
        num_cached = len(cached) * self.limits.block_size
        sequence.num_computed_tokens = num_cached
        sequence.num_published_blocks = len(cached)
        self._count_prefix(sequence, num_cached)
        if not isinstance(match, Hit) or self.external.begin_load(sequence, num_cached, match):
            self._start_running(sequence)
        return True

    def _count_prefix(self, sequence: Sequence, num_cached: int) -> None:
        self._counters.num_prefix_queries += len(sequence.tokens)
        self._counters.num_prefix_hits += num_cached
        if sequence.num_restarts == 0 and sequence.prefill_result is None:
            sequence.num_cached_tokens = num_cached

    def _start_running(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        self._running.append(sequence)
        now = self._clock.wall()
        decoding = sequence.num_missing_tokens == 1 and sequence.num_output_tokens > 0
        sequence.request.timeline.stamp("decode_started" if decoding else "prefill_started", now)

    # Running sequences.

    def _schedule_running(self, chunks: list[Chunk], budget: int) -> int:
        self._running.sort(key=lambda sequence: sequence.rank)
        for sequence in list(self._running):
            if budget <= 0:
                break
            if sequence.status is Status.RUNNING:
                with self._isolated(sequence):
                    budget -= self._give_chunk(sequence, chunks, budget)
        return budget

    def _give_chunk(self, sequence: Sequence, chunks: list[Chunk], budget: int) -> int:
        """Schedule as much of a sequence as the budget and the blocks allow; returns the tokens given."""
        num_tokens = min(sequence.num_missing_tokens, budget)
        lacking = sequence.num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.block_ids)
        if lacking > 0:
            if not self._make_room(sequence, lacking, chunks):
                return 0
            sequence.block_ids += self.pool.allocate(lacking)
        chunks.append(Chunk(sequence, sequence.num_computed_tokens, num_tokens))
        return num_tokens

    def _make_room(self, sequence: Sequence, lacking: int, chunks: list[Chunk]) -> bool:
        """Preempt from the least urgent up until `lacking` blocks are free. False: `sequence` itself had to go."""
        scheduled = {chunk.sequence.request_id for chunk in chunks}
        while lacking > self.pool.num_free:
            victim = max(
                (other for other in self._running if other.request_id not in scheduled and not other.is_written_to),
                key=lambda other: other.rank,
            )
            self._preempt(victim)
            self._counters.num_preemptions += 1
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Give its blocks up; it begins again."""
        self._running.remove(sequence)
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed_tokens = sequence.num_published_blocks = 0
        sequence.layerwise_base = sequence.meeting = None
        sequence.num_restarts += 1
        sequence.prompt_logprobs.clear()
        self.external.preempted(sequence)
        self._enqueue(sequence)

    # After the model ran.

    def _advance(self, chunk: Chunk, sampled: Sampled | None, failed: Mapping[str, KvferryError]) -> None:
        sequence = chunk.sequence
        if sequence.layerwise_base is not None:
            if sequence.request_id in failed:
                return  # `_load_failed` takes the sequence back to where it stood before the load
            sequence.layerwise_base = None
        sequence.num_computed_tokens = chunk.start + chunk.num_tokens
        self._publish(sequence)
        if sequence.meeting is not None:
            self._meet(sequence)
        if sampled is None:
            return
        if sequence.num_output_tokens == 0:
            sequence.request.timeline.stamp("prefill_done", self._clock.wall())
        if sequence.prefill_result is None:
            sequence.prefill_result = PrefillResult(
                first_token=sampled.token_id,
                seed=sequence.seed,
                logprobs=sampled.logprobs,
                num_cached_tokens=sequence.num_cached_tokens,
                timeline=sequence.request.timeline,
            )
        self._append(sequence, sampled)

    def _publish(self, sequence: Sequence) -> None:
        hashes = sequence.hashes()
        num_full = min(sequence.num_computed_tokens // self.limits.block_size, len(hashes))
        events = self.pool.events if not (sequence.request.cache_salt or sequence.is_long) else None
        for index in range(sequence.num_published_blocks, num_full):
            if self.pool.publish(sequence.block_ids[index], hashes[index]) and events is not None:
                place = slice(index * self.limits.block_size, (index + 1) * self.limits.block_size)
                events.stored(hashes[index], hashes[index - 1] if index else None, sequence.tokens[place])
        sequence.num_published_blocks = max(num_full, sequence.num_published_blocks)

    def _append(self, sequence: Sequence, sampled: Sampled) -> None:
        """One more token of the answer; ends the sequence when it was the last."""
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
        reason, output.stop_reason = self._end_of(sequence, sampled.token_id)
        if reason is None:
            self._outputs.append(output)
            self._leave_trained_context(sequence)
        else:
            self._finish(sequence, reason, output)

    def _leave_trained_context(self, sequence: Sequence) -> None:
        """A running sequence whose last token took it beyond the trained context begins again: its KV is of no use."""
        is_new = sequence.is_long and not sequence.is_long_at(len(sequence.tokens) - 1)
        if is_new and sequence.status is Status.RUNNING:
            self._preempt(sequence)
            self._counters.num_recomputed += 1

    def _end_of(self, sequence: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
        sampling, num_output = sequence.request.sampling, sequence.num_output_tokens
        if num_output >= sampling.min_tokens:
            if token_id in sampling.stop_token_ids:
                return "stop", token_id
            if token_id in self.limits.eos_token_ids and not sampling.ignore_eos:
                return "stop", None
        if num_output >= sampling.max_tokens or len(sequence.tokens) >= self.limits.max_model_len or sequence.produces:
            return "length", None
        return None, None

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        output: EngineOutput | None = None,
        error: RequestError | None = None,
    ) -> None:
        """End a sequence: its blocks go back to the pool, or stay until the connector says so."""
        self._leave_queue(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        del self._sequences[sequence.request_id]
        output = output or EngineOutput(request_id=sequence.request_id)
        output.finish_reason, output.error = reason, error
        self._outputs.append(output)  # whatever comes, the request has its answer
        output.kv_transfer_params = self.external.finish(sequence)
        sequence.request.timeline.stamp("done", self._clock.wall())
        output.timeline = sequence.request.timeline
        output.num_cached_tokens = sequence.num_cached_tokens

    def _leave_queue(self, sequence: Sequence) -> None:
        match sequence.status:
            case Status.RUNNING:
                self._running = [other for other in self._running if other is not sequence]
            case Status.WAITING:
                self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
                heapq.heapify(self._waiting)

    # When something breaks.

    @contextmanager
    def _isolated(self, sequence: Sequence) -> Iterator[None]:
        """What the body raises ends this sequence, and nothing else."""
        try:
            yield
        except Exception as error:
            log.exception("request %s failed unexpectedly", sequence.request_id)
            self._fail(sequence, error)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self.num_faults += 1
        if sequence.status is Status.FINISHED:
            return
        named = (
            error if isinstance(error, RequestError) else RequestFailed(f"the engine failed on this request: {error!r}")
        )
        self._finish(sequence, "error", error=named)

    def audit(self) -> None:
        """Raise `LeakError` unless exactly the blocks are in use that sequences have, or that are held."""
        used = {block for sequence in self._sequences.values() for block in sequence.block_ids}
        self.pool.check(num_held=len(used | self.external.held_blocks))

    # Hand-offs and loads.

    def _adopt(self, sequence: Sequence, result: PrefillResult) -> None:
        """Take the prefill instance's first token as the first of the answer, before any KV has come. A token id that
        this model does not have is ignored, and the token is sampled here."""
        if result.first_token >= self.limits.vocab_size:
            log.warning("request %s: its ticket's first token is none of this model's", sequence.request_id)
            return
        sequence.adopt(result)
        self._append(sequence, Sampled(result.first_token, result.logprobs))

    def _loaded(self, sequence: Sequence, num_tokens: int | None) -> None:
        loaded = self.external.end_load(sequence, num_tokens)
        if loaded is None:
            return
        if not sequence.can_use_offered(num_tokens):
            self._start_running(sequence)
            self._preempt(sequence)
            self._counters.num_recomputed += 1
            return
        # Without the producer's token the last prompt token is computed once more, for its logits.
        sequence.num_computed_tokens = min(loaded, len(sequence.tokens) - 1)
        self._publish(sequence)
        self._start_running(sequence)

    def _meet(self, sequence: Sequence) -> None:
        """Once all before the place is computed: go on behind what was loaded, or wait for it."""
        reached = self.external.meet(sequence)
        if sequence.status is Status.LOADING:
            self._running = [other for other in self._running if other is not sequence]
        elif reached is not None:
            sequence.num_computed_tokens = min(reached, len(sequence.tokens) - 1)
            self._publish(sequence)

    def _load_failed(self, sequence: Sequence, error: KvferryError) -> None:
        self.external.abandon_load(sequence)
        self._hand_off_lost(sequence, error)
        if sequence.status is Status.LOADING:
            self._start_running(sequence)

    def _hand_off_lost(self, sequence: Sequence, error: KvferryError) -> None:
        if (failure := self.external.failure_of(sequence, error)) is not None:
            self._finish(sequence, "error", error=failure)

    def _expire(self) -> None:
        now = self._clock.monotonic()
        late = [
            sequence
            for sequence in self._sequences.values()
            if sequence.request.deadline is not None and sequence.request.deadline <= now
        ]
        for sequence in late:
            error = DeadlineExceeded(f"the request's deadline passed after {sequence.num_output_tokens} tokens")
            self._finish(sequence, "error", error=error)
