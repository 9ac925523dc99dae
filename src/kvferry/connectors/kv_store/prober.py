"""Asks the store for the scheduler side, which must not wait for one.

Owns the stores of all ranks as the scheduler side sees them, the event loop on which they are asked, and the questions
and answers by request. The loop starts with the first question.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvferry.connectors.api import Wake
from kvferry.connectors.kv_store.keys import KeyAnswer, KeyQuestion, StoredKeys
from kvferry.connectors.kv_store.markers import BadMarker, Marker, Markers, sign_of
from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import KvferryError, StoreError, TransferTimeout
from kvferry.core.messages.kept import TierShare
from kvferry.store.base import BlockRun, joined, part_of
from kvferry.store.machine import MACHINE, Machine
from kvferry.store.tier_copies import BATCH_BLOCKS
from kvferry.store.tiers import TieredStore
from kvferry.transport.transfer_loop import TransferLoop

log = logging.getLogger(__name__)

MARKER_POLL_S = 0.002
MARKER_POLL_EACH_S = 0.00025
CLOSE_S = 10.0
SIGN_POLL_S, SILENT_S = 0.05, 0.4
"""How often a producer's sign is read (s), and how long a producer that gives none is waited for (s)."""
PROBE_S = 15.0
"""Seconds to answer a question, beyond the wait for a marker: some stores, each within its own deadline."""


@dataclass(frozen=True)
class StoreQuestion:
    """How many of these blocks, from the first on, are there? `transfer_id`: wait for its marker first, until
    `deadline` (monotonic, s). `keys`: then wait for these.

    `producer`: whose prefill is over, and who therefore gives signs while its marker is on its way; empty: it may still
    compute. `stores`: the shared tiers that it has in common, by their numbers among these; None: not known.
    """

    hashes: Sequence[BlockHash]
    transfer_id: str | None = None
    deadline: float = 0.0
    producer: str = ""
    stores: Sequence[int] | None = None
    keys: KeyQuestion | None = None


@dataclass
class StoreAnswer:
    """`runs`: the blocks that are there, by tier, replaced when they are brought near; `marker` is the hand-off's,
    `keys` what became of the request's load keys.

    `error`: why the store, or the marker, is not known. `at`: when it was so; monotonic, s. `is_forgotten`: nobody
    wants it any more, or a load reads the blocks.
    """

    runs: tuple[BlockRun, ...] = ()
    marker: Marker | None = None
    keys: KeyAnswer | None = None
    error: KvferryError | None = None
    at: float = 0.0
    is_forgotten: bool = False

    @property
    def num_present(self) -> int:
        """Blocks that are there, from the first on."""
        return sum(run.num_blocks for run in self.runs)


