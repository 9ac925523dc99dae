"""A KV store of one's own: blocks in a dictionary of the process, the least recently used evicted first.

    PYTHONPATH=examples kvferry serve MODEL --kv-transfer-config \\
      '{"kv_connector": "KVStoreConnector",
        "kv_connector_extra_config": {"store": "dict_store:DictStore?max_blocks=1000"}}'

It is meant to be read. `test_dict_store.py` runs the contract suite on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ConfigError
from kvferry.store.base import Block, BlockRead, KVStore, PutResult, StoreOptions
from kvferry.store.record import CorruptBlock


class DictOptions(StoreOptions, frozen=True, kw_only=True):
    """What may stand behind the `?` of the URL."""

    max_blocks: int = 4096
    """Most blocks that are kept."""

    def check(self, location: str) -> None:
        """Called before anything is opened."""
        if self.max_blocks < 1:
            raise ConfigError(f"max_blocks must be at least 1, got {self.max_blocks}")


class DictStore(KVStore):
    """Each instance has its own blocks, so that nothing is shared, and no hand-off goes through it."""

    options_type = DictOptions
    options: DictOptions
    medium = "CPU"

    def __init__(self, location: str, options: DictOptions, layout: KVLayout) -> None:
        super().__init__(location, options, layout)
        self._records: OrderedDict[BlockHash, bytes] = OrderedDict()
        self._pinned: set[BlockHash] = set()

    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """The longest prefix that is there."""
        return next((count for count, name in enumerate(hashes) if name not in self._records), len(hashes))

    async def get(self, reads: Sequence[BlockRead]) -> list[bool]:
        """Decoding verifies a record; one that does not verify is removed."""
        return [self._get(read) for read in reads]

    def _get(self, read: BlockRead) -> bool:
        record = self._records.get(read.block_hash)
        if record is None:
            self.activity.count(missing_blocks=1)
            return False
        try:
            self.records.decode(memoryview(record), read.block_hash, read.into)
        except CorruptBlock:
            self.activity.count(corrupt_blocks=1)
            self._remove(read.block_hash)
            return False
        self._records.move_to_end(read.block_hash)
        self.activity.count(loaded_blocks=1, read_bytes=len(record))
        return True

    async def put(self, blocks: Sequence[Block]) -> list[PutResult]:
        """Keep a copy of each."""
        return [self._put(block) for block in blocks]

    def _put(self, block: Block) -> PutResult:
        if block.block_hash in self._records:
            self._records.move_to_end(block.block_hash)
            self.activity.count(present_blocks=1)
            return PutResult.PRESENT
        if not self._has_room():
            self.activity.count(dropped_blocks=1)
            return PutResult.DROPPED
        record = b"".join(self.records.encode(block.block_hash, block.layers))
        self._records[block.block_hash] = record
        self.activity.count(stored_blocks=1, written_bytes=len(record))
        self.activity.stored([block.block_hash])
        return PutResult.STORED

    def _has_room(self) -> bool:
        """Evicts a block where that is needed; False when all are pinned."""
        if len(self._records) < self.options.max_blocks:
            return True
        victim = next((name for name in self._records if name not in self._pinned), None)
        if victim is None:
            return False
        self._remove(victim)
        self.activity.count(evicted_blocks=1)
        return True

    async def pin(self, hashes: Sequence[BlockHash]) -> int:
        """A flag of blocks that are there."""
        found = [name for name in hashes if name in self._records]
        self._pinned.update(found)
        return len(found)

    async def unpin(self, hashes: Sequence[BlockHash]) -> int:
        """Take the flag away."""
        self._pinned.difference_update(hashes)
        return sum(name in self._records for name in hashes)

    async def delete(self, hashes: Sequence[BlockHash]) -> int:
        """Also those that are pinned."""
        found = [name for name in dict.fromkeys(hashes) if name in self._records]
        for name in found:
            self._remove(name)
        return len(found)

    def _remove(self, name: BlockHash) -> None:
        del self._records[name]
        self._pinned.discard(name)
        self.activity.removed([name])
