"""KV events about a connector's store, for subscribers of vLLM's events: stored and removed blocks.

vLLM publishes the events of a connector (`--kv-events-config`). A block has two names: kvferry's block hash in the
store, and in events the hash that vLLM publishes for the same block, so that subscribers can match them with requests.
Owns the events of blocks that are being written to the store, until these are published, and the names of the published
blocks.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvferry.adapters.vllm.requests import RequestAdapter
from kvferry.connectors.caching import StoreEvents
from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import LeakError

logger = logging.getLogger(__name__)


@dataclass
class _BlockState:
    """One block: its event, the number of pending reports, and the number of ranks that have it on each medium."""

    event: BlockStored
    num_pending: int = 0
    ranks: Counter[str] = field(default_factory=Counter)
    published: set[str] = field(default_factory=set)


class VllmBlockEvents:
    """Counts the ranks' reports about each block, and makes vLLM's events from them. Used from vLLM's scheduler thread
    only."""

    max_blocks = 2**16
    """Maximum number of blocks whose names are kept for events. The oldest ones are dropped, but no pending ones."""
    report_timeout_s = 60.0
    """If no block is reported for this many seconds, pending blocks are dropped: one child of a `MultiConnector`
    is lost, and the others go on."""

    def __init__(self, block_size: int, num_ranks: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._block_size, self._num_ranks, self._clock = block_size, num_ranks, clock
        self._last_report_at = clock.monotonic()
        self._blocks: OrderedDict[BlockHash, _BlockState] = OrderedDict()
        self._num_pending = 0
        self._events: list[KVCacheEvent] = []

    def expect_saves(self, view: RequestAdapter, hashes: Sequence[BlockHash]) -> None:
        """Record that a plan saves these consecutive blocks of a request."""
        first = view.block_hashes.index(hashes[0])
        for index, name in enumerate(hashes, first):
            if name not in self._blocks:
                self._blocks[name] = _BlockState(self._stored(view.request, index))
            self._blocks[name].num_pending += self._num_ranks
            self._blocks.move_to_end(name)
        self._num_pending += len(hashes) * self._num_ranks
        self._last_report_at = self._clock.monotonic()
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        while len(self._blocks) > self.max_blocks and not next(iter(self._blocks.values())).num_pending:
            self._blocks.popitem(last=False)

    def _stored(self, request: Any, index: int) -> BlockStored:
        """The event that vLLM's block pool would publish for this block in its own cache."""
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
            medium=None,
            lora_name=lora.name if lora is not None else None,
            extra_keys=to_event_extra_keys([extra_keys]),
            group_idx=0,
            session_id=request.session_id,
        )

    def record(self, events: StoreEvents) -> None:
        """Record one rank's events. A block is on a medium when all ranks have it there, and removed when one no longer
        has it."""
        if events:
            self._last_report_at = self._clock.monotonic()
        for name in (*events.stored, *events.dropped):
            if name in self._blocks and self._blocks[name].num_pending:  # otherwise it was dropped
                self._blocks[name].num_pending -= 1
                self._num_pending -= 1
        for changes in events.changes:
            for name in changes.stored:
                self._on_stored(name, changes.medium)
            for name in changes.removed:
                self._on_removed(name, changes.medium)

    def _on_stored(self, name: BlockHash, medium: str) -> None:
        block = self._blocks.get(name)
        if block is None:
            return
        block.ranks[medium] = min(block.ranks[medium] + 1, self._num_ranks)
        if block.ranks[medium] == self._num_ranks and medium not in block.published:
            block.published.add(medium)
            self._events.append(msgspec.structs.replace(block.event, medium=medium))

    def _on_removed(self, name: BlockHash, medium: str) -> None:
        block = self._blocks.get(name)
        if block is None:
            return
        block.ranks[medium] = max(block.ranks[medium] - 1, 0)
        if medium in block.published:
            block.published.remove(medium)
            hashes = block.event.block_hashes
            self._events.append(BlockRemoved(block_hashes=hashes, medium=medium, group_idx=0))

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, for vLLM's publisher."""
        events, self._events = self._events, []
        return events

    def has_work(self) -> bool:
        """True if there are events, or blocks are pending. Then vLLM must step although no request is left."""
        if self._num_pending and self._clock.monotonic() - self._last_report_at > self.report_timeout_s:
            self._stop_waiting()
        return bool(self._num_pending or self._events)

    def _stop_waiting(self) -> None:
        logger.warning("%d blocks that were to be written to a store are no longer reported", self._num_pending)
        self._num_pending = 0
        for block in self._blocks.values():
            block.num_pending = 0
        self._forget_oldest()

    def check(self) -> None:
        """Raise `LeakError` if blocks are still pending."""
        if self._num_pending:
            raise LeakError(f"{self._num_pending} blocks are still on their way to the store")
