"""Several stores as one, the fastest first; or one store alone, with a deadline and a breaker.

A tier that fails or is late counts as empty: the block is found in a lower tier, or computed. Only if no tier at all
can be asked is there a `StoreError`. `tier` has the deadline and the breaker of one tier, `tier_copies` what is copied
between tiers.

* Write policy "through": `put` returns when every tier that can be asked has the block. "back": when the first one has
  it; a task copies it to the others, in order. A block that is evicted before that stays out of the others
  (`unflushed_blocks`).
* A block found in a lower tier is copied to those above it, in the background (`promoted_blocks`).
* Notes are in every tier that other instances share, so that each of these can do without the others.
* `prefetch` copies blocks that will be read soon to the first tier (`prefetched_blocks`).
* If one tier's codec is lossy, the blocks of all tiers have names of their own: what is read from that tier is copied
  upwards, and what is computed from it is stored in all tiers, so exact KV must never be found under the same names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import KvferryError, StoreError
from kvferry.core.messages.kept import TierShare
from kvferry.store.base import Block, BlockRun, Changes, KVStore, Put, Read, StoreOptions
from kvferry.store.machine import MACHINE, Machine
from kvferry.store.table import MAX_TIERS, StoreSpec, layout_kept_by
from kvferry.store.tier import Tier
from kvferry.store.tier_copies import TierCopies

WritePolicy = Literal["through", "back"]
OPEN_S, CLOSE_S = 5.0, 3.0
"""Least deadlines for opening and for closing a tier; one that is down has a third of it to close."""
GAUGES = frozenset({"kept_bytes", "pinned_blocks", "moving_bytes", "dirty_blocks"}) | {
    f"tier{level}_{name}" for level in range(MAX_TIERS) for name in ("healthy", "kept_bytes", "pinned_blocks")
}
"""Names in `TieredStore.statistics` that are gauges; all others are counters."""


class TieredStore(KVStore):
    """The tiers of `specs`, the fastest first, as one store of `layout`.

    Its `statistics` are the sums over all tiers, and for each tier `tier<number>_<name>`. `put`, `get` and the others
    raise `StoreError` only if no tier can be asked.
    """

    def __init__(
        self,
        specs: Sequence[StoreSpec],
        layout: KVLayout,
        write: WritePolicy = "through",
        machine: Machine = MACHINE,
    ) -> None:
        assert specs, "a store without tiers"
        super().__init__("", StoreOptions(), layout)
        self._specs = list(specs)
        kept = layout_kept_by(specs, layout)
        self.tiers = [
            Tier(f"{index} ({spec.url.scheme})", str(spec.url), spec.make(kept, machine), spec.options.deadline_s)
            for index, spec in enumerate(specs)
        ]
        self._write = write
        self._copies = TierCopies(self.tiers, layout, self.count)

    @property
    def has_layers(self) -> bool:  # type: ignore[override]
        """Whether every tier can read single layers."""
        return all(tier.store.has_layers for tier in self.tiers)

    async def open(self) -> None:
        """Open all tiers that can be opened now. May be called repeatedly.

        A server that does not answer yet is not an error: the tier is tried again later. Raises `ConfigError` for a
        tier that can never work (a directory that cannot be made, too little memory), rather than keep nothing in
        silence.
        """
        for tier in self.tiers:
            if not tier.is_up:
                continue
            limit_s = max(tier.deadline_s, OPEN_S)
            try:
                async with asyncio.timeout(limit_s):
                    await tier.open()
            except TimeoutError:
                tier.failed(f"did not open within {limit_s:g} s")
            except StoreError as error:
                tier.failed(str(error))

    async def close(self) -> None:
        """Copy what lower tiers have yet to get, and close all tiers, each within `CLOSE_S` or its deadline."""
        await self._copies.close(max(CLOSE_S, *(tier.deadline_s for tier in self.tiers)))
        for tier in self.tiers:
            with suppress(KvferryError, TimeoutError):
                async with asyncio.timeout(max(CLOSE_S, tier.deadline_s) if tier.is_up else CLOSE_S / 3):
                    await tier.close()

    # Blocks.

    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """How many blocks, from the first on, are in any tier; each may be in a different one."""
        return sum(run.num_blocks for run in await self.runs(hashes))

    async def runs(self, hashes: Sequence[BlockHash]) -> list[BlockRun]:
        """Like `match`, by tier. The tiers are asked in turn, each for the blocks behind what was found, until no tier
        has the next block."""
        self._require_any()
        found: list[BlockRun] = []
        count, before = 0, -1
        while before < count < len(hashes):
            before = count
            for level, tier in enumerate(self.tiers):
                more = await tier.match(hashes[count:]) if count < len(hashes) else 0
                if more:
                    found.append(BlockRun(level, more))
                    count += more
            if len(self.tiers) == 1:
                break
        return found

    async def get(self, reads: Sequence[Read]) -> list[bool]:
        """Read each block from the first tier that has it, and promote what lower tiers had."""
        self._require_any()
        found = [False] * len(reads)
        for level, tier in enumerate(self.tiers):
            wanted = [index for index, there in enumerate(found) if not there]
            if not wanted:
                break
            part = [reads[index] for index in wanted]
            got = await tier.get(part)
            for index, there in zip(wanted, got, strict=True):
                found[index] = there
            if level:
                self._copies.promote([read for read, there in zip(part, got, strict=True) if there], level)
        return found

    async def get_layer(self, layer: int, reads: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        """Like `get` for one layer, without promotion."""
        self._require_any()
        found = [False] * len(reads)
        for tier in self.tiers:
            wanted = [index for index, there in enumerate(found) if not there]
            if not wanted:
                break
            part = [reads[index] for index in wanted]
            got = await tier.get_layer(layer, part)
            for index, there in zip(wanted, got, strict=True):
                found[index] = there
        return found

    async def put(self, blocks: Sequence[Block]) -> list[Put]:
        """Put into all tiers, or, with write policy "back", into the first that takes them and later into the others.
        A block is `DROPPED` only if no tier has it."""
        self._require_any()
        if self._write == "back" and len(self.tiers) > 1:
            return await self._put_back(blocks)
        answers = await asyncio.gather(*(tier.put(blocks) for tier in self.tiers))
        return [_joined(outcomes) for outcomes in zip(*answers, strict=True)]

    async def pin(self, hashes: Sequence[BlockHash]) -> int:
        """Pin in every tier; returns the most that one tier has pinned."""
        return await self._most(lambda store: store.pin(hashes))

    async def unpin(self, hashes: Sequence[BlockHash]) -> int:
        """Unpin in every tier; returns the most that one tier has."""
        return await self._most(lambda store: store.unpin(hashes))

    async def delete(self, hashes: Sequence[BlockHash]) -> int:
        """Delete from every tier; returns the most that one tier had."""
        return await self._most(lambda store: store.delete(hashes))

    async def shares(self, hashes: Sequence[BlockHash], *, pin: bool | None = None) -> list[TierShare]:
        """How many of these blocks, from the first on, each tier has. `pin` true: pin them there, as far as
        `pinned_share` allows; false: unpin all of them; None: change nothing."""
        self._require_any()
        found = []
        for tier in self.tiers:
            num_present = await tier.match(hashes)
            num_pinned = await tier.ask(partial(tier.store.pin, hashes[:num_present]), 0) if pin else 0
            if pin is False:
                await tier.ask(partial(tier.store.unpin, hashes), 0)
            refusal = _refusal(tier) if pin and tier.is_up and num_pinned < num_present else None
            found.append(TierShare(tier.name, num_present, num_pinned, tier.is_up, refusal))
        return found

    async def prefetch(self, hashes: Sequence[BlockHash]) -> None:
        """Copy what only lower tiers have to the first one, as far as there is memory for copies."""
        if len(self.tiers) > 1:
            await self._copies.prefetch(hashes)

    async def finish(self, hashes: Sequence[BlockHash], num_output_tokens: int) -> None:
        """Tell the tiers whose eviction policy learns from it."""
        for tier, spec in zip(self.tiers, self._specs, strict=True):
            if spec.uses_finishes:
                await tier.ask(partial(_finish, tier.store, hashes, num_output_tokens), False)

    # Notes.

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        """Write to all shared tiers; to each once the blocks that were put before have reached it, since the note may
        refer to them. Raises `StoreError` if no tier took the note."""
        shared = self._shared()
        first = shared
        if self._write == "back":
            first = [tier for tier in shared if tier is next((one for one in self.tiers if one.is_up), None)]
        took = await self._write_notes(first, name, content, ttl_s)
        if len(first) < len(shared):
            await self._copies.settle()
            took |= await self._write_notes([tier for tier in shared if tier not in first], name, content, ttl_s)
        if not took:
            raise StoreError("no tier of the store took a note: " + ", ".join(tier.name for tier in shared))

    async def _write_notes(self, tiers: Sequence[Tier], name: str, content: bytes, ttl_s: float) -> bool:
        return any(await asyncio.gather(*(tier.write_note(name, content, ttl_s) for tier in tiers)))

    async def read_note(self, name: str) -> bytes | None:
        """Read from the first shared tier that has it. Raises `StoreError` if none has it, and none could be asked."""
        answered = False
        for tier in self._shared():
            found = await tier.ask(partial(tier.store.read_note, name), None)
            if found is not None:
                return found
            answered = answered or tier.is_up
        if not answered:
            raise _none_answers(self._shared())
        return None

    async def remove_note(self, name: str) -> None:
        """Remove from all shared tiers; where that fails, the note expires by itself."""
        for tier in self._shared():
            await tier.ask(lambda tier=tier: _and_true(tier.store.remove_note(name)), False)  # type: ignore[misc]

    def answers(self, shared: Collection[int]) -> bool:
        """Whether one of these shared tiers, by their numbers among these, can be asked."""
        return any(tier.is_up for number, tier in enumerate(self._shared()) if number in shared)

    def on_takes(self, call: Callable[[], None]) -> None:
        """Call this whenever `takes` has changed, on the store's loop."""
        for tier in self._shared():
            tier.on_takes = call

    def takes(self) -> list[int]:
        """The shared tiers, by their numbers among these, that took all that they were last given."""
        return [number for number, tier in enumerate(self._shared()) if tier.takes]

    # Insight.

    def watch(self) -> None:
        """Record changes in every tier."""
        for tier in self.tiers:
            tier.store.watch()

    def take_changes(self) -> list[Changes]:
        """The changes of every tier, separately."""
        return [changes for tier in self.tiers for changes in tier.store.take_changes()]

    def statistics(self) -> dict[str, float]:
        """Sums over all tiers; `tier<number>_<name>` for each if there are several; `tier<number>_healthy` (0 or 1),
        `_failures` and `_late`; and what is being copied between tiers."""
        whole: dict[str, float] = dict(super().statistics())
        for level, tier in enumerate(self.tiers):
            figures = tier.store.statistics()
            for name, value in figures.items():
                whole[name] = whole.get(name, 0.0) + value
            if len(self.tiers) > 1:
                whole |= {f"tier{level}_{name}": value for name, value in figures.items()}
            whole |= {
                f"tier{level}_healthy": float(tier.is_up),
                f"tier{level}_failures": float(tier.breaker.num_failures),
                f"tier{level}_late": float(tier.num_late),
            }
        return whole | self._copies.statistics()

    async def _put_back(self, blocks: Sequence[Block]) -> list[Put]:
        """Put into the first tier that takes them; the others get the blocks later."""
        for tier in self.tiers[:-1]:
            outcomes = await tier.put(blocks)
            if tier.takes:
                break
        else:
            return await self.tiers[-1].put(blocks)
        stored = (block for block, outcome in zip(blocks, outcomes, strict=True) if outcome is Put.STORED)
        self._copies.flush_later(list(stored))
        return outcomes

    # All tiers.

    async def _most(self, call: Callable[[KVStore], Awaitable[int]]) -> int:
        self._require_any()
        answers = [await tier.ask(partial(call, tier.store), 0) for tier in self.tiers]
        return max(answers)

    def _require_any(self) -> None:
        if not any(tier.is_up for tier in self.tiers):
            raise _none_answers(self.tiers)

    def _shared(self) -> Sequence[Tier]:
        shared = [tier for tier in self.tiers if tier.store.is_shared]
        if not shared:
            raise StoreError("no tier of the store is shared with other instances")
        return shared


def _none_answers(tiers: Sequence[Tier]) -> StoreError:
    return StoreError("no tier of the store can be asked now: " + ", ".join(tier.name for tier in tiers))


def _refusal(tier: Tier) -> str:
    """What a user reads if a tier did not pin all that it has."""
    share = tier.store.options.pinned_share
    return (
        f"tier {tier.name} did not pin all of it: it pins at most {share:.0%} of its room (lmcache: of the places"
        " that a block may have); try again, unpin other documents, give it more room, or set pinned_share in its URL"
    )


def _joined(outcomes: Sequence[Put]) -> Put:
    """The outcome of one block in several tiers: `STORED` if it is new in any, `DROPPED` if it is in none."""
    for outcome in (Put.STORED, Put.PRESENT):
        if outcome in outcomes:
            return outcome
    return Put.DROPPED


async def _finish(store: KVStore, hashes: Sequence[BlockHash], num_output_tokens: int) -> bool:
    await store.finish(hashes, num_output_tokens)
    return True


async def _and_true(call: Awaitable[object]) -> bool:
    await call
    return True
