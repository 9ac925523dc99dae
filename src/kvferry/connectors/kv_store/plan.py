"""The plans that the scheduler side of the cache connector sends to its worker sides."""

from __future__ import annotations

import msgspec

from kvferry.connectors.kv_store.markers import Marker
from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.messages.hand_off import PrefillResult


class SaveBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Save these consecutive blocks, which are full after this step. `parent`: the hash of the block before them."""

    request_id: str
    hashes: list[BlockHash]
    block_ids: list[int]
    parent: BlockHash | None = None


class LoadBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Load these blocks. `prefill_result`: the result in the hand-off's marker, to be reported with the load."""

    request_id: str
    hashes: list[BlockHash]
    block_ids: list[int]
    layerwise: bool
    prefill_result: PrefillResult | None = None


class FinishedRequest(msgspec.Struct, frozen=True, array_like=True):
    """The request whose prompt has these blocks has its complete answer. A hint for the store's eviction policy."""

    hashes: list[BlockHash]
    num_output_tokens: int


class StoreKeys(msgspec.Struct, frozen=True, array_like=True):
    """Store these keys once the blocks of the first `num_tokens` tokens of a prompt are stored. `salt`: the request's
    salt; `ttl_s`: seconds until the keys expire."""

    tenant: str
    keys: list[str | None]
    hashes: list[BlockHash]
    salt: str
    num_tokens: int
    ttl_s: float


class StorePlan(msgspec.Struct):
    """One step's work. `marks` are written after all blocks saved before, and `keys` after the blocks of this step.
    `forgets`: transfer ids whose markers are no longer needed. `flushes`: requests to report as `Released` when all
    their blocks and keys are written."""

    cancels: list[str] = []
    loads: list[LoadBlocks] = []
    saves: list[SaveBlocks] = []
    marks: list[Marker] = []
    forgets: list[str] = []
    keys: list[StoreKeys] = []
    flushes: list[str] = []
    finished: list[FinishedRequest] = []

    def __bool__(self) -> bool:
        """True if the plan must be sent now. Hints (`finished`) can wait for the next plan."""
        work = (self.cancels, self.loads, self.saves, self.marks, self.forgets, self.keys, self.flushes)
        return any(work)
