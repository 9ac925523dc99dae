"""KV blocks at rest: block hash → the block's bytes, kept until evicted.

A store may be shared by several processes. All methods are safe to call from several threads and may block for as
long as the medium takes, so engines call them from threads of their own. What is stored under a hash never changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvferry.core.block_hash import BlockHash

LayerViews = Sequence[memoryview]
"""One block's bytes, one view a layer; each as long as the layout says."""


class KVStore(ABC):
    """Blocks of one layout, by hash. A stored block that does not verify is a miss, is counted, and is removed."""

    @abstractmethod
    def match(self, hashes: Sequence[BlockHash]) -> int:
        """How many blocks, from the first on, are there. They are not read: `get` may still find one damaged.

        Raises `StoreError` when the store cannot be asked.
        """

    @abstractmethod
    def get(self, block_hash: BlockHash, into: LayerViews) -> bool:
        """Read a block straight into `into`. False: it is not there, or did not verify; then `into` holds anything.

        Raises `StoreError` when the store cannot be read.
        """

    @abstractmethod
    def get_layer(self, block_hash: BlockHash, layer: int, into: memoryview) -> bool:
        """As `get`, of one layer."""

    @abstractmethod
    def put(self, block_hash: BlockHash, layers: LayerViews) -> bool:
        """Keep a block. False: it was there already, and counts as used now.

        Raises `StoreError` when it cannot be kept; the block is then counted as dropped, and nothing half-written
        is ever found.
        """

    @abstractmethod
    def delete(self, block_hash: BlockHash) -> bool:
        """Remove a block. True when it was there."""

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Counters by name: blocks stored, loaded, missing, corrupt, dropped, evicted; bytes read and written."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. What is stored stays."""
