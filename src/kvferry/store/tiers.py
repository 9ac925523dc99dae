"""Several stores as one, the fastest first; or one alone, with a deadline and its health watched.

Owns its tiers, what is on its way between them, and what is known of their health. A tier that fails or is slow is one
that has nothing: the block is found further down, or computed again. Only where no tier at all can be asked is there a
`StoreError`.

* `write` "through": a block is kept once every tier that can be asked has it. "back": once the first has it; a task of
  this process takes it from there to the others, in order; one evicted before that is lost (`unflushed_blocks`).
* A block found in a lower tier is copied to those above it, behind the caller's back (`promoted_blocks`).
* `prefetch` does the same for blocks that will be read soon.
* Where one tier's codec is lossy, blocks of all tiers have names of their own: what was read from it moves up, and what
  is computed on it is kept everywhere, so none of it may be taken for exact KV by those who named no such codec.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

from kvferry.core.block_hash import BlockHash
from kvferry.core.errors import KvferryError, StoreError
from kvferry.core.kept import TierShare
from kvferry.core.layout import KVLayout
from kvferry.store.base import Block, Changes, KVStore, Put, Read, Run, StoreOptions
from kvferry.store.health import TierHealth
from kvferry.store.table import MAX_TIERS, StoreSpec, layout_kept_by

log = logging.getLogger(__name__)

WritePolicy = Literal["through", "back"]
MOVING_BYTES = 256 * 2**20
"""Bytes of blocks in copies on their way between tiers, at most; beyond it nothing is promoted or prefetched."""
MAX_DIRTY = 65536
MOVE_BLOCKS = 16
SETTLE_S = 30.0
"""The longest that a note waits for blocks that were kept before it and are not in the lower tiers yet."""
Result = TypeVar("Result")
GAUGES = frozenset({"kept_bytes", "pinned_blocks", "moving_bytes", "dirty_blocks"}) | {
    f"tier{level}_{name}" for level in range(MAX_TIERS) for name in ("healthy", "kept_bytes", "pinned_blocks")
}
"""Names of the figures that go up and down."""


@dataclass
class Tier:
    """One of the stores."""

    name: str
    store: KVStore
    deadline_s: float
    health: TierHealth = field(default_factory=TierHealth)
    opening: asyncio.Task[None] | None = None
    """The one attempt under way, which all wait for and which goes on when they give up; or the last one."""
    is_open: bool = False
    num_late: int = 0

    async def open(self) -> None:
        """Once, whoever comes first. One that hangs is not begun a second time beside the first."""
        if self.is_open:
            return
        if self.opening is None or self.opening.done():
            self.opening = asyncio.create_task(self._open())
            self.opening.add_done_callback(_look_at)
        await asyncio.shield(self.opening)

    async def _open(self) -> None:
        await self.store.open()
        self.is_open = True

    async def close(self) -> None:
        """Give up opening, and close the store."""
        if self.opening is not None and not self.opening.done():
            self.opening.cancel()
            await asyncio.wait({self.opening}, timeout=self.deadline_s / 2)
        await self.store.close()

    async def ask(self, call: Callable[[], Awaitable[Result]], otherwise: Result) -> Result:
        """The answer, or `otherwise` when there is none in time."""
        if not self.health.may_be_asked:
            return otherwise
        late = _Late(self)
        try:
            async with asyncio.timeout(self.deadline_s):
                await self.open()
                result = await call()
        except TimeoutError:
            late.is_now()
            return otherwise
        except KvferryError as error:
            self.failed(str(error))
            return otherwise
        except Exception as error:
            log.exception("store tier %s failed unexpectedly", self.name)
            self.failed(repr(error))
            return otherwise
        finally:
            late.cancel()
        if not self.health.is_good:
            log.info("store tier %s is back", self.name)
        self.health.answered()
        return result

    def failed(self, reason: str) -> None:
        """It is left alone for a while."""
        if self.health.is_good:
            log.warning("store tier %s is left alone for a while: %s", self.name, reason)
        self.health.failed()


def _look_at(task: asyncio.Task[None]) -> None:
    """So that nobody logs its error as forgotten: who still waited has it."""
    if not task.cancelled():
        task.exception()


class _Late:
    """Marks a tier when its deadline passes, though the call may still wait for a thread with the caller's memory."""

    def __init__(self, tier: Tier) -> None:
        self._tier, self._was = tier, False
        self._timer = asyncio.get_running_loop().call_later(tier.deadline_s, self.is_now)

    def is_now(self) -> None:
        """It is marked once."""
        if not self._was:
            self._was = True
            self._tier.num_late += 1
            self._tier.failed(f"did not answer within {self._tier.deadline_s:g} s")

    def cancel(self) -> None:
        """The call is over."""
        self._timer.cancel()


