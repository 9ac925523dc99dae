"""Several stores as one, the fastest first; or one store alone, with a deadline and a breaker.

A tier that fails, or does not answer by its deadline, counts as empty: the block is found in a lower tier, or computed.
`StoreError` is raised only if no tier is reachable. `tier` has the deadline and the breaker of one tier, `tier_copies`
the copies between tiers.

* Write policy "through": `put` returns when every reachable tier has the block. "back": it returns when the first tier
  has the block, and a task copies the block to the other tiers, in order. A block that is evicted before that does not
  get into the other tiers (`unflushed_blocks`).
* A block found in a lower tier is copied to those above it, in the background (`promoted_blocks`).
* Notes are in every tier that other instances share, so that each of these is enough to find them.
* `prefetch` copies blocks that will be read soon to the first tier (`prefetched_blocks`).
* If one tier's codec is lossy, the blocks of all tiers have names of their own: blocks read from that tier are copied
  upwards, and KV computed from them is stored in all tiers, so exact KV must never be found under the same names.
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
from kvferry.store.activity import CombinedActivity
from kvferry.store.base import Block, BlockRead, KVStore, PutResult, StoreOptions
from kvferry.store.block_run import BlockRun
from kvferry.store.machine import MACHINE, Machine
from kvferry.store.table import MAX_TIERS, StoreSpec, stored_layout
from kvferry.store.tiered.tier import TIER_TIMES, Tier, TierTimes
from kvferry.store.tiered.tier_copies import TierCopies

WritePolicy = Literal["through", "back"]
GAUGES = frozenset({"kept_bytes", "pinned_blocks", "moving_bytes", "dirty_blocks"}) | {
    f"tier{level}_{name}" for level in range(MAX_TIERS) for name in ("healthy", "kept_bytes", "pinned_blocks")
}
"""Names in `TieredStore.statistics` that are gauges; all others are counters."""


class TieredStore(KVStore):
    """The tiers of `specs`, the fastest first, as one store of `layout`.

    Its `statistics` are the sums over all tiers, and for each tier `tier<number>_<name>`. `put`, `get` and the others
    raise `StoreError` only if no tier is reachable.
    """

    def __init__(
        self,
        specs: Sequence[StoreSpec],
        layout: KVLayout,
        write: WritePolicy = "through",
        machine: Machine = MACHINE,
        times: TierTimes = TIER_TIMES,
    ) -> None:
        assert specs, "a store without tiers"
        super().__init__("", StoreOptions(), layout)
        self._specs = list(specs)
        store_layout = stored_layout(specs, layout)
        stores = [spec.make(store_layout, machine) for spec in specs]
        self.tiers = [
            Tier(f"{index} ({spec.url.scheme})", str(spec.url), store, spec.options.deadline_s, times)
            for index, (spec, store) in enumerate(zip(specs, stores, strict=True))
        ]
        self.activity = CombinedActivity([store.activity for store in stores])
        self._write, self._times = write, times
        self._copies = TierCopies(self.tiers, layout, self.activity.count)

    @property
    def has_layers(self) -> bool:
        """True if every tier can read single layers."""
        return all(tier.has_layers for tier in self.tiers)

    @property
    def is_shared(self) -> bool:
        """True if other instances find the blocks and notes of at least one tier."""
        return any(tier.is_shared for tier in self.tiers)

    async def open(self) -> None:
        """Open all tiers that can be opened now. May be called repeatedly.

        A server that does not answer yet is not an error: the tier is tried again later. Raises `ConfigError` for a
        tier that can never work (a directory that cannot be made, too little memory), because it would otherwise store
        nothing without an error.
        """
        for tier in self.tiers:
            if not tier.is_up:
                continue
            timeout_s = max(tier.deadline_s, self._times.open_s)
            try:
                async with asyncio.timeout(timeout_s):
                    await tier.open()
            except TimeoutError:
                tier.mark_failed(f"did not open within {timeout_s:g} s")
            except StoreError as error:
                tier.mark_failed(str(error))

    async def close(self) -> None:
        """Copy the remaining dirty blocks to the lower tiers, and close all tiers, each within `TierTimes.close_s`
        or its deadline."""
        close_s = self._times.close_s
        await self._copies.close(max(close_s, *(tier.deadline_s for tier in self.tiers)))
        for tier in self.tiers:
            with suppress(KvferryError, TimeoutError):
                async with asyncio.timeout(max(close_s, tier.deadline_s) if tier.is_up else close_s / 3):
                    await tier.close()

    # Blocks.

    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading blocks that are in any tier; each may be in a different one."""
        return sum(run.num_blocks for run in await self.runs(hashes))

    async def runs(self, hashes: Sequence[BlockHash]) -> list[BlockRun]:
        """Like `match`, by tier. Each tier in turn looks up the blocks after the last match, until no tier has the next
        block."""
        self._require_reachable()
        runs: list[BlockRun] = []
        count, before = 0, -1
        while before < count < len(hashes):
            before = count
            for level, tier in enumerate(self.tiers):
                num_present = await tier.match(hashes[count:]) if count < len(hashes) else 0
                if num_present:
                    runs.append(BlockRun(level, num_present))
                    count += num_present
            if len(self.tiers) == 1:
                break
        return runs

    async def get(self, reads: Sequence[BlockRead]) -> list[bool]:
        """Read each block from the first tier that has it, and promote the blocks of lower tiers."""
        self._require_reachable()
        hits = [False] * len(reads)
        for level, tier in enumerate(self.tiers):
            missing = [index for index, is_hit in enumerate(hits) if not is_hit]
            if not missing:
                break
            part = [reads[index] for index in missing]
            part_hits = await tier.get(part)
            for index, is_hit in zip(missing, part_hits, strict=True):
                hits[index] = is_hit
            if level:
                self._copies.promote([read for read, is_hit in zip(part, part_hits, strict=True) if is_hit], level)
        return hits

    async def get_layer(self, layer: int, reads: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        """Like `get` for one layer, without promotion."""
        self._require_reachable()
        hits = [False] * len(reads)
        for tier in self.tiers:
            missing = [index for index, is_hit in enumerate(hits) if not is_hit]
            if not missing:
                break
            part = [reads[index] for index in missing]
            part_hits = await tier.get_layer(layer, part)
            for index, is_hit in zip(missing, part_hits, strict=True):
                hits[index] = is_hit
        return hits

    async def put(self, blocks: Sequence[Block]) -> list[PutResult]:
        """Put into all tiers, or, with write policy "back", into the first that accepts them and later into the others.
        A block is `DROPPED` only if no tier has it."""
        self._require_reachable()
        if self._write == "back" and len(self.tiers) > 1:
            return await self._put_back(blocks)
        answers = await asyncio.gather(*(tier.put(blocks) for tier in self.tiers))
        return [_combined_outcome(outcomes) for outcomes in zip(*answers, strict=True)]

    async def pin(self, hashes: Sequence[BlockHash]) -> int:
        """Pin in every tier; returns the maximum number that one tier has pinned."""
        return await self._max_over_tiers(lambda store: store.pin(hashes))

    async def unpin(self, hashes: Sequence[BlockHash]) -> int:
        """Unpin in every tier; returns the maximum number that one tier has."""
        return await self._max_over_tiers(lambda store: store.unpin(hashes))

    async def delete(self, hashes: Sequence[BlockHash]) -> int:
        """Delete from every tier; returns the maximum number that one tier had."""
        return await self._max_over_tiers(lambda store: store.delete(hashes))

    async def shares(self, hashes: Sequence[BlockHash], *, pin: bool | None = None) -> list[TierShare]:
        """Number of leading blocks that each tier has. `pin` true: pin them there, as far as `pinned_share` allows;
        false: unpin all of them; None: change nothing."""
        self._require_reachable()
        shares = []
        for tier in self.tiers:
            num_present = await tier.match(hashes)
            num_pinned = await tier.ask(partial(tier.store.pin, hashes[:num_present]), 0) if pin else 0
            if pin is False:
                await tier.ask(partial(tier.store.unpin, hashes), 0)
            refusal = _pin_refusal(tier) if pin and tier.is_up and num_pinned < num_present else None
            shares.append(TierShare(tier.name, num_present, num_pinned, tier.is_up, refusal))
        return shares

    async def prefetch(self, hashes: Sequence[BlockHash]) -> None:
        """Copy to the first tier the blocks that only lower tiers have, as far as there is memory for copies."""
        if len(self.tiers) > 1:
            await self._copies.prefetch(hashes)

    async def finish(self, hashes: Sequence[BlockHash], num_output_tokens: int) -> None:
        """Report the end of a request to the tiers whose eviction policies learn from it."""
        for tier, spec in zip(self.tiers, self._specs, strict=True):
            if spec.uses_finishes:
                await tier.ask(partial(_finish, tier.store, hashes, num_output_tokens), False)

    # Notes.

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        """Write to all shared tiers. A tier gets the note once it has the blocks that were put before, since the note
        may refer to them. Raises `StoreError` if no tier accepted the note."""
        shared = self._shared()
        first = shared
        if self._write == "back":
            fastest = next((tier for tier in self.tiers if tier.is_up), None)
            first = [tier for tier in shared if tier is fastest]
        is_stored = await self._write_notes(first, name, content, ttl_s)
        if len(first) < len(shared):
            await self._copies.settle()
            is_stored |= await self._write_notes([tier for tier in shared if tier not in first], name, content, ttl_s)
        if not is_stored:
            raise StoreError("no tier of the store took a note: " + ", ".join(tier.name for tier in shared))

    async def _write_notes(self, tiers: Sequence[Tier], name: str, content: bytes, ttl_s: float) -> bool:
        return any(await asyncio.gather(*(tier.write_note(name, content, ttl_s) for tier in tiers)))

    async def read_note(self, name: str) -> bytes | None:
        """Read from the first shared tier that has it. Raises `StoreError` if none has it, and none was reachable."""
        has_answered = False
        for tier in self._shared():
            note = await tier.read_note(name)
            if note is not None:
                return note
            has_answered = has_answered or tier.is_up
        if not has_answered:
            raise _unreachable_error(self._shared())
        return None

    async def remove_note(self, name: str) -> None:
        """Remove from all shared tiers; where that fails, the note expires by itself."""
        for tier in self._shared():
            await tier.remove_note(name)

    def answers(self, shared: Collection[int]) -> bool:
        """True if at least one of these shared tiers is reachable. `shared`: their indices among the shared tiers."""
        return any(tier.is_up for number, tier in enumerate(self._shared()) if number in shared)

    def on_accepts_changed(self, call: Callable[[], None]) -> None:
        """Register a callback for changes of `takes`; it is called on the store's event loop."""
        for tier in self._shared():
            tier.on_accepts_changed = call

    def accepts_writes(self) -> list[int]:
        """Indices among the shared tiers: the tiers that accepted all blocks of the last put and the last note."""
        return [number for number, tier in enumerate(self._shared()) if tier.accepts_writes]

    # Insight.

    def statistics(self) -> dict[str, float]:
        """Sums over all tiers; `tier<number>_<name>` for each if there are several; `tier<number>_healthy` (0 or 1),
        `_failures` and `_late`; and what is being copied between tiers."""
        totals: dict[str, float] = dict(super().statistics())
        for level, tier in enumerate(self.tiers):
            tier_statistics = tier.store.statistics()
            for name, value in tier_statistics.items():
                totals[name] = totals.get(name, 0.0) + value
            if len(self.tiers) > 1:
                totals |= {f"tier{level}_{name}": value for name, value in tier_statistics.items()}
            totals |= {
                f"tier{level}_healthy": float(tier.is_up),
                f"tier{level}_failures": float(tier.breaker.num_failures),
                f"tier{level}_late": float(tier.num_late),
            }
        return totals | self._copies.statistics()

    async def _put_back(self, blocks: Sequence[Block]) -> list[PutResult]:
        """Put blocks into the first tier that accepts them. The other tiers get them later."""
        for tier in self.tiers[:-1]:
            outcomes = await tier.put(blocks)
            if tier.accepts_writes:
                break
        else:
            return await self.tiers[-1].put(blocks)
        stored = (block for block, outcome in zip(blocks, outcomes, strict=True) if outcome is PutResult.STORED)
        self._copies.flush_later(list(stored))
        return outcomes

    # All tiers.

    async def _max_over_tiers(self, call: Callable[[KVStore], Awaitable[int]]) -> int:
        self._require_reachable()
        answers = [await tier.ask(partial(call, tier.store), 0) for tier in self.tiers]
        return max(answers)

    def _require_reachable(self) -> None:
        if not any(tier.is_up for tier in self.tiers):
            raise _unreachable_error(self.tiers)

    def _shared(self) -> Sequence[Tier]:
        shared = [tier for tier in self.tiers if tier.is_shared]
        if not shared:
            raise StoreError("no tier of the store is shared with other instances")
        return shared


def _unreachable_error(tiers: Sequence[Tier]) -> StoreError:
    return StoreError("no tier of the store can be asked now: " + ", ".join(tier.name for tier in tiers))


def _pin_refusal(tier: Tier) -> str:
    """The message for a user if a tier did not pin all blocks that it has."""
    share = tier.store.options.pinned_share
    return (
        f"tier {tier.name} did not pin all of it: it pins at most {share:.0%} of its room (lmcache: of the places"
        " that a block may have); try again, unpin other documents, give it more room, or set pinned_share in its URL"
    )


def _combined_outcome(outcomes: Sequence[PutResult]) -> PutResult:
    """The outcome of one block in several tiers: `STORED` if it is new in any, `DROPPED` if it is in none."""
    for outcome in (PutResult.STORED, PutResult.PRESENT):
        if outcome in outcomes:
            return outcome
    return PutResult.DROPPED


async def _finish(store: KVStore, hashes: Sequence[BlockHash], num_output_tokens: int) -> bool:
    await store.finish(hashes, num_output_tokens)
    return True
