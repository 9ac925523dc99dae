"""Runs a step on the model: token ids in, logits out. Knows tensors; decides nothing."""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain

import msgspec
import torch
from torch import Tensor

from kvferry.engine.blocks.kv_cache import KVCache
from kvferry.engine.model.attention import LayerHooks, PagedContext, attention_context
from kvferry.engine.model.loader import LoadedModel
from kvferry.engine.ops.batch import AttentionBatch
from kvferry.engine.ops.most_likely import Bits
from kvferry.engine.sampler import sample, token_logprobs, verify
from kvferry.engine.scheduling.sequence import Sequence
from kvferry.engine.scheduling.step import Chunk, SampledToken
from kvferry.engine.structured.token_masks import NO_MASKS, Masks

logger = logging.getLogger(__name__)


class StepInputs(msgspec.Struct, frozen=True, array_like=True):
    """The model's inputs in a step: plain numbers, the same on every rank.

    `token_ids` has the tokens of all chunks end to end. One entry per chunk is in `query_lens` (tokens computed in this
    step), `context_lens` (tokens with KV after this step; vLLM's `seq_lens`), `known_lens` (tokens of the sequence,
    computed or not) and `block_tables`. `logits_indices` are indices into `token_ids`: the tokens whose logits are
    needed.
    """

    token_ids: list[int]
    query_lens: list[int]
    context_lens: list[int]
    known_lens: list[int]
    block_tables: list[list[int]]
    logits_indices: list[int]


@dataclass
class SamplerOutput:
    """The results of sampling, by request id: the next tokens, several where a draft was right, or the error."""

    sampled: dict[str, list[SampledToken]] = field(default_factory=dict)
    failed: dict[str, Exception] = field(default_factory=dict)


@dataclass(frozen=True)
class LogitRows:
    """The tokens of a step that need logits (`logits_indices`, as in `StepInputs`), and the use of the logits."""

    logits_indices: list[int]
    sampled: list[tuple[int, Sequence]]
    """(index into `logits_indices`, sequence) for each sequence whose next token is sampled."""
    prompt: list[tuple[int, Sequence, int]]
    """(index into `logits_indices`, sequence, the prompt position that the row predicts)."""
    drafts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Draft of a sampled sequence, by request id; the logits after each of its tokens follow the sequence's row."""


class ModelRunner:
    """Runs one rank's share of a model on one device, with that rank's KV cache."""

    def __init__(self, model: LoadedModel, kv_cache: KVCache, hooks: LayerHooks | None) -> None:
        self._model, self._kv_cache, self._hooks = model, kv_cache, hooks

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> Tensor:
        """Compute a step and write its KV; returns float32 logits `[len(logits_indices), vocab]`, the whole vocabulary
        on every rank. Without indices there is one meaningless row."""
        device = self._kv_cache.device
        batch = AttentionBatch.build(
            inputs.query_lens,
            inputs.context_lens,
            inputs.block_tables,
            block_size=self._kv_cache.layout.block_size,
            device=device,
        )
        # An unused row keeps the shape of the output plain when no chunk is at its end.
        logits_to_keep = torch.tensor(inputs.logits_indices or [0], device=device)
        context = PagedContext(
            batch, self._kv_cache.layers, self._model.windows, self._long_tokens(inputs, device), self._hooks
        )
        with attention_context(context):
            output = self._model.module(
                input_ids=torch.tensor([inputs.token_ids], device=device),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=logits_to_keep,
            )
        logits: Tensor = output.logits[0]
        return logits.float()

    def _long_tokens(self, inputs: StepInputs, device: torch.device) -> Tensor | None:
        """Bool `[num_tokens]`: true for tokens of sequences beyond the trained context. None: the model has no such
        limit."""
        border = self._model.trained_context
        if border is None:
            return None
        is_long = torch.tensor([length > border for length in inputs.known_lens])
        return is_long.repeat_interleave(torch.tensor(inputs.query_lens)).to(device)


class TokenByToken(ModelRunner):
    """Computes every token of a step by itself: the same call for the same token, whatever the step, so the same bits.

    For products of a library that rounds differently from shape to shape (see `model.batch_invariance`).
    """

    def forward(self, inputs: StepInputs) -> Tensor:
        """The same as `ModelRunner.forward`. For each layer, the hooks' `wait_layer` is called before the first token
        and `save_layer` after the last."""
        hooks, logits_indices, rows = self._hooks, inputs.logits_indices or [0], {}
        last = len(inputs.token_ids) - 1
        try:
            for position, step in enumerate(_single_tokens(inputs)):
                if hooks is not None:
                    self._hooks = _Ends(hooks, is_first=position == 0, is_last=position == last)
                logits = super().forward(step)
                if position in logits_indices:
                    rows[position] = logits
        finally:
            self._hooks = hooks
        return torch.cat([rows[position] for position in logits_indices])


@dataclass(frozen=True)
class _Ends:
    """Forwards `wait_layer` in the first of several passes, and `save_layer` in the last one."""

    hooks: LayerHooks
    is_first: bool
    is_last: bool

    def wait_layer(self, layer: int) -> None:
        """Called before attention of `layer` reads the cache."""
        if self.is_first:
            self.hooks.wait_layer(layer)

    def save_layer(self, layer: int) -> None:
        """Called after this step's K and V of `layer` are written and read."""
        if self.is_last:
            self.hooks.save_layer(layer)


