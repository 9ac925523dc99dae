"""The metadata that attention needs for one step's batch. Built once for each step, and read by every layer."""

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
    """Sequences with equal numbers of new tokens, which form a rectangular batch for plain PyTorch attention."""

    rows: Tensor
    """int64 [G]: the numbers of the sequences."""
    tokens: Tensor
    """int64 [G, query_len]: the indices of the tokens among all T."""
    query_len: int
    max_context_len: int


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """B sequences with T new tokens in all, concatenated. Tensors are on the model's device. In vLLM's attention
    metadata, the first four are `query_start_loc`, `seq_lens`, `block_table` and `slot_mapping`."""

    query_starts: Tensor
    """int32 [B + 1]: the new tokens of sequence b are query_starts[b] to query_starts[b + 1]."""
    context_lens: Tensor
    """int32 [B]: tokens of each sequence in the KV cache, this step's included."""
    block_tables: Tensor
    """int32 [B, max_blocks]: block ids of each sequence, 0 behind its last block."""
    slots: Tensor
    """int64 [T]: the slot mapping: the slot of each new token's KV, `block id * block_size + offset`."""
    positions: Tensor
    """int64 [T]: each new token's position in its sequence."""
    block_size: int
    host_starts: np.ndarray
    """`query_starts` in host memory."""
    host_contexts: np.ndarray
    """`context_lens` in host memory."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the batch: B in shapes."""
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the batch: T in shapes."""
        return len(self.slots)

    @property
    def max_query_len(self) -> int:
        """Max number of new tokens of any sequence."""
        return int(np.diff(self.host_starts).max())

    @property
    def max_context_len(self) -> int:
        """Longest context of any sequence."""
        return int(self.host_contexts.max())

    @cached_property
    def groups(self) -> tuple[QueryGroup, ...]:
        """The sequences by their number of new tokens, for plain PyTorch attention."""
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
        """The batch of one step. `query_lens`: new tokens of each sequence; `context_lens`: with those included. Each
        block table must have blocks for the whole context; longer tables are cut."""
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
    """The block tables as int32 [B, max_blocks], cut to what each context needs and filled up with 0."""
    padded = np.zeros((len(tables), int(num_blocks.max())), np.int32)
    for row, (table, count) in enumerate(zip(tables, num_blocks.tolist(), strict=True)):
        padded[row, :count] = table[:count]
    return padded


def _group(rows: np.ndarray, starts: np.ndarray, contexts: np.ndarray, device: torch.device | str) -> QueryGroup:
    query_len = int(starts[rows[0] + 1] - starts[rows[0]])
    tokens = starts[rows, None].astype(np.int64) + np.arange(query_len)
    return QueryGroup(_tensor(rows, device), _tensor(tokens, device), query_len, int(contexts[rows].max()))
