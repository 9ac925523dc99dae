"""Decides, step by step, which tokens of which sequences are computed. No tensors, no clock of its own.

Owns the sequences and, through the block pool, their blocks. It does not know how tokens are computed (the model
runner) or how KV moves (the connector, of which it holds the scheduler side).

What goes wrong in one request's part of a step ends that request (`_isolated`), and nobody beside it.

A step gives each running sequence what it lacks (one token while decoding, a chunk while prefilling), oldest and
most urgent first, within the token budget; what is left of the budget admits waiting ones. When blocks run out,
the least urgent running sequence gives its own up and begins again later (preemption by recompute).
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvferry.connectors.api import (
    Failed,
    Finish,
    Hit,
    Hold,
    Loaded,
    Miss,
    Pending,
    Prefilled,
    Released,
    ScheduledChunk,
    SchedulerSide,
    StepPlan,
    StepView,
    TransferReport,
)
from kvferry.core.clock import Clock
from kvferry.core.errors import (
    DeadlineExceeded,
    HandOffFailed,
    InvalidRequest,
    KvferryError,
    LeakError,
    QueueFull,
    RequestError,
    RequestFailed,
)
from kvferry.core.hand_off import Consume, PrefillResult, Produce, Ticket, TokenLogprobs
from kvferry.core.request import EngineOutput, FinishReason, Request
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.sequence import Sequence, Status

log = logging.getLogger(__name__)
NONE_FAILED: Mapping[str, KvferryError] = {}


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of a scheduler, in tokens and sequences. `trained_context`: a sequence that grows beyond it is computed
    again, since the model then computes all of its KV differently; None: there is no such length."""

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    vocab_size: int = 2**31
    eos_token_ids: frozenset[int] = frozenset()
    fail_on_lost_hand_off: bool = False
    trained_context: int | None = None


@dataclass(frozen=True)
class Chunk:
    """Tokens `[start, start + num_tokens)` of one sequence."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the next token is sampled after this chunk: it reaches the last known token."""
        return self.start + self.num_tokens == len(self.sequence.tokens)


@dataclass(frozen=True)
class Step:
    """What the model runner does next. `plan` is for the connector's worker sides."""

    chunks: list[Chunk]
    plan: StepPlan = None

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True)
class Sampled:
    """The next token of one sequence; `logprobs` where it asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass
class SchedulerStatistics:
    """Gauges now and counters since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_loading: int = 0
    num_held: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_external_hits: int = 0
    num_load_failures: dict[str, int] = field(default_factory=dict)