def _single_tokens(inputs: StepInputs) -> Iterator[StepInputs]:
    """A step of one token for each token of `inputs`, in their order."""
    ids = iter(inputs.token_ids)
    columns = (inputs.query_lens, inputs.context_lens, inputs.known_lens, inputs.block_tables)
    for length, context, num_known, table in zip(*columns, strict=True):
        for end in range(context - length + 1, context + 1):
            yield StepInputs([next(ids)], [1], [end], [num_known], [table], [0])


def lay_out(chunks: abc.Sequence[Chunk], logits_indices: list[int]) -> StepInputs:
    """The inputs of these chunks, with the logits indices from `choose_logit_rows`."""
    return StepInputs(
        [token for chunk in chunks for token in _tokens_of(chunk)],
        [chunk.num_tokens + len(chunk.draft) for chunk in chunks],
        [chunk.start + chunk.num_tokens + len(chunk.draft) for chunk in chunks],
        [len(chunk.sequence.tokens) for chunk in chunks],
        [chunk.sequence.block_ids for chunk in chunks],
        logits_indices,
    )


def _tokens_of(chunk: Chunk) -> Iterable[int]:
    tokens = chunk.sequence.tokens[chunk.start : chunk.start + chunk.num_tokens]
    return chain(tokens, chunk.draft) if chunk.draft else tokens


@torch.inference_mode()
def draw(
    logits: Tensor, rows: LogitRows, eos_token_ids: frozenset[int], filling: Future[Masks] | None = None
) -> SamplerOutput:
    """Sample the next token of each of `rows.sampled`, and those after it as far as its draft is right; append prompt
    log-probabilities to the sequences of `rows.prompt`. `logits` `[len(rows.logits_indices), vocab]`, float32.
    `filling`: the result of `TokenMasks.begin` for these sequences."""
    drawn = SamplerOutput()
    masks = NO_MASKS if filling is None else filling.result()
    drawn.failed |= masks.failed
    for index, sequence, position in rows.prompt:
        try:
            sequence.prompt_logprobs.append(
                token_logprobs(logits[index], sequence.tokens[position], sequence.request.sampling.prompt_logprobs)
            )
        except Exception as error:  # noqa: BLE001 - the boundary between one row and the others
            drawn.failed[sequence.request_id] = error
    sampled = [row for row in rows.sampled if row[1].request_id not in masks.failed]
    _draw_rows(logits, sampled, eos_token_ids, masks.permitted, drawn)
    for index, sequence in sampled if rows.drafts else ():
        tokens = drawn.sampled.get(sequence.request_id)
        if tokens and (draft := rows.drafts.get(sequence.request_id)):
            tokens += verify(logits[index + 1 : index + 1 + len(draft)], sequence, tokens[0], draft, eos_token_ids)
    return drawn


def _draw_rows(
    logits: Tensor,
    rows: abc.Sequence[tuple[int, Sequence]],
    eos_token_ids: frozenset[int],
    permitted: Mapping[str, Bits],
    drawn: SamplerOutput,
) -> None:
    """Sample all rows at once; if that fails, row by row, so that only the failing row has no token."""
    if not rows:
        return
    drawing, indices = [sequence for _, sequence in rows], [index for index, _ in rows]
    try:
        chosen = logits if indices == [*range(len(logits))] else logits[indices]
        tokens = sample(chosen, drawing, eos_token_ids, permitted)
    except Exception as error:
        if len(rows) == 1:
            drawn.failed[drawing[0].request_id] = error
            return
        logger.exception("tokens of %d requests could not be sampled together; sampling them one by one", len(rows))
        for row in rows:
            _draw_rows(logits, [row], eos_token_ids, permitted, drawn)
    else:
        drawn.sampled |= {sequence.request_id: [token] for sequence, token in zip(drawing, tokens, strict=True)}


def choose_logit_rows(chunks: abc.Sequence[Chunk]) -> LogitRows:
    """Choose the last token of each chunk that samples, its draft, and all tokens of prompts with log-probabilities.

    Empties the list of a prompt's log-probabilities when the prompt begins (again).
    """
    rows = LogitRows([], [], [])
    first = 0
    for chunk in chunks:
        sequence = chunk.sequence
        if sequence.request.sampling.prompt_logprobs is not None:
            _add_prompt_rows(rows, chunk, first)
        if chunk.samples:
            rows.sampled.append((len(rows.logits_indices), sequence))
            last = first + chunk.num_tokens - 1
            rows.logits_indices.extend(range(last, last + 1 + len(chunk.draft)))
            if chunk.draft:
                rows.drafts[sequence.request_id] = chunk.draft
        first += chunk.num_tokens + len(chunk.draft)
    return rows


def _add_prompt_rows(rows: LogitRows, chunk: Chunk, first: int) -> None:
    sequence = chunk.sequence
    if chunk.start == 0:
        sequence.prompt_logprobs[:] = [None]  # nothing predicts the first token
    for offset in range(chunk.num_tokens):
        predicted = chunk.start + offset + 1
        if predicted < sequence.num_prompt_tokens:
            rows.prompt.append((len(rows.logits_indices), sequence, predicted))
            rows.logits_indices.append(first + offset)
