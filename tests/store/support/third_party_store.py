"""A store as somebody else would write it: one file."""

from collections.abc import Sequence

from kvferry.store.base import Block, BlockRead, KVStore, PutResult


class DictStore(KVStore):
    """In this process's memory, unbounded."""

    async def open(self) -> None:
        self._records: dict[bytes, bytes] = getattr(self, "_records", {})

    async def match(self, hashes: Sequence[bytes]) -> int:
        return next((index for index, name in enumerate(hashes) if name not in self._records), len(hashes))

    async def get(self, reads: Sequence[BlockRead]) -> list[bool]:
        found = [read.block_hash in self._records for read in reads]
        for read, there in zip(reads, found, strict=True):
            if there:
                self.records.decode(memoryview(self._records[read.block_hash]), read.block_hash, read.into)
        self.activity.count(loaded_blocks=sum(found), missing_blocks=len(found) - sum(found))
        return found

    async def put(self, blocks: Sequence[Block]) -> list[PutResult]:
        outcomes = []
        for block in blocks:
            new = block.block_hash not in self._records
            self._records[block.block_hash] = b"".join(self.records.encode(block.block_hash, block.layers))
            outcomes.append(PutResult.STORED if new else PutResult.PRESENT)
        self.activity.stored(block.block_hash for block in blocks)
        self.activity.count(stored_blocks=outcomes.count(PutResult.STORED))
        return outcomes

    async def pin(self, hashes: Sequence[bytes]) -> int:
        return sum(name in self._records for name in hashes)

    async def unpin(self, hashes: Sequence[bytes]) -> int:
        return await self.pin(hashes)

    async def delete(self, hashes: Sequence[bytes]) -> int:
        there = [name for name in hashes if self._records.pop(name, None) is not None]
        self.activity.removed(there)
        return len(there)
