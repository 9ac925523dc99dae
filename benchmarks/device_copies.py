"""How fast do blocks go from a GPU's KV cache to host memory and back, as stores need them?

    python benchmarks/device_copies.py

Blocks lie apart in device memory, each in as many pieces as the model has layers. `kvferry` is what the connectors of
stores do (`connectors.kv_store.blocks`): one kernel that reads or writes pinned host memory. Beside it, in the same
turns: one contiguous copy of as many bytes by PyTorch, the limit of the bus, and a copy of each piece by PyTorch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from kvferry.connectors.kv_store.blocks import block_bytes_of
from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.transport.memory import BlockMemory
from report import print_machine, save

NUM_LAYERS, TURNS = 32, 9


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=128, help="how many are copied at once")
    arguments = parser.parse_args()
    print_machine()
    figures = {f"{kib} KiB a layer": _measure(kib * 1024, arguments.blocks) for kib in (16, 64, 256)}
    for name, row in figures.items():
        print(name, ", ".join(f"{way} {gb_s:.1f}" for way, gb_s in row.items()), "GB/s")
    settings = {"blocks": str(arguments.blocks), "layers": str(NUM_LAYERS), "gpu": torch.cuda.get_device_name(0)}
    print(save("device_copies", settings, figures))


def _measure(span_bytes: int, num_blocks: int) -> dict[str, float]:
    """GB/s by way, the median of turns."""
    heads = LayerLayout(8, 64, 64)
    block_size = span_bytes // (8 * 128 * 2)
    layout = KVLayout(model_fingerprint="m", layers=(heads,) * NUM_LAYERS, dtype="bfloat16", block_size=block_size)
    num_all = 4 * num_blocks
    cache = torch.zeros(num_all * layout.block_bytes, dtype=torch.uint8, device="cuda:0")
    memory = BlockMemory.dense(layout, num_all, cache.data_ptr(), device="cuda:0")
    blocks = block_bytes_of(memory, saves_are_complete=False)
    block_ids = np.random.default_rng(1).permutation(num_all)[:num_blocks].tolist()
    num_bytes = num_blocks * layout.block_bytes
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    spans = [span for layer in range(NUM_LAYERS) for block in block_ids for span in memory.spans(layer, [block])]
    landing = blocks.landing(range(NUM_LAYERS), block_ids)

    def pieces(out: bool) -> None:
        at = 0
        for offset, length in spans:
            there, here = cache[offset : offset + length], pinned[at : at + length]
            here.copy_(there, non_blocking=True) if out else there.copy_(here, non_blocking=True)
            at += length
        torch.cuda.synchronize()

    def whole(out: bool) -> None:
        pinned.copy_(cache[:num_bytes]) if out else cache[:num_bytes].copy_(pinned)
        torch.cuda.synchronize()

    ways: dict[str, Callable[[], object]] = {
        "out: kvferry": lambda: blocks.copying(block_ids).end(),
        "out: a copy for each piece": lambda: pieces(True),
        "out: one copy": lambda: whole(True),
        "in: kvferry": landing.settle,
        "in: a copy for each piece": lambda: pieces(False),
        "in: one copy": lambda: whole(False),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(TURNS + 1):
        for way, act in ways.items():
            begun = time.perf_counter()
            act()
            taken[way].append(time.perf_counter() - begun)
    blocks.close()
    return {way: num_bytes / statistics.median(times[1:]) / 1e9 for way, times in taken.items()}


if __name__ == "__main__":
    main()
