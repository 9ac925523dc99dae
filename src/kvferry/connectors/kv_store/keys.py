"""Keys of requests (`core.messages.kv_keys`) in a store: written once the blocks that they name are there, and waited
for by requests that name them.

What a record says is only compared with the hashes of the request's own prompt (`store.key_records`): whatever is
stored under a key, a request loads blocks of its own prompt, by their hashes.
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
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import KvferryError, StoreError
from kvferry.core.messages.kv_keys import shares
from kvferry.store.base import KVStore
from kvferry.store.key_records import BadKeyRecord, KeyNotes, KeyRecord, explain_mismatch, make_record
from kvferry.transport.transfer_loop import run_together

log = logging.getLogger(__name__)

AT_A_TIME = 16
"""Notes of one request that are read or written at the same time."""
FIRST_POLL_S, MAX_POLL_S = 0.002, 0.1
"""Pauses before missing keys are looked up again: each is twice as long as the one before (s)."""
MAX_SHOWN = 48
Item = TypeVar("Item")


@dataclass(frozen=True)
class KeyQuestion:
    """The load keys of a request, and what their records are compared with. `deadline`: monotonic, s, until when
    missing ones are waited for."""

    tenant: str
    keys: Sequence[str]
    hashes: Sequence[BlockHash]
    salt: str
    deadline: float


@dataclass
class KeyAnswer:
    """How many keys name blocks of the prompt; and which do not: for each reason, how many, and one of them."""

    num_right: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def refuse(self, key: str, why: str) -> None:
        """Note why a key names nothing."""
        self.refused[why] += 1
        self.examples.setdefault(why, key)

    def summary(self) -> str:
        """What is to be said of the keys that name nothing; empty: all do."""
        said = []
        for why, number in self.refused.items():
            more = f" (and {number - 1} more)" if number > 1 else ""
            said.append(f"key {_shown(self.examples[why])}{more} {why}")
        return "; ".join(said)


class StoredKeys:
    """Writes and reads the records of keys. Used on one event loop. `token`: the fleet's."""

    def __init__(self, token: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._notes, self._clock = KeyNotes(token), clock
        self.counts: Counter[str] = Counter()
        """`stored_keys`; `dropped_keys`: those whose blocks, or whose records, the store did not take."""

    # Writing.

    async def write(self, store: KVStore, keyed: StoreKeys) -> None:
        """Store keys whose blocks were put before. A key of which a block is missing is not stored, so that nobody
        expects it. Raises `StoreError`, after which some of them may be missing."""
        num_present = await store.match(keyed.hashes)
        spans = shares(len(keyed.hashes), len(keyed.keys))
        named = [(key, *span) for key, span in zip(keyed.keys, spans, strict=True) if key is not None]
        there = [(key, first, last) for key, first, last in named if last <= num_present or first == last]
        try:
            written = await _each(partial(self._write, store, keyed), there)
        except KvferryError:
            self.counts["dropped_keys"] += len(named)
            raise
        self.counts["stored_keys"] += sum(written)
        if len(there) < len(named):
            self.counts["dropped_keys"] += len(named) - len(there)
            log.warning(
                "%d of %d keys are not stored: the store has %d of the prompt's %d blocks",
                len(named) - len(there),
                len(named),
                num_present,
                len(keyed.hashes),
            )

    async def _write(self, store: KVStore, keyed: StoreKeys, named: tuple[str, int, int]) -> bool:
        key, first, last = named
        layout, now_s = store.layout, self._clock.wall()
        hashes = keyed.hashes[first:last]
        record, pages = make_record(layout, keyed.salt, hashes, first, keyed.num_tokens, now_s, keyed.ttl_s)
        name_of = partial(self._notes.name, keyed.tenant, key, layout.tp_rank)
        for page, names in enumerate(pages, 1):
            await store.write_note(name_of(page), self._notes.seal_page(name_of(page), record, names), keyed.ttl_s)
        await store.write_note(name_of(0), self._notes.seal(name_of(0), record), keyed.ttl_s)
        return True

    # Reading.

    async def wait(self, stores: Sequence[KVStore], question: KeyQuestion) -> KeyAnswer:
        """Look the keys up in the stores of all ranks, and wait for missing ones until the deadline. A store that
        cannot be asked is not waited for."""
        answer, missing = KeyAnswer(), list(question.keys)
        try:
            while missing := await self._look_up(stores, question, answer, missing):
                if not await self._wait_for(stores, question, missing[0]):
                    missing = await self._look_up(stores, question, answer, missing)
                    break
        except StoreError as error:
            for key in missing:
                answer.refuse(key, f"cannot be looked up: {error}")
            return answer
        for key in missing:
            answer.refuse(key, "is not in the store")
        return answer

    async def _look_up(
        self, stores: Sequence[KVStore], question: KeyQuestion, answer: KeyAnswer, keys: Sequence[str]
    ) -> list[str]:
        """Enter in the answer what these keys name; returns those that are missing."""
        settled = await _each(partial(self._look, stores, question, answer), keys)
        return [key for key, is_settled in zip(keys, settled, strict=True) if not is_settled]

    async def _wait_for(self, stores: Sequence[KVStore], question: KeyQuestion, key: str) -> bool:
        """Wait until one of several missing keys is there, so that many cost no more than one. False: at the
        deadline."""
        pause_s = FIRST_POLL_S
        while (left_s := question.deadline - self._clock.monotonic()) > 0:
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, MAX_POLL_S)
            if all([await self._is_there(store, question.tenant, key) for store in stores]):
                return True
        return False

    async def _is_there(self, store: KVStore, tenant: str, key: str) -> bool:
        return await store.read_note(self._notes.name(tenant, key, store.layout.tp_rank)) is not None

    async def _look(self, stores: Sequence[KVStore], question: KeyQuestion, answer: KeyAnswer, key: str) -> bool:
        """Whether it is known what the key names, or that it names nothing."""
        try:
            record = await self._read(stores[0], question.tenant, key)
            if record is None:
                return False
            why = explain_mismatch(record, question.hashes, question.salt, stores[0].layout)
            if why is None:
                for store in stores[1:]:
                    if await self._read(store, question.tenant, key) is None:
                        return False
        except BadKeyRecord as error:
            why = f"is not used: {error}"
        if why is None:
            answer.num_right += 1
        else:
            answer.refuse(key, why)
        return True

    async def _read(self, store: KVStore, tenant: str, key: str) -> KeyRecord | None:
        name = self._notes.name(tenant, key, store.layout.tp_rank)
        note = await store.read_note(name)
        return None if note is None else self._notes.open(name, note, self._clock.wall())


async def _each(call: Callable[[Item], Awaitable[bool]], items: Sequence[Item]) -> list[bool]:
    """Call for each item, `AT_A_TIME` at the same time; the results in order. The first error ends it."""
    found: list[bool] = []
    for at in range(0, len(items), AT_A_TIME):
        found += await run_together(*(_as_coroutine(call, item) for item in items[at : at + AT_A_TIME]))
    return found


async def _as_coroutine(call: Callable[[Item], Awaitable[bool]], item: Item) -> bool:
    return await call(item)


def _shown(key: str) -> str:
    shown = repr(key)
    return shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 1] + "…"
