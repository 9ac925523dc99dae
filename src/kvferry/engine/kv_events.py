"""Reports the blocks that the prefix cache stored and evicted in a step (`kv_events`).

Owns the events of the current step, and the publisher. Prompts with a `cache_salt` and sequences beyond the trained
context are not reported, because their blocks cannot be found by their tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.kv_events.messages import DEVICE, BlockRemoved, BlockStored, Event
from kvferry.kv_events.publisher import EventAddresses, KVEventPublisher


class BlockEvents:
    """Collects and publishes the events. Used from the engine's thread."""

    def __init__(self, publisher: KVEventPublisher, block_size: int) -> None:
        self._publisher, self._block_size = publisher, block_size
        self._events: list[Event] = []

    @property
    def addresses(self) -> EventAddresses:
        """The addresses at which the events can be followed."""
        return self._publisher.addresses

    def stored(self, name: BlockHash, parent: BlockHash | None, token_ids: Sequence[int]) -> None:
        """Record that a block is now in the prefix cache. Consecutive blocks are published as one event."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and parent is not None and last.block_hashes[-1] == parent:
            last.block_hashes.append(name)
            last.token_ids.extend(token_ids)
            return
        event = BlockStored(
            block_hashes=[name],
            parent_block_hash=parent,
            token_ids=list(token_ids),
            block_size=self._block_size,
            medium=DEVICE,
            group_idx=0,
        )
        self._events.append(event)

    def removed(self, name: BlockHash) -> None:
        """Record that a block is no longer in the prefix cache."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(name)
        else:
            self._events.append(BlockRemoved(block_hashes=[name], medium=DEVICE, group_idx=0))

    def flush(self) -> None:
        """Publish the events of the step that has ended."""
        if self._events:
            self._publisher.publish(self._events)
            self._events = []

    def close(self) -> None:
        """Close the publisher."""
        self._publisher.close()
