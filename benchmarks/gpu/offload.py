"""Step *offload*: blocks from the KV cache on the GPU to host memory and back, as the stores need them.

Blocks lie apart in device memory, each in as many pieces as the model has layers; one kernel reads or writes pinned
host memory. The baseline is one contiguous copy of as many bytes, the limit of the bus.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from gpu.context import Context, seconds_of
from kvferry.connectors.kv_store.blocks import BlockBytes, DeviceBlocks, block_bytes_of
from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.transport.memory import BlockMemory
from kvferry.transport.shared_memory import SharedSegment

GOAL_KIB, GOAL = 64, 0.85
"""The ratio to a contiguous copy to reach, at so many KiB a layer."""
SHIFTS = (0, 16, 3)
"""Bytes from where memory is aligned: the kernel has a path for aligned pieces and one for others."""


def run(context: Context) -> None:
    """Check that every byte arrives, then time each size."""
    num_layers, num_blocks = (3, 8) if context.small else (32, 128)
    for shift in SHIFTS:
        _check(context, shift)
    for kib in (16, 64) if context.small else (16, 64, 256):
        _measure(context, kib, num_layers, num_blocks)


class Cache:
    """A KV cache in device memory. `tensor`: its bytes."""

    def __init__(self, context: Context, layout: KVLayout, num_blocks: int, *, shift: int = 0) -> None:
        num_bytes = num_blocks * layout.block_bytes + 64
        if context.small:  # the stand-in for the driver
            self._segment = SharedSegment.create(num_bytes)
            whole = torch.frombuffer(self._segment.buffer, dtype=torch.uint8)
        else:
            whole = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0")
        self.tensor = whole[shift : shift + num_bytes - 64]
        self.memory = BlockMemory.dense(layout, num_blocks, self.tensor.data_ptr(), device="cuda:0")

    def blocks(self, context: Context) -> BlockBytes:
        """The copies of stores' connectors."""
        if context.small:
            return DeviceBlocks(self.memory, None, allocate=lambda num_bytes: memoryview(bytearray(num_bytes)))
        return block_bytes_of(self.memory, saves_are_complete=False)


def make_layout(kib_per_layer: int, num_layers: int) -> KVLayout:
    """A layout with so many KiB in a block of a layer."""
    heads = LayerLayout(8, 64, 64)
    block_size = kib_per_layer * 1024 // (8 * 128 * 2)
    return KVLayout(model_fingerprint="m", layers=(heads,) * num_layers, dtype="bfloat16", block_size=block_size)


def _check(context: Context, shift: int) -> None:
    layout = make_layout(16, 3)
    num_blocks = 16 if context.small else 256
    cache = Cache(context, layout, num_blocks, shift=shift)
    contents = np.random.default_rng(1).integers(0, 256, len(cache.tensor), np.uint8)
    cache.tensor.copy_(torch.from_numpy(contents))
    blocks = cache.blocks(context)
    ids = np.random.default_rng(2).permutation(num_blocks)[: num_blocks // 2].tolist()
    copies = blocks.begin_copy(ids).end()
    expected, out = np.zeros_like(contents), True
    for block_id, views in zip(ids, copies, strict=True):
        for layer, view in enumerate(views):
            [(offset, length)] = cache.memory.spans(layer, [block_id])
            expected[offset : offset + length] = contents[offset : offset + length]
            out = out and bytes(view) == expected[offset : offset + length].tobytes()
    cache.tensor.zero_()
    landing = blocks.staging_buffer(range(layout.num_layers), ids)
    for arrived, views in zip(landing.views, copies, strict=True):
        for target, view in zip(arrived, views, strict=True):
            target[:] = view
    if not context.small:
        torch.cuda.synchronize()
    landing.commit()
    back = bool(np.array_equal(cache.tensor.cpu().numpy(), expected))
    context.record.check(f"blocks {shift} bytes from alignment go out and come back", out and back, f"{out=}, {back=}")
    blocks.close()


def _measure(context: Context, kib: int, num_layers: int, num_blocks: int) -> None:
    layout = make_layout(kib, num_layers)
    cache = Cache(context, layout, 4 * num_blocks)
    blocks = cache.blocks(context)
    ids = np.random.default_rng(1).permutation(4 * num_blocks)[:num_blocks].tolist()
    num_bytes = num_blocks * layout.block_bytes
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=not context.small)
    landing = blocks.staging_buffer(range(num_layers), ids)
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "out": (lambda: blocks.begin_copy(ids).end(), lambda: pinned.copy_(cache.tensor[:num_bytes])),
        "in": (landing.commit, lambda: cache.tensor[:num_bytes].copy_(pinned)),
    }
    for way, (ours, one_copy) in ways.items():
        limit = num_bytes / seconds_of(one_copy, context.device) / 1e9
        rate = num_bytes / seconds_of(ours, context.device) / 1e9
        goal = GOAL if kib == GOAL_KIB and not context.small else None
        context.record.rate(f"{way}, {kib} KiB a layer", rate, "GB/s", ("one contiguous copy", limit), goal)
    blocks.close()
