"""CUDA IPC between two processes that share a GPU. Run where there is one: `pytest -m gpu`."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import pytest
import torch
from kv_support import make_layout, soon

from kvferry.core.errors import PeerLost
from kvferry.transport.connection import Identity
from kvferry.transport.control import Listener
from kvferry.transport.fabric.base import Fabric, FabricContext, build_fabrics
from kvferry.transport.memory import BlockMemory
from kvferry.transport.options import TransportOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYOUT = make_layout(block_size=16)
NUM_BLOCKS = 4096
DEVICE = torch.device("cuda", 0)


@dataclass
class OnGpu:
    """Blocks in device memory, and the fabric that reads a peer's into them."""

    tensor: torch.Tensor
    memory: BlockMemory
    fabric: Fabric

    def block(self, layer: int, block_id: int) -> bytes:
        [(offset, length)] = self.memory.spans(layer, [block_id])
        return self.tensor[offset : offset + length].cpu().numpy().tobytes()


def on_gpu(seed: int) -> OnGpu:
    """Filled with bytes that follow from the seed; not at the start of its allocation."""
    tensor = torch.empty(NUM_BLOCKS * LAYOUT.block_bytes + 4096, dtype=torch.uint8, device=DEVICE)[4096:]
    tensor.copy_(torch.from_numpy(contents(seed)))
    torch.cuda.synchronize()
    memory = BlockMemory.dense(LAYOUT, NUM_BLOCKS, tensor.data_ptr(), device="cuda:0")
    listener = Listener(Identity("engine", LAYOUT), "")
    [fabric] = build_fabrics("cuda_ipc", FabricContext(memory, listener, TransportOptions(transport="cuda_ipc")))
    listener.close()
    return OnGpu(tensor, memory, fabric)


def contents(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, NUM_BLOCKS * LAYOUT.block_bytes, np.uint8)


def produce(connection: Connection, seed: int) -> None:
    """The peer's process: says how to reach its blocks, and waits for the end."""
    ours = on_gpu(seed)
    connection.send(ours.fabric.describe())
    connection.recv()


@contextmanager
def peer(seed: int) -> Iterator[tuple[BaseProcess, dict[str, Any]]]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=produce, args=(there, seed))
    process.start()
    try:
        assert here.poll(120), "the peer did not start"
        yield process, here.recv()
    finally:
        process.kill()
        process.join(30)


async def test_blocks_of_another_process_are_read() -> None:
    ours, theirs = on_gpu(seed=1), contents(2)
    with peer(seed=2) as (_, described):
        assert ours.fabric.reachable(described)
        assert not ours.fabric.reachable(ours.fabric.describe())
        joined = await ours.fabric.connect(described, soon(30))
        order = np.random.default_rng(3).permutation(NUM_BLOCKS).tolist()
        wanted, places = order[:1000], order[1000:2000]
        for layer in range(LAYOUT.num_layers):
            await joined.read(ours.memory.spans(layer, wanted), ours.memory.spans(layer, places), soon(30))
        for layer in range(LAYOUT.num_layers):
            for source, target in zip(wanted, places, strict=True):
                [(offset, length)] = ours.memory.spans(layer, [source])
                assert ours.block(layer, target) == theirs[offset : offset + length].tobytes()
        await joined.close()
    await ours.fabric.close()


async def test_a_killed_peer_ends_a_read_soon() -> None:
    """With an error or with what was there: a mapping may outlive its owner."""
    ours = on_gpu(seed=1)
    with peer(seed=2) as (process, described):
        joined = await ours.fabric.connect(described, soon(30))
        process.kill()
        process.join(30)
        began = time.monotonic()
        try:
            await joined.read([(0, 1 << 20)], [(0, 1 << 20)], soon(30))
        except PeerLost as error:
            print(f"after its owner's death, a read said: {error}")
        assert time.monotonic() - began < 10
        await joined.close()
    assert torch.ones(8, device=DEVICE).sum().item() == 8  # the context is as it was
    await ours.fabric.close()


async def test_a_peer_whose_handle_is_no_allocation_is_refused() -> None:
    ours = on_gpu(seed=1)
    described = ours.fabric.describe() | {"process": 1}
    described["regions"] = [[b"x" * 64, 0, described["regions"][0][2]]]
    with pytest.raises(PeerLost, match="cuIpcOpenMemHandle"):
        await ours.fabric.connect(described, soon(30))
    await ours.fabric.close()
