"""Keys of requests (`core.messages.kv_keys`) in a store. A key is written once its blocks are stored; requests that
load by the key wait for it.

A key's record is only compared with the hashes of the request's own prompt (`store.key_records`), so a request always
loads blocks of its own prompt, by their hashes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvferry.connectors.kv_store.plan import StoreKeys
from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.clock import SYSTEM_CLOCK, Clock, doubling_waits
from kvferry.core.errors import KvferryError, StoreError
from kvferry.core.messages.kv_keys import shares
from kvferry.core.text import shortened
from kvferry.store.key_records import BadKeyRecord, KeyNotes, KeyRecord, explain_mismatch, make_record
from kvferry.store.tiered.tiers import TieredStore
from kvferry.transport.transfer_loop import run_together

logger = logging.getLogger(__name__)

MAX_CONCURRENT_NOTES = 16
"""Maximum number of notes of one request that are read or written at the same time."""
Item = TypeVar("Item")


@dataclass(frozen=True)
class KeyLookup:
    """A lookup of the load keys of a request. The other fields are compared with the records of the keys. `deadline`:
    end of the wait for missing keys, in seconds of the monotonic clock."""

    tenant: str
    keys: Sequence[str]
    hashes: Sequence[BlockHash]
    salt: str
    deadline: float


@dataclass
class KeyResult:
    """`num_valid`: number of keys that name blocks of the prompt. `refused`: number of the other keys, by reason;
    `examples`: one key for each reason."""

    num_valid: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def refuse(self, key: str, reason: str) -> None:
        """Record the reason why a key names no blocks of the prompt."""
        self.refused[reason] += 1
        self.examples.setdefault(reason, key)

    def summary(self) -> str:
        """A message about the keys that name no blocks of the prompt; empty if there are none."""
        parts = []
        for reason, count in self.refused.items():
            more = f" (and {count - 1} more)" if count > 1 else ""
            parts.append(f"key {_shortened(self.examples[reason])}{more} {reason}")
        return "; ".join(parts)


class StoredKeys:
    """Writes and reads the records of keys. Used on one event loop. `token`: the fleet's token."""

    def __init__(self, token: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._notes, self._clock = KeyNotes(token), clock
        self.counts: Counter[str] = Counter()
        """Number of `stored_keys`, and of `dropped_keys`, whose blocks or records the store did not accept."""

    # Writing.

    async def write(self, store: TieredStore, store_keys: StoreKeys) -> None:
        """Store keys whose blocks were put before. A key with a missing block is not stored, so that no request relies
        on it. Raises `StoreError`; some keys may then be missing."""
        num_present = await store.match(store_keys.hashes)
        spans = shares(len(store_keys.hashes), len(store_keys.keys))
        key_spans = [(key, *span) for key, span in zip(store_keys.keys, spans, strict=True) if key is not None]
        complete = [(key, first, last) for key, first, last in key_spans if last <= num_present or first == last]
        try:
            written = await _map_concurrently(partial(self._write, store, store_keys), complete)
        except KvferryError:
            self.counts["dropped_keys"] += len(key_spans)
            raise
        self.counts["stored_keys"] += sum(written)
        if len(complete) < len(key_spans):
            self.counts["dropped_keys"] += len(key_spans) - len(complete)
            logger.warning(
                "%d of %d keys are not stored: the store has %d of the prompt's %d blocks",
                len(key_spans) - len(complete),
                len(key_spans),
                num_present,
                len(store_keys.hashes),
            )

    async def _write(self, store: TieredStore, store_keys: StoreKeys, key_span: tuple[str, int, int]) -> bool:
        key, first, last = key_span
        layout, now_s = store.layout, self._clock.wall()
        hashes = store_keys.hashes[first:last]
        record, pages = make_record(
            layout, store_keys.salt, hashes, first, store_keys.num_tokens, now_s, store_keys.ttl_s
        )
        name_of = partial(self._notes.name, store_keys.tenant, key, layout.tp_rank)
        for page, names in enumerate(pages, 1):
            await store.write_note(name_of(page), self._notes.seal_page(name_of(page), record, names), store_keys.ttl_s)
        await store.write_note(name_of(0), self._notes.seal(name_of(0), record), store_keys.ttl_s)
        return True

    # Reading.

    async def wait(self, stores: Sequence[TieredStore], lookup: KeyLookup) -> KeyResult:
        """Look the keys up in the stores of all ranks, and wait for missing ones until the deadline. Does not wait for
        a store that is unreachable."""
        result, missing = KeyResult(), list(lookup.keys)
        try:
            while missing := await self._look_up(stores, lookup, result, missing):
                if not await self._wait_for(stores, lookup, missing[0]):
                    missing = await self._look_up(stores, lookup, result, missing)
                    break
        except StoreError as error:
            for key in missing:
                result.refuse(key, f"cannot be looked up: {error}")
            return result
        for key in missing:
            result.refuse(key, "is not in the store")
        return result

    async def _look_up(
        self, stores: Sequence[TieredStore], lookup: KeyLookup, result: KeyResult, keys: Sequence[str]
    ) -> list[str]:
        """Look up these keys and add them to the result. Returns the missing keys."""
        resolved = await _map_concurrently(partial(self._resolve_key, stores, lookup, result), keys)
        return [key for key, is_resolved in zip(keys, resolved, strict=True) if not is_resolved]

    async def _wait_for(self, stores: Sequence[TieredStore], lookup: KeyLookup, key: str) -> bool:
        """Wait until one of the missing keys is stored. Only one key is polled, which costs less than polling all.
        False: the deadline has passed."""
        pauses = doubling_waits(0.002, 0.1)
        while (left_s := lookup.deadline - self._clock.monotonic()) > 0:
            await asyncio.sleep(min(next(pauses), left_s))
            if all([await self._exists(store, lookup.tenant, key) for store in stores]):
                return True
        return False

    async def _exists(self, store: TieredStore, tenant: str, key: str) -> bool:
        return await store.read_note(self._notes.name(tenant, key, store.layout.tp_rank)) is not None

    async def _resolve_key(self, stores: Sequence[TieredStore], lookup: KeyLookup, result: KeyResult, key: str) -> bool:
        """Compare a key's record with the prompt. False: the key is missing."""
        try:
            record = await self._read(stores[0], lookup.tenant, key)
            if record is None:
                return False
            mismatch = explain_mismatch(record, lookup.hashes, lookup.salt, stores[0].layout)
            if mismatch is None:
                for store in stores[1:]:
                    if await self._read(store, lookup.tenant, key) is None:
                        return False
        except BadKeyRecord as error:
            mismatch = f"is not used: {error}"
        if mismatch is None:
            result.num_valid += 1
        else:
            result.refuse(key, mismatch)
        return True

    async def _read(self, store: TieredStore, tenant: str, key: str) -> KeyRecord | None:
        name = self._notes.name(tenant, key, store.layout.tp_rank)
        note = await store.read_note(name)
        return None if note is None else self._notes.open(name, note, self._clock.wall())


async def _map_concurrently(call: Callable[[Item], Awaitable[bool]], items: Sequence[Item]) -> list[bool]:
    """Call the function for each item, `MAX_CONCURRENT_NOTES` at a time. Returns the results in order. Raises the first
    error."""
    results: list[bool] = []
    for start in range(0, len(items), MAX_CONCURRENT_NOTES):
        results += await run_together(
            *(_as_coroutine(call, item) for item in items[start : start + MAX_CONCURRENT_NOTES])
        )
    return results


async def _as_coroutine(call: Callable[[Item], Awaitable[bool]], item: Item) -> bool:
    return await call(item)


def _shortened(key: str) -> str:
    return shortened(repr(key), 48)