class Prober:
    """Called on the engine's thread; the stores are asked on a thread of the prober's. `make_stores` makes one for each
    rank, in rank order."""

    def __init__(
        self,
        make_stores: Callable[[], Sequence[TieredStore]],
        markers: Markers,
        keys: StoredKeys,
        *,
        prefetches: bool = True,
        clock: Clock = SYSTEM_CLOCK,
        machine: Machine = MACHINE,
    ) -> None:
        self._clock, self._machine = clock, machine
        self.wake: Wake = lambda: None
        """Called, on any thread, when there is an answer."""
        self._make_stores, self._markers, self._keys = make_stores, markers, keys
        self._prefetches = prefetches
        self._stores: Sequence[TieredStore] = ()
        self._asked: dict[str, Future[StoreAnswer]] = {}
        self._num_waiting = 0
        """Questions that wait for a marker, on the loop."""
        self._ahead: set[asyncio.Task[None]] = set()
        self._loop: TransferLoop | None = None

    def ask(self, request_id: str, question: StoreQuestion) -> None:
        """Ask the store in the background; `answer` returns what it has found."""
        asked = self._asked[request_id] = self._started().submit(self._answer(question))
        asked.add_done_callback(lambda _: self.wake())

    def shares(self, hashes: Sequence[BlockHash], *, pin: bool | None) -> Future[list[TierShare]]:
        """What each tier has of these blocks on every rank; with `pin`, that is pinned, or unpinned if it is
        False. Raises `StoreError`."""
        return self._started().submit(self._find_shares(hashes, pin))

    def start(self) -> None:
        """Open the stores, before there is a question."""
        self._started()

    def _started(self) -> TransferLoop:
        if self._loop is None:
            self._stores = self._make_stores()
            self._loop = self._machine.transfer_loop("kvferry-store-probe")
            self._loop.start()
            self._loop.submit(self._open())
        return self._loop

    def is_asked(self, request_id: str) -> bool:
        """Whether a question of this request waits for its answer, or has it: the answer may come at any moment."""
        return request_id in self._asked

    def answer(self, request_id: str) -> StoreAnswer | None:
        """The answer, when there is one; it stays until forgotten."""
        asked = self._asked.get(request_id)
        return asked.result() if asked is not None and asked.done() else None

    def forget(self, request_id: str) -> None:
        """Forget a request's question and answer: the request is over, or asks again."""
        asked = self._asked.pop(request_id, None)
        if asked is not None and not asked.cancel():
            asked.result().is_forgotten = True

    def num_kept(self) -> int:
        """Number of questions and answers that are kept; for leak checks."""
        return len(self._asked)

    def close(self) -> None:
        """End the thread, with all questions."""
        if self._loop is not None:
            loop, self._loop = self._loop, None
            try:
                loop.run(self._close_stores(), CLOSE_S)
            except TimeoutError:
                log.warning("a store could not be closed")
            finally:
                loop.close()

    # On the loop.

    async def _open(self) -> None:
        """Open the stores ahead of the first question, which waits no longer for this than for any other answer."""
        await asyncio.gather(*(store.open() for store in self._stores), return_exceptions=True)

    async def _close_stores(self) -> None:
        for task in self._ahead:
            task.cancel()
        await asyncio.gather(*self._ahead, return_exceptions=True)
        for store in self._stores:
            await store.close()

    async def _answer(self, question: StoreQuestion) -> StoreAnswer:
        deadlines = [question.deadline] if question.transfer_id is not None else []
        deadlines += [question.keys.deadline] if question.keys is not None else []
        left_s = max(0.0, *(deadline - self._clock.monotonic() for deadline in deadlines)) if deadlines else 0.0
        try:
            async with asyncio.timeout(left_s + PROBE_S):
                answer = await self._look(question)
        except TimeoutError:
            answer = StoreAnswer(error=TransferTimeout("the store did not report in time what it has"))
        except KvferryError as error:
            answer = StoreAnswer(error=error)
        except Exception as error:  # the task's outermost edge: the error is the request's answer
            log.exception("looking up blocks in the store failed unexpectedly")
            answer = StoreAnswer(error=StoreError(f"looking up blocks in the store failed: {error!r}"))
        answer.at = self._clock.monotonic()
        if self._prefetches and answer.num_present:
            task = asyncio.create_task(self._bring_near(question.hashes[: answer.num_present], answer))
            self._ahead.add(task)
            task.add_done_callback(self._ahead.discard)
        return answer

    async def _look(self, question: StoreQuestion) -> StoreAnswer:
        """What is there: a block is when every rank has its share. Blocks are of use without a marker too."""
        marker, error = None, None
        self._num_waiting += 1
        try:
            marker = await self._wait_for_marker(question)
        except BadMarker:
            raise
        except (StoreError, TransferTimeout) as failure:
            error = failure
        finally:
            self._num_waiting -= 1
        keys = None if question.keys is None else await self._keys.wait(self._stores, question.keys)
        try:
            runs = await self._stores[0].runs(question.hashes)
        except KvferryError as failure:
            if keys is None:
                raise
            return StoreAnswer(keys=keys, error=failure)
        hashes = question.hashes[: sum(run.num_blocks for run in runs)]
        for store in self._stores[1:]:
            hashes = hashes[: await store.match(hashes)]
        return StoreAnswer(tuple(part_of(runs, 0, len(hashes))), marker, keys, error)

    async def _find_shares(self, hashes: Sequence[BlockHash], pin: bool | None) -> list[TierShare]:
        found: list[list[TierShare]] = []
        for store in self._stores:
            found.append(await store.shares(hashes, pin=pin))
        return [_least(of_ranks) for of_ranks in zip(*found, strict=True)]

    async def _bring_near(self, hashes: Sequence[BlockHash], answer: StoreAnswer) -> None:
        """While the request waits for its turn, copy its blocks to the first tier, some at a time, as long as the
        answer is not forgotten: then a load has begun, which reads what is left itself. After each time the answer
        says in which tiers the blocks are now: whether to load them is decided by that, and the speed of the load is
        credited to those."""
        if all(run.tier == 0 for run in answer.runs) and len(self._stores) == 1:
            return
        for first in range(0, len(hashes), BATCH_BLOCKS):
            part = hashes[first : first + BATCH_BLOCKS]
            await asyncio.gather(*(_quietly(store, part) for store in self._stores))
            try:
                near = await self._stores[0].runs(part)
            except KvferryError as error:
                log.debug("where its blocks are now is not known: %s", error)
                return
            is_whole = sum(run.num_blocks for run in near) == len(part)
            behind = part_of(answer.runs, first + len(part), len(hashes)) if is_whole else []
            if answer.is_forgotten:
                return
            answer.runs = joined([*part_of(answer.runs, 0, first), *near, *behind])
            if not behind:
                return

    async def _wait_for_marker(self, question: StoreQuestion) -> Marker | None:
        """Wait for the marker that the question names, if any. Raises `StoreError` if no store that could have it can
        be asked, and `TransferTimeout`."""
        transfer_id, stores = question.transfer_id, question.stores
        if transfer_id is None:
            return None
        sign, sign_at = b"", self._clock.monotonic()
        looked_at = sign_at
        while True:
            if stores is not None and not all(store.answers(stores) for store in self._stores):
                raise StoreError("no store that the prefill instance has in common can be asked now")
            if (marker := await self._marker(transfer_id)) is not None:
                return marker
            now = self._clock.monotonic()
            if now >= question.deadline:
                raise TransferTimeout(f"hand-off {transfer_id!r}: its prefill did not reach the store in time")
            if question.producer and now - looked_at > SIGN_POLL_S:
                looked_at, found = now, await self._stores[0].read_note(sign_of(question.producer)) or b""
                if found != sign:
                    sign, sign_at = found, now
                elif now - sign_at > SILENT_S:
                    raise TransferTimeout(
                        f"hand-off {transfer_id!r}: its prefill instance, {question.producer}, writes nothing to the"
                        " store; where that is always so, both name different ones"
                    )
            await asyncio.sleep(max(MARKER_POLL_S, self._num_waiting * MARKER_POLL_EACH_S))

    async def _marker(self, transfer_id: str) -> Marker | None:
        """The first rank's marker once all ranks have left theirs, or at once if the producer has another number of
        ranks."""
        first = await self._markers.read(self._stores[0], transfer_id, 0)
        if first is None or first.layout.tp_size != len(self._stores):
            return first
        for rank in range(1, len(self._stores)):
            if await self._markers.read(self._stores[rank], transfer_id, rank) is None:
                return None
        return first


def _least(shares: Sequence[TierShare]) -> TierShare:
    """What all ranks together have in one tier."""
    return TierShare(
        shares[0].tier,
        min(one.num_present for one in shares),
        min(one.num_pinned for one in shares),
        all(one.is_healthy for one in shares),
        next((one.refusal for one in shares if one.refusal is not None), None),
    )


async def _quietly(store: TieredStore, hashes: Sequence[BlockHash]) -> None:
    try:
        await store.prefetch(hashes)
    except KvferryError as error:
        log.debug("not fetched ahead: %s", error)
