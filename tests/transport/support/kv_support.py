"""Regions of KV blocks with known bytes, and instances' data planes, for tests of everything that moves blocks."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.layout import KVLayout, LayerLayout
from kvferry.core.sharding import on_rank
from kvferry.transport.control import Listener
from kvferry.transport.fabric.base import FabricContext
from kvferry.transport.fabric.table import build_fabrics
from kvferry.transport.lookup_buffer.base import Source
from kvferry.transport.lookup_buffer.entries import EntryBounds, EntryTable
from kvferry.transport.lookup_buffer.fabric import FabricLookupBuffer
from kvferry.transport.memory import BlockMemory
from kvferry.transport.options import TransportOptions
from kvferry.transport.shared_memory import SharedSegment, owned_segment_names
from kvferry.transport.tls import ChannelTls, channel_tls
from kvferry.transport.transfer_loop import TransferLoop
from kvferry.transport.wire import Identity

sys.path.insert(0, str(Path(__file__).parents[2]))  # of scripts that are run by themselves
from support.certificates import for_children, member_options


def make_layout(num_layers: int = 3, block_size: int = 4, **changes: object) -> KVLayout:
    """Small, and its layers differ in size."""
    layers = tuple(LayerLayout(2, 8, 8 + 4 * (layer % 2)) for layer in range(num_layers))
    fields = {"model_fingerprint": "m", "layers": layers, "dtype": "float32", "block_size": block_size}
    return KVLayout(**(fields | changes))


def sharded(layout: KVLayout, tp_size: int, *, whole: bool = False) -> KVLayout:
    """The first rank's layout where `tp_size` ranks split the heads; with `whole`, each has all of them."""

    def shard(layer: LayerLayout) -> LayerLayout:
        total = layer.whole_kv_heads
        return msgspec.structs.replace(
            layer, num_kv_heads=total if whole else max(1, total // tp_size), total_kv_heads=total
        )

    layers = tuple(map(shard, layout.layers))
    return on_rank(msgspec.structs.replace(layout, layers=layers, tp_size=tp_size), 0)


class Region:
    """A region of blocks in a shared segment, and its bytes as numpy sees them."""

    def __init__(self, layout: KVLayout, num_blocks: int, seed: int | None = None) -> None:
        self.segment = SharedSegment.create(num_blocks * layout.block_bytes)
        self.memory = BlockMemory.dense(layout, num_blocks, self.segment.address, segment=self.segment.name)
        if seed is not None:
            self.fill(seed)

    @property
    def bytes(self) -> np.ndarray:
        return np.frombuffer(self.segment.buffer, np.uint8)

    def fill(self, seed: int) -> None:
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.segment.num_bytes, np.uint8)

    def block(self, layer: int, block_id: int) -> bytes:
        [(offset, length)] = self.memory.spans(layer, [block_id])
        return self.bytes[offset : offset + length].tobytes()

    def blocks(self, block_ids: list[int]) -> list[list[bytes]]:
        """By layer, the bytes of each block."""
        layers = range(self.memory.layout.num_layers)
        return [[self.block(layer, block_id) for block_id in block_ids] for layer in layers]

    def close(self) -> None:
        self.segment.close()


def tls_of(transport: str) -> ChannelTls | None:
    """Where the name of a transport begins with "tls-"."""
    return channel_tls(TransportOptions(**member_options())) if transport.startswith("tls-") else None


def table_for(memory: BlockMemory, bounds: EntryBounds | None = None, clock: Clock | None = None) -> EntryTable:
    """An empty one, for blocks of this memory."""
    return EntryTable(memory.geometry, clock or SystemClock(), bounds or EntryBounds())


class Node:
    """One instance's data plane: transfer thread, listener, fabrics and lookup buffer over a region."""

    def __init__(
        self,
        region: Region,
        transport: str = "auto",
        *,
        token: str = "secret",
        bounds: EntryBounds | None = None,
        clock: Clock | None = None,
        engine_id: str = "engine",
    ) -> None:
        self.region = region
        self.loop = TransferLoop("kvferry-test")
        identity = Identity(engine_id, region.memory.layout)
        tls = tls_of(transport)
        self.listener = Listener(identity, token, tls=tls)
        self.context = FabricContext(region.memory, self.listener, identity, token, tls=tls)
        self.fabrics = build_fabrics(transport.removeprefix("tls-"), self.context)
        self.table = table_for(region.memory, bounds, clock)
        self.buffer = FabricLookupBuffer(self.context, self.fabrics, self.table)
        self.loop.start()
        self.service = self.loop.submit(self.buffer.run())

    def close(self) -> None:
        self.loop.close()
        assert self.service.cancelled() or self.service.exception() is None


@contextmanager
def no_leftovers() -> Iterator[None]:
    """Assert that the body leaves no thread and no segment behind."""
    threads, segments = set(threading.enumerate()), set(owned_segment_names())
    yield
    new = [thread for thread in threading.enumerate() if thread not in threads]
    left = [thread.name for thread in new if not thread.daemon or "kvferry" in thread.name]
    assert not left, f"threads left: {left}"
    assert set(owned_segment_names()) == segments


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Let the loop run until something came about that no event tells of."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0)


def soon(seconds: float = 10.0) -> float:
    """A deadline, on the running loop's clock."""
    return asyncio.get_running_loop().time() + seconds


class ProducerProcess:
    """`producer_process.py`, running."""

    def __init__(self, transport: str, *, num_blocks: int = 16, seed: int = 1, block_size: int = 4) -> None:
        script = Path(__file__).with_name("producer_process.py")
        numbers = [str(num_blocks), str(seed), str(block_size)]
        pipe = subprocess.PIPE
        command = [sys.executable, str(script), transport, *numbers]
        environment = os.environ | (for_children() if transport.startswith("tls-") else {})
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        assert self.process.stdout is not None
        self.where = json.loads(self.process.stdout.readline())
        self.source = Source(self.where["host"], self.where["port"])

    def tell(self, *words: object) -> None:
        """Have it do something, and wait until it is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
