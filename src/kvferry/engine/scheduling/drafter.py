"""Adds drafts to the decoding sequences of a step (`speculation`), where a drafted token is likely to cost less than it
saves.

Owns the measured cost of steps and the counters of drafts; each sequence has its own index (`DraftState`). Does not
know how sequences are admitted or preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from kvferry.engine.blocks.block_pool import BlockPool
from kvferry.engine.scheduling.limits import SchedulerLimits
from kvferry.engine.scheduling.sequence import Sequence, Status
from kvferry.engine.scheduling.sequence_blocks import SequenceBlocks
from kvferry.engine.scheduling.speculation import DraftState, SpeculativeConfig, StepCost
from kvferry.engine.scheduling.step import Chunk
from kvferry.observe.metric_fields import counter


@dataclass
class DraftStatistics:
    """Counters since the start."""

    num_drafts: int = counter("vllm:spec_decode_num_drafts", "Drafts that were verified.")
    num_draft_tokens: int = counter("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted.")
    num_accepted_tokens: int = counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")


class Drafter:
    """Drafts tokens for decoding sequences, and records which of them were accepted. Used by the scheduler only."""

    def __init__(
        self, config: SpeculativeConfig, limits: SchedulerLimits, pool: BlockPool, blocks: SequenceBlocks
    ) -> None:
        self._config, self._limits, self._pool, self._blocks = config, limits, pool, blocks
        self._step_cost = StepCost()
        self.counters = DraftStatistics()

    def with_drafts(
        self,
        chunks: list[Chunk],
        max_tokens: int,
        num_running: int,
        isolated: Callable[[Sequence], AbstractContextManager[None]],
    ) -> list[Chunk]:
        """The chunks of a step, with drafts. The step has at most `max_tokens` tokens, and drafts use only blocks that
        none of the `num_running` sequences needs. `isolated`: a context in which an exception ends only the sequence,
        which then has no chunk."""
        budget = max_tokens - sum(chunk.num_tokens for chunk in chunks)
        cost_share, with_drafts = self._step_cost.share(len(chunks)), list[Chunk]()
        for chunk in chunks:
            draft: list[int] = []
            with isolated(chunk.sequence):
                draft = self._draft(chunk, budget, cost_share, num_running)
            budget -= len(draft)
            if draft:
                self.counters.num_drafts += 1
                self.counters.num_draft_tokens += len(draft)
            if chunk.sequence.status is Status.RUNNING:
                with_drafts.append(replace(chunk, draft=tuple(draft)) if draft else chunk)
        return with_drafts

    def _draft(self, chunk: Chunk, budget: int, cost_share: float, num_running: int) -> list[int]:
        sequence, limits = chunk.sequence, self._limits
        if not chunk.samples or sequence.num_output_tokens == 0 or sequence.load.meeting is not None:
            return []
        num_tokens, max_drafted = len(sequence.tokens), self._config.num_speculative_tokens
        bounds = [max_drafted, budget, limits.max_model_len - num_tokens - 1]
        bounds.append(sequence.request.sampling.max_tokens - sequence.num_output_tokens - 1)
        if limits.trained_context is not None and not sequence.is_long:
            bounds.append(limits.trained_context - num_tokens)
        num_blocks = self._blocks.num_blocks_needed(sequence, chunk.num_tokens + max_drafted)
        if self._pool.num_free - num_blocks < num_running:
            bounds.append(len(sequence.block_ids) * limits.block_size - num_tokens)
        if sequence.drafts is None:
            sequence.drafts = DraftState(self._config)
        number = sequence.drafts.num_tokens(min(bounds), cost_share)
        draft = sequence.drafts.lookup.draft(sequence.tokens, number) if number > 0 else []
        if draft and sequence.matcher is not None:
            draft = draft[: sequence.matcher.num_permitted(draft)]
        num_needed = self._blocks.num_blocks_needed(sequence, chunk.num_tokens + len(draft))
        if num_needed > 0:
            self._blocks.extend(sequence, num_needed)
        return draft

    def on_verified(self, chunk: Chunk, num_sampled: int) -> None:
        """Record that the model has sampled `num_sampled` tokens for a chunk: the accepted part of its draft and one
        more."""
        if chunk.draft and chunk.sequence.drafts is not None:
            num_accepted = max(0, num_sampled - 1)
            chunk.sequence.drafts.observe(len(chunk.draft), num_accepted)
            self.counters.num_accepted_tokens += num_accepted

    def step_took(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step without prompts."""
        self._step_cost.observe(num_tokens, seconds)
