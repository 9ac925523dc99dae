"""A digest of bytes wherever they lie in KV memory, to tell whether a transfer brought what was sent (XXH3)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import xxhash

from kvferry.transport.fabric.base import require_within
from kvferry.transport.memory import BlockMemory, Span

SLICE_BYTES = 8 * 2**20
"""Digested before other tasks get the loop again: well under a millisecond."""


async def digest(memory: BlockMemory, spans: Sequence[Span]) -> bytes:
    """Of the spans' bytes in order, however they are cut. Host memory only.

    Raises `ProtocolError` when a span lies outside of the memory.
    """
    require_within(spans, memory.num_bytes, "digested")
    hasher, num_digested = xxhash.xxh3_128(), 0
    for offset, length in spans:
        for start in range(offset, offset + length, SLICE_BYTES):
            piece = min(SLICE_BYTES, offset + length - start)
            hasher.update(memory.view((start, piece)))
            num_digested += piece
            if num_digested >= SLICE_BYTES:
                await asyncio.sleep(0)
                num_digested = 0
    found: bytes = hasher.digest()
    return found
