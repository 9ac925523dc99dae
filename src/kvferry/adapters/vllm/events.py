"""What subscribers to vLLM's KV events hear of a connector's store: which blocks are in it, and which are gone.

vLLM publishes what a connector gives it (`--kv-events-config`). A block has two names: in the store kvferry's, in
events the one that vLLM publishes for the same block, so that subscribers match them with requests as they do
vLLM's own. Owns what an event will say of blocks on their way to the store, and the names of those that were published.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvferry.adapters.vllm.requests import RequestAdapter
from kvferry.connectors.api import StoreEvents
from kvferry.core.block_hash import BlockHash
from kvferry.core.errors import LeakError

MAX_PUBLISHED = 2**18
"""Blocks whose removal can be published; beyond, the oldest are forgotten."""


@dataclass
class _Awaited:
    """A block on its way to the store: `num_ranks` outcomes are to come."""

    event: BlockStored
    num_ranks: int = 0
    dropped: bool = False


class BlockEvents:
    """See the module. `medium`: where blocks are when stored. Used from vLLM's scheduler thread only."""

    def __init__(self, medium: str, block_size: int, num_ranks: int) -> None:
        self._medium, self._block_size, self._num_ranks = medium, block_size, num_ranks
        self._awaited: dict[BlockHash, _Awaited] = {}
        self._published: OrderedDict[BlockHash, Any] = OrderedDict()
        self._events: list[KVCacheEvent] = []

    def saving(self, view: RequestAdapter, hashes: Sequence[BlockHash]) -> None:
        """A plan wants these blocks of a request kept, which follow one another."""
        first = view.block_hashes.index(hashes[0])
        for index, name in enumerate(hashes, first):
            if name not in self._awaited:
                self._awaited[name] = _Awaited(self._stored(view.request, index))
            self._awaited[name].num_ranks += self._num_ranks

    def _stored(self, request: Any, index: int) -> BlockStored:
        """As vLLM's block pool says it of a block in its own cache."""
        start = index * self._block_size
        end = start + self._block_size
        extra_keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(request.block_hashes[index])],
            parent_block_hash=maybe_convert_block_hash(request.block_hashes[index - 1]) if index else None,
            token_ids=list(request.all_token_ids[start:end]),
            block_size=self._block_size,
            lora_id=lora.adapter_id if lora is not None else None,
            medium=self._medium,
            lora_name=lora.name if lora is not None else None,
            extra_keys=to_event_extra_keys([extra_keys]),
            group_idx=0,
            session_id=request.session_id,
        )

    def happened(self, events: StoreEvents) -> None:
        """What one rank saw. A block is stored when all ranks have it, and gone when one has it no more."""
        for name in events.stored:
            self._outcome(name, dropped=False)
        for name in events.dropped:
            self._outcome(name, dropped=True)
        for name in events.removed:
            published = self._published.pop(name, None)
            if published is not None:
                self._events.append(BlockRemoved(block_hashes=[published], medium=self._medium, group_idx=0))

    def _outcome(self, name: BlockHash, *, dropped: bool) -> None:
        awaited = self._awaited[name]
        awaited.num_ranks -= 1
        awaited.dropped = awaited.dropped or dropped
        if awaited.num_ranks:
            return
        del self._awaited[name]
        if awaited.dropped:
            return
        self._events.append(awaited.event)
        self._published[name] = awaited.event.block_hashes[0]
        self._published.move_to_end(name)
        if len(self._published) > MAX_PUBLISHED:
            self._published.popitem(last=False)

    def take(self) -> list[KVCacheEvent]:
        """For vLLM's publisher."""
        events, self._events = self._events, []
        return events

    def has_work(self) -> bool:
        """Whether more will come, though no request is left."""
        return bool(self._awaited or self._events)

    def check(self) -> None:
        """Raise `LeakError` when blocks are still on their way."""
        if self._awaited:
            raise LeakError(f"{len(self._awaited)} blocks are still on their way to the store")
