"""What attention must know of one step's ragged batch. Built once a step, read by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class QueryGroup:
    """Sequences of equal query length: they make a rectangular batch for plain PyTorch attention."""

    rows: Tensor
    """int64 [G]: which sequences."""
    tokens: Tensor
    """int64 [G, query_len]: the tokens' places in the ragged batch."""
    query_len: int
    max_context_len: int


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """B sequences with T new tokens in all, laid end to end. Tensors lie on the model's device."""

    query_starts: Tensor
    """int32 [B+1]: the new tokens of sequence b are query_starts[b] to query_starts[b+1]."""
    context_lens: Tensor
    """int32 [B]: KV length of each sequence, this step's tokens included."""
    block_tables: Tensor
    """int32 [B, max_blocks]: block ids of each sequence; what lies behind its last block is 0."""
    slots: Tensor
    """int64 [T]: where each new token's KV goes, as block id * block_size + offset."""
    positions: Tensor
    """int64 [T]: each new token's position in its sequence."""
    block_size: int
    host_starts: np.ndarray
    """`query_starts` once more, for whom Python decides."""
    host_contexts: np.ndarray
    """`context_lens` once more."""

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.slots)

    @property
    def max_query_len(self) -> int:
        """Most new tokens of a sequence."""
        return int(np.diff(self.host_starts).max())

    @property
    def max_context_len(self) -> int:
        """Longest KV of a sequence."""
        return int(self.host_contexts.max())

    @cached_property
    def groups(self) -> tuple[QueryGroup, ...]:
        """The sequences by query length, for the plain PyTorch path."""
        lens = np.diff(self.host_starts)
        rows = [np.nonzero(lens == length)[0] for length in np.unique(lens)]
        return tuple(_group(some, self.host_starts, self.host_contexts, self.slots.device) for some in rows)

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionBatch:
        """Prepare a step. Each block table must hold context_len tokens; longer tables are fine."""
        starts = np.fromiter(accumulate(query_lens, initial=0), np.int32, len(query_lens) + 1)
        contexts = np.fromiter(context_lens, np.int32, len(context_lens))
        tables = _pad(block_tables, -(-contexts // block_size))
        lens = np.diff(starts)
        rows = np.repeat(np.arange(len(lens)), lens)
        positions = np.arange(starts[-1]) - starts[rows] + (contexts - lens)[rows]
        slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
        return cls(
            query_starts=_tensor(starts, device),
            context_lens=_tensor(contexts, device),
            block_tables=_tensor(tables, device),
            slots=_tensor(slots, device),
            positions=_tensor(positions, device),
            block_size=block_size,
            host_starts=starts,
            host_contexts=contexts,
        )


def _tensor(array: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _pad(tables: Sequence[Sequence[int]], num_blocks: np.ndarray) -> np.ndarray:
    """The block tables as int32 [B, max_blocks], cut to what each context needs and filled with 0."""
    padded = np.zeros((len(tables), int(num_blocks.max())), np.int32)
    for row, (table, count) in enumerate(zip(tables, num_blocks.tolist(), strict=True)):
        padded[row, :count] = table[:count]
    return padded


def _group(rows: np.ndarray, starts: np.ndarray, contexts: np.ndarray, device: torch.device | str) -> QueryGroup:
    query_len = int(starts[rows[0] + 1] - starts[rows[0]])
    tokens = starts[rows, None].astype(np.int64) + np.arange(query_len)
    return QueryGroup(_tensor(rows, device), _tensor(tokens, device), query_len, int(contexts[rows].max()))
