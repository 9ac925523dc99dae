"""Times of this machine's stores for a model's blocks, as `kvferry calibrate` measures them with the stores
themselves."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvferry.connectors.kv_store.loader import BATCH_BLOCKS
from kvferry.core import entropy
from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.sim.times import KVSize, MediumTimes, StoreTimes
from kvferry.store.base import Block, KVStore, Read
from kvferry.store.media.file import FileOptions
from kvferry.store.table import find_store

MAX_BYTES = 256 * 2**20
ROUNDS = 5


async def measure_stores(kv: KVSize, folder: Path) -> StoreTimes:
    """Put blocks into files of a new folder in `folder` and into shared memory, and get them again. What is read is
    what the system's page cache has, if there is memory for it. Raises `ConfigError`, `StoreError`."""
    name = entropy.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="kvferry-calibrate-", dir=folder) as files:
        file = await _measure(lambda num_blocks: f"file:{files}", kv, threads=FileOptions().threads)
    memory = await _measure(lambda num_blocks: f"memory:?num_blocks={num_blocks}&name={name}", kv, threads=1)
    return StoreTimes(file=file, memory=memory)


async def _measure(url: Callable[[int], str], kv: KVSize, *, threads: int) -> MediumTimes:
    """`threads`: how many read a batch at the same time."""
    half = max(1, kv.token_bytes // kv.num_layers // 4)
    batch = max(1, min(BATCH_BLOCKS, MAX_BYTES // 2 // (kv.token_bytes * kv.block_size)))
    tiny = await _with_store(url(2 * BATCH_BLOCKS), kv, 1, lambda store: _times(store, ROUNDS, BATCH_BLOCKS))
    whole = await _with_store(url(2 * batch), kv, half, lambda store: _times(store, ROUNDS, batch))
    latency_s = statistics.mean(tiny) / BATCH_BLOCKS
    num_bytes = batch * kv.token_bytes * kv.block_size
    written_s, read_s = whole
    return MediumTimes(
        latency_s=latency_s,
        write_bandwidth=num_bytes / max(written_s - batch * latency_s, written_s / 4),
        read_bandwidth=num_bytes / max(read_s - -(-batch // threads) * latency_s, read_s / 4),
    )


async def _with_store(
    url: str, kv: KVSize, half: int, use: Callable[[KVStore], Awaitable[tuple[float, float]]]
) -> tuple[float, float]:
    layers = (LayerLayout(1, half, half),) * kv.num_layers
    layout = KVLayout(model_fingerprint="calibrated", dtype="bfloat16", block_size=kv.block_size, layers=layers)
    store = find_store(url).make(layout)
    await store.open()
    try:
        return await use(store)
    finally:
        await store.close()


async def _times(store: KVStore, rounds: int, batch: int) -> tuple[float, float]:
    """Seconds to put a batch of new blocks, and to get them: medians, without the first round."""
    layout = store.layout
    views = [memoryview(bytearray(layout.span_bytes(layer))) for layer in range(layout.num_layers)]
    samples: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        names = [entropy.token_bytes(32) for _ in range(batch)]
        begun = SYSTEM_CLOCK.monotonic()
        await store.put([Block(name, views) for name in names])
        put = SYSTEM_CLOCK.monotonic()
        await store.get([Read(name, views) for name in names])
        samples.append((put - begun, SYSTEM_CLOCK.monotonic() - put))
        await store.delete(names)
    return statistics.median(sample for sample, _ in samples[1:]), statistics.median(
        sample for _, sample in samples[1:]
    )
