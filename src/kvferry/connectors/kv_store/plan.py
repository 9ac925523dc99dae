"""What the scheduler side of the cache connector asks of its worker sides."""

from __future__ import annotations

import msgspec

from kvferry.connectors.kv_store.markers import Marker
from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.messages.hand_off import PrefillResult


class SaveBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Keep these blocks, which follow one another and are full after this step. `parent`: the block before them."""

    request_id: str
    hashes: list[BlockHash]
    block_ids: list[int]
    parent: BlockHash | None = None


class LoadBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Fill these blocks. `prefill_result`: what the hand-off's marker said, to be reported when they are."""

    request_id: str
    hashes: list[BlockHash]
    block_ids: list[int]
    layerwise: bool
    prefill_result: PrefillResult | None = None


class FinishedRequest(msgspec.Struct, frozen=True, array_like=True):
    """The request whose prompt these blocks are has its whole answer: a hint for what the store is to evict."""

    hashes: list[BlockHash]
    num_output_tokens: int


class StoreKeys(msgspec.Struct, frozen=True, array_like=True):
    """Store these keys once the blocks, those of a prompt's prefix of `num_tokens`, are stored. `salt`: the request's;
    `ttl_s`: after how many seconds the keys expire."""

    tenant: str
    keys: list[str | None]
    hashes: list[BlockHash]
    salt: str
    num_tokens: int
    ttl_s: float


class StorePlan(msgspec.Struct):
    """One step's work. `marks` go out after all blocks saved before, and `keys` after those of this step; `forgets` are
    transfer ids that were used; `flushes` are requests to report as `Released` when all of theirs is written."""

    cancels: list[str] = []
    loads: list[LoadBlocks] = []
    saves: list[SaveBlocks] = []
    marks: list[Marker] = []
    forgets: list[str] = []
    keys: list[StoreKeys] = []
    flushes: list[str] = []
    finished: list[FinishedRequest] = []

    def __bool__(self) -> bool:
        """Whether the plan must go out now. Hints (`finished`) can wait for the next plan."""
        work = (self.cancels, self.loads, self.saves, self.marks, self.forgets, self.keys, self.flushes)
        return any(work)
