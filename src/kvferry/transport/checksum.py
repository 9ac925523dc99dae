"""A digest (XXH3) of bytes in KV memory, to verify that a transfer delivered the bytes that were sent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import xxhash

from kvferry.transport.fabric.shm import MEMORY
from kvferry.transport.memory import BlockMemory, Span, join

SLICE_BYTES = 8 * 2**20
"""Bytes digested before other tasks get the loop: well under a millisecond."""


async def digest(memory: BlockMemory, spans: Sequence[Span], max_pieces: int = 4096) -> bytes:
    """The digest of the spans' bytes in order, the same however they are cut. Host memory only. Raises `ProtocolError`
    if a span lies outside of the memory."""
    pieces = join(spans, memory.map, spans, memory.map, SLICE_BYTES)
    hasher = xxhash.xxh3_128()
    for part in pieces.slices(SLICE_BYTES, max_pieces):
        for address, _, length in part.rows():
            hasher.update(MEMORY[address : address + length])
        await asyncio.sleep(0)
    result: bytes = hasher.digest()
    return result
