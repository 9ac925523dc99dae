"""What the scheduler side of the cache connector asks of its worker sides."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from kvferry.connectors.kv_store.markers import Marker
from kvferry.core.block_hash import BlockHash
from kvferry.core.hand_off import PrefillResult


class SaveBlocks(msgspec.Struct, frozen=True, array_like=True):
    """These blocks, which follow one another, are full after this step: keep them. `parent`: the block before them."""

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


class StorePlan(msgspec.Struct, frozen=True):
    """One step's work. `marks` go out after all blocks saved before; `forgets` are transfer ids that were used."""

    cancels: list[str] = []
    loads: list[LoadBlocks] = []
    saves: list[SaveBlocks] = []
    marks: list[Marker] = []
    forgets: list[str] = []
    finished: list[FinishedRequest] = []


@dataclass
class StoreWork:
    """A `StorePlan` in the making: what has come up since the last one. The fields are the plan's."""

    cancels: list[str] = field(default_factory=list)
    loads: list[LoadBlocks] = field(default_factory=list)
    saves: list[SaveBlocks] = field(default_factory=list)
    marks: list[Marker] = field(default_factory=list)
    forgets: list[str] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether it needs a plan now. Hints (`finished`) can wait for the next one."""
        return any(value for name, value in vars(self).items() if name != "finished")

    def plan(self) -> StorePlan:
        """The plan."""
        return StorePlan(**vars(self))
