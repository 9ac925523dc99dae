"""A store that answers when the test lets it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Sequence

from kv_support import make_layout

from kvferry.connectors.kv_store.markers import MARKER_S, Marker
from kvferry.core.messages.hand_off import PrefillResult
from kvferry.store.base import Block, BlockRead, LayerStore, PutResult, SharedStore, StoreOptions
from kvferry.store.block_run import BlockRun

LAYOUT = make_layout(num_layers=2)


class HeldStore(SharedStore, LayerStore):
    """Answers when `gate` is open; fills blocks with 1. As a `TieredStore` with one tier."""

    def __init__(self) -> None:
        super().__init__("", StoreOptions(), LAYOUT)
        self.gate = threading.Event()
        self.asked = threading.Event()
        self.error: Exception | None = None
        self.puts: list[bytes] = []
        self.notes: dict[str, bytes] = {}
        self.put_before_note: list[bytes] = []

    async def wait_for_gate(self) -> None:
        self.asked.set()
        end = time.monotonic() + 20
        while not self.gate.is_set():
            assert time.monotonic() < end
            await asyncio.sleep(0.001)
        if self.error is not None:
            raise self.error

    async def match(self, hashes: Sequence[bytes]) -> int:
        await self.wait_for_gate()
        return len(hashes)

    async def get(self, reads: Sequence[BlockRead]) -> list[bool]:
        for read in reads:
            await self.wait_for_gate()
            for view in read.into:
                view[:] = b"\x01" * len(view)
        return [True] * len(reads)

    async def get_layer(self, layer: int, reads: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        return await self.get([BlockRead(name, [into]) for name, into in reads])

    async def put(self, blocks: Sequence[Block]) -> list[PutResult]:
        await self.wait_for_gate()
        self.puts += [block.block_hash for block in blocks]
        return [PutResult.STORED] * len(blocks)

    async def pin(self, hashes: Sequence[bytes]) -> int:
        return 0

    async def unpin(self, hashes: Sequence[bytes]) -> int:
        return 0

    async def delete(self, hashes: Sequence[bytes]) -> int:
        return 0

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        self.put_before_note = list(self.puts)
        self.notes[name] = content

    async def runs(self, hashes: Sequence[bytes]) -> list[BlockRun]:
        return [BlockRun(0, await self.match(hashes))]

    async def prefetch(self, hashes: Sequence[bytes]) -> None:
        return

    def answers(self, shared: Collection[int]) -> bool:
        return True

    def takes(self) -> list[int]:
        return [0]

    async def read_note(self, name: str) -> bytes | None:
        return self.notes.get(name)

    async def remove_note(self, name: str) -> None:
        self.notes.pop(name, None)


def block(name: bytes, num_bytes: int = 100) -> Block:
    return Block(name, [memoryview(bytes(num_bytes))])


def marker_of(transfer_id: str) -> Marker:
    result = PrefillResult(first_token=1, seed=2)
    return Marker(
        transfer_id=transfer_id, layout=LAYOUT, num_tokens=3, digest="d", expires_s=MARKER_S, prefill_result=result
    )
