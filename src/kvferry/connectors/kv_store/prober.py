"""Looks up blocks in the store for the scheduler side, which must not wait for a store.

Owns the scheduler side's stores of all ranks, their event loop, and the lookups and results by request. The loop starts
with the first lookup.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvferry.connectors.api import Wake
from kvferry.connectors.kv_store.keys import KeyLookup, KeyResult, StoredKeys
from kvferry.connectors.kv_store.markers import BadMarker, Marker, Markers, heartbeat_name
from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import KvferryError, StoreError, TransferTimeout
from kvferry.core.messages.kept import TierShare
from kvferry.core.runtime.tasks import BackgroundTasks
from kvferry.store.block_run import BlockRun, joined, part_of
from kvferry.store.machine import MACHINE, Machine
from kvferry.store.tiered.tier_copies import BATCH_BLOCKS
from kvferry.store.tiered.tiers import TieredStore
from kvferry.transport.transfer_loop import TransferLoop

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreLookup:
    """A lookup of the number of blocks, from the first one on, that are stored. `transfer_id`: wait for its marker
    first, until `deadline`, in seconds of the monotonic clock. `keys`: then wait for these keys.

    `producer`: name of the prefill instance if its prefill has ended, so that it sends heartbeats until its marker is
    written; empty: it may still compute. `stores`: indices of the shared tiers that the producer has too; None: not
    known.
    """

    hashes: Sequence[BlockHash]
    transfer_id: str | None = None
    deadline: float = 0.0
    producer: str = ""
    stores: Sequence[int] | None = None
    keys: KeyLookup | None = None


@dataclass
class StoreResult:
    """`runs`: the stored blocks, by tier; updated when blocks are prefetched. `marker`: the marker of the hand-off;
    `keys`: the result for the request's load keys.

    `error`: the reason why the lookup, or the wait for the marker, failed. `checked_at`: time of the lookup, in seconds
    of the monotonic clock. `is_forgotten`: True if the result is no longer needed, or a load reads the blocks.
    """

    runs: tuple[BlockRun, ...] = ()
    marker: Marker | None = None
    keys: KeyResult | None = None
    error: KvferryError | None = None
    checked_at: float = 0.0
    is_forgotten: bool = False

    @property
    def num_present(self) -> int:
        """Number of blocks, from the first one on, that are stored."""
        return sum(run.num_blocks for run in self.runs)


class Prober:
    """Its methods are called on the engine's thread; it calls the stores on its own thread. `make_stores`: makes one
    store for each rank, in rank order."""

    heartbeat_poll_s = 0.05
    """Seconds between two readings of a producer's heartbeat."""
    heartbeat_timeout_s = 0.4
    """Maximum seconds to wait for a producer without heartbeats, unless the machine's `min_deadline_s` is longer."""
    close_s = 10.0
    marker_poll_each_s = 0.00025
    marker_poll_s = 0.002

    def __init__(
        self,
        make_stores: Callable[[], Sequence[TieredStore]],
        markers: Markers,
        keys: StoredKeys,
        *,
        prefetches: bool = True,
        probe_s: float = 15.0,
        clock: Clock = SYSTEM_CLOCK,
        machine: Machine = MACHINE,
    ) -> None:
        """`probe_s`: maximum seconds for a lookup, in addition to the wait for a marker. The stores of one rank are
        called one after the other, each with its own deadline."""
        self._clock, self._machine, self._probe_s = clock, machine, probe_s
        self.wake: Wake = lambda: None
        """Called, on any thread, when there is a result."""
        self._make_stores, self._markers, self._keys = make_stores, markers, keys
        self._prefetches = prefetches
        self._stores: Sequence[TieredStore] = ()
        self._lookups: dict[str, Future[StoreResult]] = {}
        self._num_waiting = 0
        """Number of lookups that wait for a marker, on the loop."""
        self._prefetch_tasks = BackgroundTasks()
        self._loop: TransferLoop | None = None

    def start_lookup(self, request_id: str, lookup: StoreLookup) -> None:
        """Start a lookup in the background; `result` returns its result. Does nothing if the request has a lookup
        already: the result may arrive at any moment, also between a call of `result` and this one."""
        if request_id in self._lookups:
            return
        future = self._lookups[request_id] = self._ensure_started().submit(self._run_lookup(lookup))
        future.add_done_callback(lambda _: self.wake())

    def shares(self, hashes: Sequence[BlockHash], *, pin: bool | None) -> Future[list[TierShare]]:
        """The share of these blocks that each tier has on every rank. `pin` True: pin the blocks; False: unpin them.
        Raises `StoreError`."""
        return self._ensure_started().submit(self._find_shares(hashes, pin))

    def start(self) -> None:
        """Open the stores, before the first lookup."""
        self._ensure_started()

    def _ensure_started(self) -> TransferLoop:
        if self._loop is None:
            self._stores = self._make_stores()
            self._loop = self._machine.transfer_loop("kvferry-store-probe")
            self._loop.start()
            self._loop.submit(self._open())
        return self._loop

    def result(self, request_id: str) -> StoreResult | None:
        """The result; None: there is none yet. It is kept until `forget`."""
        future = self._lookups.get(request_id)
        return future.result() if future is not None and future.done() else None

    def forget(self, request_id: str) -> None:
        """Drop a request's lookup and result: the request has ended, or looks up again."""
        future = self._lookups.pop(request_id, None)
        if future is not None and not future.cancel():
            future.result().is_forgotten = True

    def num_lookups(self) -> int:
        """Number of lookups, with or without a result; for leak checks."""
        return len(self._lookups)

    def close(self) -> None:
        """End the thread and all lookups."""
        if self._loop is not None:
            loop, self._loop = self._loop, None
            try:
                loop.run(self._close_stores(), self.close_s)
            except TimeoutError:
                logger.warning("a store could not be closed")
            finally:
                loop.close()

    # On the loop.

    async def _open(self) -> None:
        """Open the stores before the first lookup. The lookup waits for this no longer than for other lookups."""
        await asyncio.gather(*(store.open() for store in self._stores), return_exceptions=True)

    async def _close_stores(self) -> None:
        await self._prefetch_tasks.close()
        for store in self._stores:
            await store.close()

    async def _run_lookup(self, lookup: StoreLookup) -> StoreResult:
        deadlines = [lookup.deadline] if lookup.transfer_id is not None else []
        deadlines += [lookup.keys.deadline] if lookup.keys is not None else []
        left_s = max(0.0, *(deadline - self._clock.monotonic() for deadline in deadlines)) if deadlines else 0.0
        try:
            async with asyncio.timeout(left_s + self._probe_s):
                result = await self._look_up(lookup)
        except TimeoutError:
            result = StoreResult(error=TransferTimeout("the store did not report in time what it has"))
        except KvferryError as error:
            result = StoreResult(error=error)
        except Exception as error:  # any error becomes the result of the request's lookup
            logger.exception("looking up blocks in the store failed unexpectedly")
            result = StoreResult(error=StoreError(f"looking up blocks in the store failed: {error!r}"))
        result.checked_at = self._clock.monotonic()
        if self._prefetches and result.num_present:
            self._prefetch_tasks.start(self._prefetch(lookup.hashes[: result.num_present], result))
        return result

    async def _look_up(self, lookup: StoreLookup) -> StoreResult:
        """Look up the blocks. A block counts as stored if every rank has its share. Blocks are useful even without a
        marker."""
        marker, error = None, None
        self._num_waiting += 1
        try:
            marker = await self._wait_for_marker(lookup)
        except BadMarker:
            raise
        except (StoreError, TransferTimeout) as failure:
            error = failure
        finally:
            self._num_waiting -= 1
        keys = None if lookup.keys is None else await self._keys.wait(self._stores, lookup.keys)
        try:
            runs = await self._stores[0].runs(lookup.hashes)
        except KvferryError as failure:
            if keys is None:
                raise
            return StoreResult(keys=keys, error=failure)
        hashes = lookup.hashes[: sum(run.num_blocks for run in runs)]
        for store in self._stores[1:]:
            hashes = hashes[: await store.match(hashes)]
        return StoreResult(tuple(part_of(runs, 0, len(hashes))), marker, keys, error)

    async def _find_shares(self, hashes: Sequence[BlockHash], pin: bool | None) -> list[TierShare]:
        shares_by_rank: list[list[TierShare]] = []
        for store in self._stores:
            shares_by_rank.append(await store.shares(hashes, pin=pin))
        return [_combined_share(shares) for shares in zip(*shares_by_rank, strict=True)]

    async def _prefetch(self, hashes: Sequence[BlockHash], result: StoreResult) -> None:
        """Copy the blocks of a queued request to the first tier, in batches, until the result is forgotten, because a
        load, if there is one, then reads the other blocks itself. After each batch, the result gets the new tiers of
        the blocks: the decision to load depends on them, and the speed of the load counts for them."""
        if all(run.tier == 0 for run in result.runs) and len(self._stores) == 1:
            return
        for first in range(0, len(hashes), BATCH_BLOCKS):
            part = hashes[first : first + BATCH_BLOCKS]
            await asyncio.gather(*(_try_prefetch(store, part) for store in self._stores))
            try:
                prefetched = await self._stores[0].runs(part)
            except KvferryError as error:
                logger.debug("where its blocks are now is not known: %s", error)
                return
            is_complete = sum(run.num_blocks for run in prefetched) == len(part)
            remaining = part_of(result.runs, first + len(part), len(hashes)) if is_complete else []
            if result.is_forgotten:
                return
            result.runs = joined([*part_of(result.runs, 0, first), *prefetched, *remaining])
            if not remaining:
                return

    async def _wait_for_marker(self, lookup: StoreLookup) -> Marker | None:
        """Wait for the marker that the lookup names, if any. Raises `StoreError` if no store that could have it is
        reachable, and `TransferTimeout`."""
        transfer_id, stores = lookup.transfer_id, lookup.stores
        if transfer_id is None:
            return None
        last_note, last_beat = b"", self._clock.monotonic()
        last_poll = last_beat
        while True:
            if stores is not None and not all(store.answers(stores) for store in self._stores):
                raise StoreError("no store that the prefill instance has in common can be asked now")
            if (marker := await self._marker(transfer_id)) is not None:
                return marker
            now = self._clock.monotonic()
            if now >= lookup.deadline:
                raise TransferTimeout(f"hand-off {transfer_id!r}: its prefill did not reach the store in time")
            if lookup.producer and now - last_poll > self.heartbeat_poll_s:
                last_poll, note = now, await self._stores[0].read_note(heartbeat_name(lookup.producer)) or b""
                if note != last_note:
                    last_note, last_beat = note, now
                elif now - last_beat > max(self.heartbeat_timeout_s, self._machine.min_deadline_s):
                    raise TransferTimeout(
                        f"hand-off {transfer_id!r}: its prefill instance, {lookup.producer}, writes nothing to the"
                        " store; where that is always so, both name different ones"
                    )
            await asyncio.sleep(max(self.marker_poll_s, self._num_waiting * self.marker_poll_each_s))

    async def _marker(self, transfer_id: str) -> Marker | None:
        """Wait for the markers of all ranks, and return the first rank's. If the producer has another number of ranks,
        return the first marker at once."""
        first = await self._markers.read(self._stores[0], transfer_id, 0)
        if first is None or first.layout.tp_size != len(self._stores):
            return first
        for rank in range(1, len(self._stores)):
            if await self._markers.read(self._stores[rank], transfer_id, rank) is None:
                return None
        return first


def _combined_share(shares: Sequence[TierShare]) -> TierShare:
    """The share of blocks that a tier has on all ranks together."""
    return TierShare(
        shares[0].tier,
        min(share.num_present for share in shares),
        min(share.num_pinned for share in shares),
        all(share.is_healthy for share in shares),
        next((share.refusal for share in shares if share.refusal is not None), None),
    )


async def _try_prefetch(store: TieredStore, hashes: Sequence[BlockHash]) -> None:
    try:
        await store.prefetch(hashes)
    except KvferryError as error:
        logger.debug("not fetched ahead: %s", error)
