"""Keeps the blocks of sliding windows while they are handed off.

vLLM keeps a finished request's blocks as long as its connector requires, but only the blocks that the next token would
attend to. The consumer also needs the token before these. So the producer holds the blocks of windows itself, with
vLLM's own reference count.

Owns these references.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvferry.core.errors import LeakError


class Pins:
    """References to blocks, by request. `pool`: vLLM's `BlockPool`. Used from vLLM's scheduler thread only."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._blocks: dict[str, list[Any]] = {}

    def hold(self, request_id: str, block_ids: Iterable[int]) -> None:
        """Hold these blocks, which the request has now, until `release`. Raises `LeakError` if vLLM has freed one of
        them, because its content may have changed."""
        self.release(request_id)
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        if any(block.is_null for block in blocks):
            raise LeakError(f"vLLM gave back a block of a window of request {request_id} too early")
        self._pool.touch(blocks)
        self._blocks[request_id] = blocks

    def release(self, request_id: str) -> None:
        """Release the request's blocks. The pool gets the ones that no other request uses."""
        blocks = self._blocks.pop(request_id, None)
        if blocks:
            self._pool.free_blocks(reversed(blocks))

    def check(self) -> None:
        """Raise `LeakError` if a block is held."""
        if self._blocks:
            raise LeakError(f"blocks of windows of requests {[*self._blocks][:8]} are still held")