class Scheduler:
    """Owns all sequences of an engine and decides what each step computes. Used from the engine's thread only."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        model_fingerprint: str,
        clock: Clock,
        connector: SchedulerSide | None = None,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self._fingerprint = model_fingerprint
        self._clock = clock
        self._connector = connector
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._running: list[Sequence] = []
        self._loading: dict[str, Sequence] = {}
        self._held: dict[str, list[int]] = {}
        self._preempted: list[Sequence] = []
        self._outputs: list[EngineOutput] = []
        self._order = 0
        self._parted = False
        self._counters = SchedulerStatistics()
        self.num_faults = 0
        """How often something broke that should not: after each, `audit` is due."""

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Put a request into the queue. Raises `InvalidRequest` when it can never run, `QueueFull` at the bound."""
        self._require_runnable(request)
        if request.request_id in self._sequences or request.request_id in self._held:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if len(self._waiting) >= self.limits.max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests are waiting already; try again later")
        self._order += 1
        sequence = Sequence(
            request,
            order=self._order,
            block_size=self.limits.block_size,
            model_fingerprint=self._fingerprint,
            trained_context=self.limits.trained_context,
        )
        self._sequences[request.request_id] = sequence
        with self._isolated(sequence):
            self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
        request = sequence.request
        stamp = "decode_queued" if sequence.consumes else "prefill_queued"
        request.timeline.stamp(stamp, self._clock.wall())
        if (result := self._promised_result(sequence)) is not None:
            self._adopt(sequence, result)
        if sequence.status is not Status.FINISHED:
            self._enqueue(sequence)
            if self._connector is not None:
                self._connector.arrived(sequence)

    def abort(self, request_id: str) -> None:
        """End a request at once; unknown ids are ignored, since it may just have ended by itself."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, "abort")

    @property
    def has_work(self) -> bool:
        """Whether a step would do something, or may once a transfer moves on."""
        return bool(self._sequences or self._outputs or (self._connector and self._connector.has_work()))

    # The step.

    def schedule(self) -> Step:
        """What to compute next. An empty step means that everything waits for transfers, or nothing is there."""
        self._expire()
        chunks: list[Chunk] = []
        budget = self._schedule_running(chunks, self.limits.max_num_batched_tokens)
        self._admit(chunks, budget)
        chunks = [chunk for chunk in chunks if chunk.sequence.status is Status.RUNNING]
        try:
            return Step(chunks, self._plan(chunks))
        except Exception as error:  # noqa: BLE001 - the connector's mistake: this step is not made, the next may be
            self.fail_step(chunks, error)
            return Step([])

    def _plan(self, chunks: list[Chunk]) -> StepPlan:
        """What the worker sides are to do. Of preempted requests they hear with the next plan that is made."""
        plan = None
        if self._connector is not None:
            plan = self._connector.plan(StepView([self._view(chunk) for chunk in chunks], tuple(self._preempted)))
        self._preempted.clear()
        return plan

    def parting(self) -> StepPlan:
        """What the worker sides are to do at once, after `update`: a prefill that is over waits for no other step, nor
        for its answer to be written. None: nothing."""
        if self._connector is None or not self._parted:
            return None
        self._parted = False
        try:
            return self._connector.plan(StepView([], ()))
        except Exception:  # what was to be said is said with the next step
            log.exception("the connector's plan between two steps failed")
            return None

    def update(self, step: Step, sampled: dict[str, Sampled], failed: Mapping[str, KvferryError] = NONE_FAILED) -> None:
        """Note what the step computed and sampled. `failed`: loads that did; `transferred` is told of them next."""
        for chunk in step.chunks:
            if chunk.sequence.status is Status.RUNNING:
                with self._isolated(chunk.sequence):
                    self._advance(chunk, sampled.get(chunk.sequence.request_id), failed)

    def fail(self, request_id: str, error: Exception) -> None:
        """End a request that something broke for; unknown ids are ignored."""
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
        """A report of the connector's worker sides. To be told of the same again changes nothing."""
        for event in report:
            sequence = self._sequences.get(event.request_id)
            if isinstance(event, Released):
                self.pool.release(self._held.pop(event.request_id, []))
            elif sequence is not None:
                with self._isolated(sequence):
                    self._hand_off_moved(sequence, event)
        if self._connector is not None:
            self._connector.completed(report)

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
        """The current gauges and counters."""
        counters = self._counters
        counters.num_running, counters.num_waiting = len(self._running), len(self._waiting)
        counters.num_loading, counters.num_held = len(self._loading), len(self._held)
        return counters

    @property
    def is_empty(self) -> bool:
        """Whether no request is left, and no blocks are held for peers."""
        return not (self._sequences or self._held)

    def check(self) -> None:
        """Raise `LeakError` when no request is left, yet something is still kept."""
        if self._sequences:
            return
        if self._waiting or self._running or self._loading:
            raise LeakError("the queues hold sequences that have ended")
        self.pool.check(num_held=len({block for blocks in self._held.values() for block in blocks}))
        if self._connector is not None and not self._held:
            self._connector.check()

    # Admission.

    def _require_runnable(self, request: Request) -> None:
        num_prompt, limits = len(request.prompt_token_ids), self.limits
        if num_prompt == 0:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if num_prompt >= limits.max_model_len:
            raise InvalidRequest(
                f"This model's maximum context length is {limits.max_model_len} tokens; the prompt has {num_prompt}"
                " and leaves no room for an answer",
                param="prompt",
            )
        num_answer = len(request.answer_token_ids)
        if num_answer and (
            num_answer >= request.sampling.max_tokens or num_prompt + num_answer >= limits.max_model_len
        ):
            raise InvalidRequest(f"the answer is complete with the {num_answer} tokens that it has", param="max_tokens")
        longest = min(num_prompt + request.sampling.max_tokens, limits.max_model_len)
        capacity = self.pool.num_blocks * limits.block_size
        if longest > capacity:
            raise InvalidRequest(
                f"prompt and answer may reach {longest} tokens, the KV cache holds {capacity};"
                " ask for less, or serve with a larger --kv-cache-memory",
                param="max_tokens",
            )

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        heapq.heappush(self._waiting, (sequence.rank, sequence))

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        passed_over: list[tuple[tuple[int, int], Sequence]] = []
        while self._waiting and budget > 0:
            if len(self._running) + len(self._loading) >= self.limits.max_num_seqs:
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

    def _try_admission(self, sequence: Sequence) -> Hit | Miss | Pending | None:
        """What the connector said; the sequence then runs, loads or has ended. None: there are not blocks enough."""
        cached, match = self._match(sequence)
        if isinstance(match, Pending) or sequence.finish_reason is not None:  # lost, and the policy is to fail
            return match
        return match if self._reserve(sequence, cached, match) else None

    def _match(self, sequence: Sequence) -> tuple[list[int], Hit | Miss | Pending]:
        """Blocks of the own prefix cache, and what the connector has beyond them."""
        reusable = sequence.hashes() if sequence.reuses_prefix else []
        # At least one known token must be computed here: its logits give the next one.
        usable = (len(sequence.tokens) - 1) // self.limits.block_size
        cached = self.pool.match(reusable[:usable])
        if self._connector is None or sequence.connector_asked_out or not sequence.reuses_prefix:
            return cached, Miss()
        if not _is_offered_alike(sequence):
            sequence.connector_asked_out = True
            return cached, Miss()
        match = self._connector.match(sequence, len(cached) * self.limits.block_size)
        if isinstance(match, Miss):
            sequence.connector_asked_out = True
            if match.error is not None:
                self._hand_off_lost(sequence, match.error)
        return cached, match

    def _reserve(self, sequence: Sequence, cached: list[int], match: Hit | Miss | Pending) -> bool:
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
        if isinstance(match, Hit):
            self._begin_load(sequence, num_cached, match)
        else:
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
                (other for other in self._running if other.request_id not in scheduled),
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
        sequence.layerwise_base = None
        sequence.num_restarts += 1
        sequence.prompt_logprobs.clear()
        self._preempted.append(sequence)
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
        output.kv_transfer_params = self._settle_blocks(sequence)
        sequence.request.timeline.stamp("done", self._clock.wall())
        output.timeline = sequence.request.timeline
        output.num_cached_tokens = sequence.num_cached_tokens

    def _leave_queue(self, sequence: Sequence) -> None:
        match sequence.status:
            case Status.RUNNING:
                self._running = [other for other in self._running if other is not sequence]
            case Status.LOADING:
                self._loading.pop(sequence.request_id, None)
            case Status.WAITING:
                self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
                heapq.heapify(self._waiting)

    def _settle_blocks(self, sequence: Sequence) -> dict[str, object] | None:
        blocks, sequence.block_ids = sequence.block_ids, []
        if self._connector is None:
            self.pool.release(blocks)
            return None
        verdict = self._ask_finish(self._connector, sequence, tuple(blocks))
        if isinstance(verdict, Hold):
            self._held[sequence.request_id] = blocks
            self._parted = True
        else:
            self.pool.release(blocks)
        return verdict.ticket

    @staticmethod
    def _ask_finish(connector: SchedulerSide, sequence: Sequence, blocks: tuple[int, ...]) -> Finish:
        """Who keeps the blocks. A connector that cannot say is asked once more; then they stay out of use for ever,
        since somebody may still read or write them."""
        try:
            return connector.finish(sequence, blocks)
        except Exception:
            log.exception("the connector stumbled over the end of request %s", sequence.request_id)
        try:
            return connector.finish(sequence, blocks)
        except Exception:
            log.exception("%d KV blocks of request %s are lost to the pool", len(blocks), sequence.request_id)
            return Hold(None)

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
        self.pool.check(num_held=len(used.union(*self._held.values())))

    # Hand-offs and loads.

    def _adopt(self, sequence: Sequence, result: PrefillResult) -> None:
        """The prefill instance's token becomes the first of the answer, before any KV has come; one that is no token
        of this model is passed over, and drawn here."""
        if result.first_token >= self.limits.vocab_size:
            log.warning("request %s: its ticket's first token is none of this model's", sequence.request_id)
            return
        sequence.adopt(result)
        self._append(sequence, Sampled(result.first_token, result.logprobs))

    def _promised_result(self, sequence: Sequence) -> PrefillResult | None:
        """What the producer sampled, where its prompt was this one and not a prefix of it, and its word is believed."""
        hand_off = sequence.hand_off
        if not isinstance(hand_off, Consume) or not hand_off.ticket.is_of(sequence.prompt_token_ids):
            return None
        if self._connector is not None and self._connector.refusal(sequence) is not None:
            return None
        return hand_off.ticket.prefill_result

    def _begin_load(self, sequence: Sequence, num_cached: int, hit: Hit) -> None:
        assert self._connector is not None
        self._connector.allocated(sequence, tuple(sequence.block_ids), num_cached, hit)
        self._counters.num_external_hits += hit.num_tokens
        sequence.request.timeline.stamp("transfer_started", self._clock.wall())
        if hit.layerwise:
            sequence.layerwise_base = num_cached
            sequence.num_computed_tokens = num_cached + hit.num_tokens
            sequence.connector_asked_out = True
            self._start_running(sequence)
            return
        sequence.status = Status.LOADING
        sequence.load_target = num_cached + hit.num_tokens
        self._loading[sequence.request_id] = sequence

    def _loaded(self, sequence: Sequence, num_tokens: int | None) -> None:
        sequence.request.timeline.stamp("transfer_done", self._clock.wall())
        if self._loading.pop(sequence.request_id, None) is None:
            return  # a layerwise load: the sequence has been running all along
        sequence.connector_asked_out = True
        loaded = sequence.load_target if num_tokens is None else max(num_tokens, sequence.num_computed_tokens)
        if not _is_offered_alike(sequence, num_tokens):
            self._start_running(sequence)
            self._preempt(sequence)
            self._counters.num_recomputed += 1
            return
        # Without the producer's token the last prompt token is computed once more, for its logits.
        sequence.num_computed_tokens = min(loaded, len(sequence.tokens) - 1)
        self._publish(sequence)
        self._start_running(sequence)

    def _load_failed(self, sequence: Sequence, error: KvferryError) -> None:
        sequence.connector_asked_out = True
        self._loading.pop(sequence.request_id, None)
        if sequence.layerwise_base is not None:
            sequence.num_computed_tokens, sequence.layerwise_base = sequence.layerwise_base, None
        self._hand_off_lost(sequence, error)
        if sequence.status is Status.LOADING:
            self._start_running(sequence)

    def _hand_off_lost(self, sequence: Sequence, error: KvferryError) -> None:
        kind = type(error).__name__
        self._counters.num_load_failures[kind] = self._counters.num_load_failures.get(kind, 0) + 1
        if self.limits.fail_on_lost_hand_off and self._was_promised(sequence):
            failure = HandOffFailed(f"the KV of this request could not be loaded: {error}")
            self._finish(sequence, "error", error=failure)

    @staticmethod
    def _was_promised(sequence: Sequence) -> bool:
        """Whether the lost hand-off was the request's point, and not only a way to save work."""
        hand_off = sequence.request.hand_off
        return not (isinstance(hand_off, Produce) and hand_off.source is not None)

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

    def _view(self, chunk: Chunk) -> ScheduledChunk:
        return ScheduledChunk(chunk.sequence, chunk.start, chunk.num_tokens, tuple(chunk.sequence.block_ids))


def _is_offered_alike(sequence: Sequence, num_tokens: int | None = None) -> bool:
    """Whether KV that the other side of a hand-off computed for `num_tokens`, or for as many as its ticket says, is
    what this sequence needs: both within the trained context, or both beyond."""
    match sequence.hand_off:
        case Consume(ticket=ticket) | Produce(source=Ticket() as ticket):
            offered = num_tokens or ticket.remote_num_tokens or sequence.num_prompt_tokens
            return sequence.is_long_at(offered) == sequence.is_long
    return True
