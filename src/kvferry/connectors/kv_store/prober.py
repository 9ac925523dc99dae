"""Looks into the store for the scheduler side, which must not wait for one.

Owns the stores of all ranks as the scheduler side sees them, the event loop on which they are asked, and the questions
and answers by request. The loop starts with the first question.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from kvferry.connectors.kv_store.markers import BadMarker, Marker, Markers
from kvferry.core.block_hash import BlockHash
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import KvferryError, StoreError, TransferTimeout
from kvferry.core.kept import TierShare
from kvferry.store.base import Run, joined, part_of
from kvferry.store.tier_copies import MOVE_BLOCKS
from kvferry.store.tiers import TieredStore
from kvferry.transport.transfer_loop import TransferLoop

log = logging.getLogger(__name__)

MARKER_POLL_S = 0.002
MARKER_POLL_EACH_S = 0.00025
CLOSE_S = 10.0
LOOK_S = 15.0
"""For a look, beyond the wait for a marker: some stores, each within its own deadline."""


@dataclass(frozen=True)
class StoreQuestion:
    """How many of these blocks, from the first on, are there? `transfer_id`: wait for its marker first.

    `deadline` is monotonic, s.
    """

    hashes: Sequence[BlockHash]
    transfer_id: str | None = None
    deadline: float = 0.0


@dataclass(frozen=True)
class StoreAnswer:
    """`runs`: the blocks that are there, by tier; `marker` is the hand-off's.

    `error`: the store, or the marker, did not answer; `ran_out`: it is the marker that did not come in time, though the
    store could be asked. `at`: when it was so; monotonic, s.
    """

    runs: tuple[Run, ...] = ()
    marker: Marker | None = None
    error: KvferryError | None = None
    ran_out: bool = False
    at: float = 0.0

    @property
    def num_present(self) -> int:
        """Blocks that are there, from the first on."""
        return sum(run.num_blocks for run in self.runs)


class Prober:
    """Used by the engine's thread; answers come from its own. `stores`: makes one a rank, in rank order."""

    def __init__(
        self,
        make_stores: Callable[[], Sequence[TieredStore]],
        markers: Markers,
        *,
        prefetches: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._make_stores, self._markers, self._prefetches = make_stores, markers, prefetches
        self._stores: Sequence[TieredStore] = ()
        self._lock = threading.Lock()
        self._questions: dict[str, Future[None]] = {}
        self._answers: dict[str, StoreAnswer] = {}
        self._ahead: set[asyncio.Task[None]] = set()
        self._trouble: StoreError | None = None
        self._loop: TransferLoop | None = None

    def ask(self, request_id: str, question: StoreQuestion) -> None:
        """Look, soon."""
        loop = self._started()
        with self._lock:
            self._questions[request_id] = loop.submit(self._answer(request_id, question))

    def shares(self, hashes: Sequence[BlockHash], *, pin: bool | None) -> Future[list[TierShare]]:
        """What each tier has of these blocks on every rank; with `pin`, that is pinned, or unpinned if it is
        False. Raises `StoreError`."""
        return self._started().submit(self._find_shares(hashes, pin))

    def _started(self) -> TransferLoop:
        if self._loop is None:
            self._stores = self._make_stores()
            self._loop = TransferLoop("kvferry-store-probe")
            self._loop.start()
        return self._loop

    def is_asked(self, request_id: str) -> bool:
        """Whether a question of this request waits for its answer, or has it: the answer may come at any moment."""
        with self._lock:
            return request_id in self._questions or request_id in self._answers

    def answer(self, request_id: str) -> StoreAnswer | None:
        """The answer, when there is one; it stays until forgotten."""
        with self._lock:
            return self._answers.get(request_id)

    def forget(self, request_id: str) -> None:
        """The request is over, or wants to ask anew."""
        with self._lock:
            question = self._questions.pop(request_id, None)
            self._answers.pop(request_id, None)
        if question is not None:
            question.cancel()

    def num_kept(self) -> int:
        """Questions and answers; for leak checks."""
        with self._lock:
            return len(self._questions) + len(self._answers)

    def close(self) -> None:
        """End the thread, and with it all that is asked."""
        if self._loop is not None:
            loop, self._loop = self._loop, None
            try:
                loop.submit(self._close_stores()).result(CLOSE_S)
            except TimeoutError:
                log.warning("a store could not be closed")
            finally:
                loop.close()

    # On the loop.

    async def _close_stores(self) -> None:
        for task in self._ahead:
            task.cancel()
        await asyncio.gather(*self._ahead, return_exceptions=True)
        for store in self._stores:
            await store.close()

    async def _answer(self, request_id: str, question: StoreQuestion) -> None:
        left_s = 0.0 if question.transfer_id is None else max(0.0, question.deadline - self._clock.monotonic())
        try:
            async with asyncio.timeout(left_s + LOOK_S):
                answer = await self._look(question)
        except TimeoutError:
            answer = StoreAnswer(error=TransferTimeout("the store did not report in time what it has"))
        except KvferryError as error:
            ran_out = isinstance(error, TransferTimeout) and self._trouble is None
            answer = StoreAnswer(error=error, ran_out=ran_out)
        except Exception as error:  # the task's outermost edge: the request must hear of it
            log.exception("looking up blocks in the store failed unexpectedly")
            answer = StoreAnswer(error=StoreError(f"looking up blocks in the store failed: {error!r}"))
        answer = replace(answer, at=self._clock.monotonic())
        with self._lock:
            is_wanted = self._questions.pop(request_id, None) is not None
            if is_wanted:
                self._answers[request_id] = answer
        if is_wanted and self._prefetches and answer.num_present:
            self._prefetch(request_id, question.hashes[: answer.num_present], answer)

    async def _look(self, question: StoreQuestion) -> StoreAnswer:
        """A block is there when every rank has its share."""
        for store in self._stores:
            await store.open()
        marker = await self._wait_for_marker(question)
        runs = await self._stores[0].runs(question.hashes)
        hashes = question.hashes[: sum(run.num_blocks for run in runs)]
        for store in self._stores[1:]:
            hashes = hashes[: await store.match(hashes)]
        return StoreAnswer(tuple(part_of(runs, 0, len(hashes))), marker)

    async def _find_shares(self, hashes: Sequence[BlockHash], pin: bool | None) -> list[TierShare]:
        found: list[list[TierShare]] = []
        for store in self._stores:
            await store.open()
            found.append(await store.shares(hashes, pin=pin))
        return [_least(of_ranks) for of_ranks in zip(*found, strict=True)]

    def _prefetch(self, request_id: str, hashes: Sequence[BlockHash], answer: StoreAnswer) -> None:
        """Begin to bring the blocks near, while the request still waits for its turn."""
        task = asyncio.create_task(self._bring_near(request_id, hashes, answer))
        self._ahead.add(task)
        task.add_done_callback(self._ahead.discard)

    async def _bring_near(self, request_id: str, hashes: Sequence[BlockHash], answer: StoreAnswer) -> None:
        """Some blocks at a time, as long as nobody took the answer: then a load has begun, which reads what is left
        itself. After each time the answer says in which tiers the blocks are now: whether to load them is decided by
        that, and the speed of the load is credited to those."""
        if all(run.tier == 0 for run in answer.runs) and len(self._stores) == 1:
            return
        for first in range(0, len(hashes), MOVE_BLOCKS):
            part = hashes[first : first + MOVE_BLOCKS]
            await asyncio.gather(*(_quietly(store, part) for store in self._stores))
            try:
                near = await self._stores[0].runs(part)
            except KvferryError as error:
                log.debug("not looked at again: %s", error)
                return
            is_whole = sum(run.num_blocks for run in near) == len(part)
            behind = part_of(answer.runs, first + len(part), len(hashes)) if is_whole else []
            newer = replace(answer, runs=joined([*part_of(answer.runs, 0, first), *near, *behind]))
            with self._lock:
                if self._answers.get(request_id) is not answer:
                    return
                self._answers[request_id] = answer = newer
            if not behind:
                return

    async def _wait_for_marker(self, question: StoreQuestion) -> Marker | None:
        transfer_id = question.transfer_id
        if transfer_id is None:
            return None
        while (marker := await self._marker(transfer_id)) is None:
            if self._clock.monotonic() >= question.deadline:
                why = f"; the store: {self._trouble}" if self._trouble is not None else ""
                raise TransferTimeout(f"hand-off {transfer_id!r}: its prefill did not reach the store in time{why}")
            await asyncio.sleep(max(MARKER_POLL_S, len(self._questions) * MARKER_POLL_EACH_S))
        return marker

    async def _marker(self, transfer_id: str) -> Marker | None:
        """The first rank's marker, once all have left theirs; at once, where the producer's ranks are not as many. A
        store that cannot be asked now may be asked in a while, with the marker in it."""
        try:
            marker = await self._read_markers(transfer_id)
        except BadMarker:
            raise
        except StoreError as error:
            self._trouble = error
            return None
        self._trouble = None
        return marker

    async def _read_markers(self, transfer_id: str) -> Marker | None:
        first = await self._markers.read(self._stores[0], transfer_id, 0)
        if first is None or first.layout.tp_size != len(self._stores):
            return first
        for rank in range(1, len(self._stores)):
            if await self._markers.read(self._stores[rank], transfer_id, rank) is None:
                return None
        return first


def _least(shares: Sequence[TierShare]) -> TierShare:
    """Of all ranks in one tier."""
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