class TieredStore(KVStore):
    """See the module. `specs`: the fastest first."""

    def __init__(self, specs: Sequence[StoreSpec], layout: KVLayout, write: WritePolicy = "through") -> None:
        assert specs, "a store without tiers"
        super().__init__("", StoreOptions(), layout)
        self._specs = list(specs)
        kept = layout_kept_by(specs, layout)
        self.tiers = [
            Tier(f"{index} ({spec.url.scheme})", spec.make(kept), spec.options.deadline_s)
            for index, spec in enumerate(specs)
        ]
        self._write = write
        self._tasks: set[asyncio.Task[None]] = set()
        self._moving_bytes = 0
        self._moving: set[BlockHash] = set()
        self._dirty: asyncio.Queue[BlockHash] = asyncio.Queue(MAX_DIRTY)
        self._parents: dict[BlockHash, BlockHash | None] = {}
        self._flusher: asyncio.Task[None] | None = None

    @property
    def has_layers(self) -> bool:  # type: ignore[override]
        """When every tier can."""
        return all(tier.store.has_layers for tier in self.tiers)

    @property
    def notes_tier(self) -> Tier | None:
        """Where notes go: to the last tier, which most can see."""
        shared = [tier for tier in self.tiers if tier.store.is_shared]
        return shared[-1] if shared else None

    async def open(self) -> None:
        """Open all that can be opened now. Raises `ConfigError`: nobody wants an instance that quietly keeps nothing. A
        server that is not there yet is asked again later. May be called often: what was tried a moment ago is left
        alone, as by every call."""
        for tier in self.tiers:
            if not tier.health.may_be_asked:
                continue
            try:
                async with asyncio.timeout(tier.deadline_s):
                    await tier.open()
            except TimeoutError:
                tier.failed(f"did not open within {tier.deadline_s:g} s")
            except StoreError as error:
                tier.failed(str(error))

    async def close(self) -> None:
        """Flush what waits, within each tier's deadline, and close all tiers."""
        if self._flusher is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(tier.deadline_s for tier in self.tiers)):
                    await self._dirty.join()
            self._flusher.cancel()
            self._tasks.add(self._flusher)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for tier in self.tiers:
            with suppress(KvferryError, TimeoutError):
                async with asyncio.timeout(tier.deadline_s):
                    await tier.close()

    # Blocks.

    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """Each block may be in another tier."""
        return sum(run.num_blocks for run in await self.runs(hashes))

    async def runs(self, hashes: Sequence[BlockHash]) -> list[Run]:
        """As `match`, by tier; a tier is asked again where the others went on."""
        self._require_any()
        found: list[Run] = []
        count, before = 0, -1
        while before < count < len(hashes):
            before = count
            for level, tier in enumerate(self.tiers):
                more = await tier.ask(partial(tier.store.match, hashes[count:]), 0) if count < len(hashes) else 0
                if more:
                    found.append(Run(level, more))
                    count += more
            if len(self.tiers) == 1:
                break
        return found

    async def get(self, reads: Sequence[Read]) -> list[bool]:
        """From the first tier that has it."""
        self._require_any()
        found = [False] * len(reads)
        for level, tier in enumerate(self.tiers):
            wanted = [index for index, there in enumerate(found) if not there]
            if not wanted:
                break
            part = [reads[index] for index in wanted]
            got = await tier.ask(partial(tier.store.get, part), [False] * len(part))
            for index, there in zip(wanted, got, strict=True):
                found[index] = there
            if level:
                self._promote([read for read, there in zip(part, got, strict=True) if there], level)
        return found

    async def get_layer(self, layer: int, reads: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        """As `get`, without promotion."""
        self._require_any()
        found = [False] * len(reads)
        for tier in self.tiers:
            wanted = [index for index, there in enumerate(found) if not there]
            if not wanted:
                break
            part = [reads[index] for index in wanted]
            got = await tier.ask(partial(tier.store.get_layer, layer, part), [False] * len(part))
            for index, there in zip(wanted, got, strict=True):
                found[index] = there
        return found

    async def put(self, blocks: Sequence[Block]) -> list[Put]:
        """To all tiers, or to the first that can be asked and later to the others."""
        self._require_any()
        if self._write == "back" and len(self.tiers) > 1:
            return await self._put_back(blocks)
        none = [Put.DROPPED] * len(blocks)
        answers = await asyncio.gather(*(tier.ask(partial(tier.store.put, blocks), none) for tier in self.tiers))
        return [_joined(outcomes) for outcomes in zip(*answers, strict=True)]

    async def pin(self, hashes: Sequence[BlockHash]) -> int:
        """In every tier that has them."""
        return await self._most(lambda store: store.pin(hashes))

    async def unpin(self, hashes: Sequence[BlockHash]) -> int:
        """In every tier that has them."""
        return await self._most(lambda store: store.unpin(hashes))

    async def delete(self, hashes: Sequence[BlockHash]) -> int:
        """From every tier."""
        return await self._most(lambda store: store.delete(hashes))

    async def shares(self, hashes: Sequence[BlockHash], *, pin: bool | None = None) -> list[TierShare]:
        """What each tier has of these blocks; with `pin`, that is pinned there; if it is False, all that
        is there of them is unpinned."""
        self._require_any()
        found = []
        for tier in self.tiers:
            num_present = await tier.ask(partial(tier.store.match, hashes), 0)
            num_pinned = await tier.ask(partial(tier.store.pin, hashes[:num_present]), 0) if pin else 0
            if pin is False:
                await tier.ask(partial(tier.store.unpin, hashes), 0)
            found.append(TierShare(tier.name, num_present, num_pinned, tier.health.is_good))
        return found

    async def prefetch(self, hashes: Sequence[BlockHash]) -> None:
        """Bring what only lower tiers have to the first one, as far as there is room on the way."""
        if len(self.tiers) < 2:
            return
        first = self.tiers[0]
        for start in range(0, len(hashes), MOVE_BLOCKS):
            part = hashes[start : start + MOVE_BLOCKS]
            there = await first.ask(partial(first.store.match, part), len(part))
            missing = [name for name in part[there:] if name not in self._moving]
            if not missing or not self._may_move(len(missing)):
                continue
            with self._move(missing):
                await self._bring(missing, 1, 0)

    async def finish(self, hashes: Sequence[BlockHash], num_output_tokens: int) -> None:
        """To all tiers whose policies learn from it."""
        for tier, spec in zip(self.tiers, self._specs, strict=True):
            if spec.hears_finishes:
                await tier.ask(partial(_finish, tier.store, hashes, num_output_tokens), False)

    # Notes.

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        """Raises `StoreError` when it was not left."""
        tier = self._require_notes()
        await self._settle()
        if not await tier.ask(lambda: _and_true(tier.store.write_note(name, content, ttl_s)), False):
            raise StoreError(f"store tier {tier.name} took no note")

    async def read_note(self, name: str) -> bytes | None:
        """Raises `StoreError` when it cannot be asked."""
        tier = self._require_notes()
        if not tier.health.may_be_asked:
            raise StoreError(f"store tier {tier.name} cannot be asked now")
        return await tier.ask(partial(tier.store.read_note, name), None)

    async def remove_note(self, name: str) -> None:
        """As well as it goes: its time removes it otherwise."""
        tier = self._require_notes()
        await tier.ask(lambda: _and_true(tier.store.remove_note(name)), False)

    # Insight.

    def watch(self) -> None:
        """All tiers."""
        for tier in self.tiers:
            tier.store.watch()

    def take_changes(self) -> list[Changes]:
        """Of every tier."""
        return [changes for tier in self.tiers for changes in tier.store.take_changes()]

    def statistics(self) -> dict[str, float]:
        """Of all tiers together, of each under `tier<number>_…`, and of what moves between them."""
        whole: dict[str, float] = dict(super().statistics())
        for level, tier in enumerate(self.tiers):
            figures = tier.store.statistics()
            for name, value in figures.items():
                whole[name] = whole.get(name, 0.0) + value
            if len(self.tiers) > 1:
                whole |= {f"tier{level}_{name}": value for name, value in figures.items()}
            whole |= {
                f"tier{level}_healthy": float(tier.health.is_good),
                f"tier{level}_failures": float(tier.health.num_failures),
                f"tier{level}_late": float(tier.num_late),
            }
        return whole | {"moving_bytes": float(self._moving_bytes), "dirty_blocks": float(len(self._parents))}

    # Between tiers.

    def _promote(self, reads: Sequence[Read], level: int) -> None:
        """Copy blocks that were just read to the tiers above; their memory is the caller's again when we return."""
        fresh = [read for read in reads if read.block_hash not in self._moving]
        if fresh and self._may_move(len(fresh)):
            copies = [Block(read.block_hash, [memoryview(bytes(view)) for view in read.into]) for read in fresh]
            self._start(self._raise(copies, level))

    async def _raise(self, blocks: Sequence[Block], level: int) -> None:
        with self._move([block.block_hash for block in blocks]):
            for tier in self.tiers[:level]:
                none = [Put.DROPPED] * len(blocks)
                outcomes = await tier.ask(partial(tier.store.put, blocks), none)
                self.count(promoted_blocks=outcomes.count(Put.STORED))

    async def _bring(self, hashes: Sequence[BlockHash], from_level: int, to_level: int) -> list[BlockHash]:
        """Copy blocks from tiers `from_level` and below to `to_level`; returns those that were found."""
        sizes = [self.layout.span_bytes(layer) for layer in range(self.layout.num_layers)]
        reads = [Read(name, [memoryview(bytearray(size)) for size in sizes]) for name in hashes]
        found: dict[BlockHash, Read] = {}
        for tier in self.tiers[from_level:]:
            rest = [read for read in reads if read.block_hash not in found]
            got = await tier.ask(partial(tier.store.get, rest), [False] * len(rest))
            found |= {read.block_hash: read for read, there in zip(rest, got, strict=True) if there}
        blocks = [Block(name, found[name].into) for name in hashes if name in found]
        if blocks:
            target, none = self.tiers[to_level], [Put.DROPPED] * len(blocks)
            outcomes = await target.ask(partial(target.store.put, blocks), none)
            self.count(prefetched_blocks=outcomes.count(Put.STORED))
        return list(found)

    async def _put_back(self, blocks: Sequence[Block]) -> list[Put]:
        none = [Put.DROPPED] * len(blocks)
        for tier in self.tiers[:-1]:
            outcomes = await tier.ask(partial(tier.store.put, blocks), none)
            if tier.health.is_good:
                break
        else:
            last = self.tiers[-1]
            return await last.ask(partial(last.store.put, blocks), none)
        for block, outcome in zip(blocks, outcomes, strict=True):
            if outcome is not Put.STORED:
                continue
            try:
                self._dirty.put_nowait(block.block_hash)
                self._parents[block.block_hash] = block.parent
            except asyncio.QueueFull:
                self.count(unflushed_blocks=1)
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush())
        return outcomes

    async def _flush(self) -> None:
        """Take blocks from the first tiers to those below, for ever."""
        sizes = [self.layout.span_bytes(layer) for layer in range(self.layout.num_layers)]
        scratch = [Read(b"", [memoryview(bytearray(size)) for size in sizes]) for _ in range(MOVE_BLOCKS)]
        while True:
            names = [await self._dirty.get()]
            while len(names) < MOVE_BLOCKS and not self._dirty.empty():
                names.append(self._dirty.get_nowait())
            try:
                await self._flush_batch([Read(name, read.into) for name, read in zip(names, scratch, strict=False)])
            except Exception:  # the task's outermost edge: what waits behind these is still taken down
                log.exception("taking blocks to lower tiers failed unexpectedly")
                self.count(unflushed_blocks=len(names))
            finally:
                for name in names:
                    self._parents.pop(name, None)
                    self._dirty.task_done()

    async def _settle(self) -> None:
        """What was kept before a note is in all tiers before it, as far as they can be asked: it may speak of it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._dirty.join()

    async def _flush_batch(self, reads: Sequence[Read]) -> None:
        got = [False] * len(reads)
        for tier in self.tiers[:-1]:  # the first may have been away when they came, or have evicted them
            rest = [read for read, there in zip(reads, got, strict=True) if not there]
            if rest:
                more = iter(await tier.ask(partial(tier.store.get, rest), [False] * len(rest)))
                got = [there or next(more) for there in got]
        blocks = [
            Block(read.block_hash, read.into, self._parents.get(read.block_hash))
            for read, there in zip(reads, got, strict=True)
            if there
        ]
        kept = [Put.DROPPED] * len(blocks)
        for tier in self.tiers[1:]:
            dropped = [Put.DROPPED] * len(blocks)
            answer = await tier.ask(partial(tier.store.put, blocks), dropped)
            kept = [_joined(pair) for pair in zip(kept, answer, strict=True)]
        num_kept = sum(outcome is not Put.DROPPED for outcome in kept)
        self.count(flushed_blocks=num_kept, unflushed_blocks=len(reads) - num_kept)

    def _may_move(self, num_blocks: int) -> bool:
        return self._moving_bytes + num_blocks * self.layout.block_bytes <= MOVING_BYTES

    def _move(self, hashes: Sequence[BlockHash]) -> _Moving:
        return _Moving(self, hashes)

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("copying blocks between tiers failed", exc_info=task.exception())

    # All of them.

    async def _most(self, call: Callable[[KVStore], Awaitable[int]]) -> int:
        self._require_any()
        answers = [await tier.ask(partial(call, tier.store), 0) for tier in self.tiers]
        return max(answers)

    def _require_any(self) -> None:
        if not any(tier.health.may_be_asked for tier in self.tiers):
            raise StoreError("no tier of the store can be asked now: " + ", ".join(tier.name for tier in self.tiers))

    def _require_notes(self) -> Tier:
        if self.notes_tier is None:
            raise StoreError("no tier of the store is shared with other instances")
        return self.notes_tier


class _Moving:
    """Blocks on their way, while it lasts."""

    def __init__(self, store: TieredStore, hashes: Sequence[BlockHash]) -> None:
        self._store, self._hashes = store, hashes
        self._num_bytes = len(hashes) * store.layout.block_bytes

    def __enter__(self) -> None:
        self._store._moving_bytes += self._num_bytes
        self._store._moving.update(self._hashes)

    def __exit__(self, *error: object) -> None:
        self._store._moving_bytes -= self._num_bytes
        self._store._moving.difference_update(self._hashes)


def _joined(outcomes: Sequence[Put]) -> Put:
    """Of several tiers: it is new somewhere, or there, or nowhere."""
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
