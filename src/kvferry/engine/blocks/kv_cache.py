"""Owns the memory of KV blocks.

On the CPU it is anonymous shared memory (a memfd), so that a decode instance on the same machine copies from it
directly; on a GPU it is one allocation of torch's. It knows the layout of blocks in memory, not their users (the block
pool does).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ConfigError
from kvferry.core.host.machine import usable_memory
from kvferry.core.settings.units import format_bytes
from kvferry.transport.memory import BlockMemory
from kvferry.transport.shared_memory import SharedSegment

CPU_SHARE = 0.25
CPU_DEFAULT_LIMIT = 4 * 2**30
CUDA_SHARE = 0.85


class KVCache:
    """The KV cache of one rank, of the layout's dtype, zeros at first.

    `layers[i]` is layer i's, `[num_blocks, kv_heads, block_size * (key_dim + value_dim)]`, all in one region of memory,
    which `memory` describes for connectors.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout, self.num_blocks, self.device = layout, num_blocks, device
        num_bytes = num_blocks * layout.block_bytes
        self._segment: SharedSegment | None = None
        if device.type == "cpu":
            self._segment = SharedSegment.create(num_bytes)
            flat = torch.frombuffer(self._segment.buffer, dtype=torch.uint8, count=num_bytes)
            address, segment = self._segment.address, self._segment.name
        else:
            flat = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            address, segment = flat.data_ptr(), None
        self.layers: list[Tensor] = self._split(flat)
        self.memory = BlockMemory.dense(layout, num_blocks, address, device=device.type, segment=segment)

    def _split(self, flat: Tensor) -> list[Tensor]:
        """View the region's bytes `[num_bytes]` as one tensor per layer."""
        values = flat.view(getattr(torch, self.layout.dtype))
        layers, start = [], 0
        for spec in self.layout.layers:
            shape = (
                self.num_blocks,
                spec.num_kv_heads,
                self.layout.block_size * (spec.key_dim + spec.value_dim),
            )
            count = shape[0] * shape[1] * shape[2]
            layers.append(values[start : start + count].view(shape))
            start += count
        return layers

    def close(self) -> None:
        """Free the memory; the tensors must not be used afterwards."""
        self.layers.clear()
        if self._segment is not None:
            self._segment.close()


def choose_num_blocks(
    layout: KVLayout, device: torch.device, requested_bytes: int | None, useful_tokens: int, *, num_ranks: int = 1
) -> int:
    """Number of blocks to allocate: as requested, or a share of the free memory for at most `useful_tokens` tokens.

    `requested_bytes` and the free host memory are for all `num_ranks` ranks of the instance.
    Raises `ConfigError` when not even two blocks fit.
    """
    useful = -(-useful_tokens // layout.block_size)
    budget = _free_bytes(device, num_ranks) if requested_bytes is None else requested_bytes // num_ranks
    require_two_blocks(layout, budget)
    num_blocks = budget // layout.block_bytes
    return min(num_blocks, useful) if requested_bytes is None else num_blocks


def require_two_blocks(layout: KVLayout, budget: int) -> None:
    """Raise `ConfigError` when the bytes that a rank has for its KV cache are too few for any sequence."""
    if budget < 2 * layout.block_bytes:
        raise ConfigError(
            f"the KV cache needs at least two blocks of {format_bytes(layout.block_bytes)}, but only"
            f" {format_bytes(budget)} are set aside for it; raise --kv-cache-memory or lower --block-size"
        )


def _free_bytes(device: torch.device, num_ranks: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
    return int(min(usable_memory().available * CPU_SHARE, CPU_DEFAULT_LIMIT) / num_ranks)
