"""Stores, codecs and policies with calls that never return, once a file says which: `$KVFERRY_ENDLESS` has its name."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvferry.connectors.kv_store.worker import KVStoreWorkerSide
from kvferry.connectors.registry import KV_STORE
from kvferry.store.base import Block, BlockRead, KVStore, PutResult
from kvferry.store.codecs.none import NoCodec
from kvferry.store.eviction.base import BlockKey
from kvferry.store.eviction.lru import Lru
from kvferry.transport.fabric.base import FabricPeer
from kvferry.transport.fabric.shm import ShmFabric
from kvferry.transport.memory import Span
from kvferry.transport.transfer_loop import uncancelled
from support.waiting import eventually

PLANTED = "KVFERRY_ENDLESS"


def come_to(call: str) -> None:
    """This call is made: it never returns if it is the one."""
    planted = Path(os.environ[PLANTED])
    if planted.exists() and planted.read_text() == call:
        threading.Event().wait()


class EndlessStore(KVStore):
    """In memory. What it waits for holds up the whole event loop on which it is called."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._blocks: dict[bytes, list[bytes]] = {}

    async def match(self, hashes: Sequence[bytes]) -> int:
        come_to("match")
        return next((index for index, name in enumerate(hashes) if name not in self._blocks), len(hashes))

    async def get(self, reads: Sequence[BlockRead]) -> list[bool]:
        come_to("get")
        for read in reads:
            for view, content in zip(read.into, self._blocks.get(read.block_hash, []), strict=False):
                view[:] = content
        return [read.block_hash in self._blocks for read in reads]

    async def put(self, blocks: Sequence[Block]) -> list[PutResult]:
        come_to("put")
        self._blocks |= {block.block_hash: [bytes(view) for view in block.layers] for block in blocks}
        return [PutResult.STORED] * len(blocks)

    async def pin(self, hashes: Sequence[bytes]) -> int:
        return 0

    async def unpin(self, hashes: Sequence[bytes]) -> int:
        return 0

    async def delete(self, hashes: Sequence[bytes]) -> int:
        return 0

    async def close(self) -> None:
        come_to("close")


class EndlessCodec(NoCodec):
    name = "endless"

    def encode(self, span: memoryview, layer: int) -> memoryview:
        come_to("encode")
        return super().encode(span, layer)

    def decode(self, encoded: memoryview, layer: int, into: memoryview) -> None:
        come_to("decode")
        super().decode(encoded, layer, into)


class EndlessPolicy(Lru):
    def access(self, key: BlockKey, now: float) -> None:
        come_to("access")
        super().access(key, now)


class EndlessFabric(ShmFabric):
    """Whose reads end when `gate` opens, and not when they are cancelled."""

    name = "endless"
    gate = threading.Event()

    async def connect(self, description: dict[str, Any], deadline: float) -> FabricPeer:
        peer = await super().connect(description, deadline)
        read = peer.read

        async def late(remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
            await uncancelled(self._pass())
            await read(remote, local, deadline)

        peer.read = late  # type: ignore[method-assign]
        return peer

    async def _pass(self) -> None:
        await eventually(self.gate.is_set, interval_s=0.001)


class EndlessWorkerSide(KVStoreWorkerSide):
    """In the engine's own thread."""

    def flush(self) -> None:
        come_to("step")
        super().flush()

    def close(self) -> None:
        come_to("close the connector")
        super().close()


CONNECTOR = replace(KV_STORE, worker_side=f"{__name__}:EndlessWorkerSide")
