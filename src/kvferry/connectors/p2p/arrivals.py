"""The consumer's half of the worker side: fetches hand-offs, and reports how each ended.

Owns the tasks of loads and of tickets that wait to be loaded, which live on the transfer loop, and what they report. A
rank fetches its own share from each of the producer's ranks that has some of it (`core.sharding`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from kvferry.connectors.api import Failed, Loaded, Prefilled, Released, TransferEvent, TransferReport
from kvferry.connectors.p2p.plan import HandOffMeta, Load, P2pPlan, decode_meta
from kvferry.core.errors import KvferryError, LeaseEnded, PeerLost, ProtocolError
from kvferry.core.hand_off import PrefillResult, Ticket, common_prefix
from kvferry.core.layout import KVLayout
from kvferry.core.sharding import orphans, sources
from kvferry.transport.lookup_buffer.base import LookupBuffer, Source, Taken, Want, ignore
from kvferry.transport.transfer_loop import call_contained, contained, first_error, translated

log = logging.getLogger(__name__)
RELEASE_S = 5.0


class Arrivals:
    """`begin` runs on the transfer loop, while `run` does; `take_report` on any thread.

    `timeout_s` bounds each load. `keep_lease_on_failure`: another instance may try the ticket after us.
    """

    def __init__(
        self, buffer: LookupBuffer, layout: KVLayout, timeout_s: float, *, keep_lease_on_failure: bool
    ) -> None:
        self._buffer, self._layout = buffer, layout
        self._timeout_s, self._keep = timeout_s, keep_lease_on_failure
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something new to report."""
        self.started = asyncio.Event()
        self._events: deque[TransferEvent] = deque()
        self._tasks: dict[str, asyncio.Task[TransferReport]] = {}
        self._waits: dict[str, list[asyncio.Task[None]]] = {}
        self._cancelled: set[str] = set()
        self._group: asyncio.TaskGroup | None = None
        self._failures: Counter[str] = Counter()

    async def run(self) -> None:
        """Keep the tasks until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            self.started.set()
            try:
                await asyncio.Event().wait()
            finally:
                self._group = None

    def take_report(self) -> TransferReport:
        """What happened since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def _report(self, *events: TransferEvent) -> None:
        self._events.extend(events)
        self.wake()

    # On the loop.

    def begin(self, plan: P2pPlan) -> None:
        """Do the consumer's part of a plan. What goes wrong with one request goes wrong with no other."""
        for request_id in plan.cancels:
            end, otherwise = partial(self._cancel, request_id), partial(self._not_cancelled, request_id)
            call_contained(end, f"the end of request {request_id}", otherwise)
        for request_id, ticket in plan.waits.items():
            self._change_lease(self._wait, request_id, ticket)
        for load in plan.loads.values():
            start, otherwise = partial(self._start, load), partial(self._failed, load.request_id)
            call_contained(start, f"a load of request {load.request_id}", otherwise)
        for request_id, ticket in plan.unwanted.items():
            self._change_lease(self._give_up, request_id, ticket)

    def _cancel(self, request_id: str) -> None:
        """Stop a load; its request is reported `Released` when nothing more is written, also if it has ended."""
        task = self._tasks.get(request_id)
        if task is None:
            self._report(Released(request_id))
        else:
            self._cancelled.add(request_id)
            task.cancel()

    def _not_cancelled(self, request_id: str, error: Exception) -> None:
        """The load ends by its deadline, then, and is reported `Released`."""
        if request_id in self._tasks:
            self._cancelled.add(request_id)
        else:
            self._report(Released(request_id))

    def _start(self, load: Load) -> None:
        """Begin to fetch; from now on that keeps the lease alive."""
        self._stop_waiting(load.request_id)
        task = self._create_task(self._load(load), f"load {load.request_id}")
        self._tasks[load.request_id] = task
        task.add_done_callback(partial(self._ended, load))

    def _failed(self, request_id: str, error: Exception) -> None:
        """Unless it has a task, whose end is reported as usual."""
        self._stop_waiting(request_id)
        if request_id not in self._tasks:
            self._report(Failed(request_id, translated(error)))

    def _create_task(self, job: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        assert self._group is not None, "begin is called while run runs"
        return self._group.create_task(job, name=name)

    # Leases.

    def _change_lease(self, act: Callable[[str, Ticket], None], request_id: str, ticket: Ticket) -> None:
        """Where that goes wrong the lease is kept alive no more, and ends by its time. Nothing is reported: no load has
        begun, and one that still comes says itself how it ended."""
        otherwise = partial(self._stop_waiting, request_id)
        call_contained(partial(act, request_id, ticket), f"the lease of request {request_id}", lambda _: otherwise())

    def _wait(self, request_id: str, ticket: Ticket) -> None:
        """Keep the lease alive until the ticket is loaded or given up."""
        self._waits[request_id] = self._each_rank(ticket, self._own_ranks(ticket), "keep", self._buffer.keep)

    def _give_up(self, request_id: str, ticket: Ticket) -> None:
        """Tell the producer that nobody will fetch this ticket."""
        self._stop_waiting(request_id)
        self._release(ticket, self._own_ranks(ticket))

    def _stop_waiting(self, request_id: str) -> None:
        for task in self._waits.pop(request_id, ()):
            task.cancel()

    def _release(self, ticket: Ticket, ranks: Iterable[int]) -> None:
        if self._group is not None:
            deadline = asyncio.get_running_loop().time() + RELEASE_S
            self._each_rank(ticket, ranks, "release", partial(self._buffer.release, deadline=deadline))

    def _each_rank(
        self, ticket: Ticket, ranks: Iterable[int], what: str, act: Callable[[str, Source], Coroutine[Any, Any, None]]
    ) -> list[asyncio.Task[None]]:
        """A task for each of the producer's ranks; what becomes of it is nobody's."""

        async def one(rank: int) -> None:
            try:
                await act(ticket.transfer_id, _source(ticket, rank))
            except (
                KvferryError
            ) as error:  # the load, when it comes, meets the same and says so; leases end by themselves
                log.info("could not %s hand-off %s: %s", what, ticket.transfer_id, error)

        name = f"{what} {ticket.transfer_id}"
        return [self._create_task(contained(partial(one, rank), name), name) for rank in ranks]

    def _own_ranks(self, ticket: Ticket) -> Sequence[int]:
        """The producer's ranks that are ours to speak to when nothing is known of its layout. Together, our ranks
        reach all of them."""
        ours, theirs = self._layout.tp_size, ticket.tp_size
        return sorted({self._layout.tp_rank * theirs // ours, *range(self._layout.tp_rank, theirs, ours)})

    # Loads.

    async def _load(self, load: Load) -> TransferReport:
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        ranks = self._own_ranks(load.ticket)
        try:
            ranks, unread = await self._sources(load.ticket, deadline)
            report = _judge(load, await self._fetch(load, ranks, deadline))
            self._release(load.ticket, unread)
            return report
        except Exception as unexpected:  # the edge between this load and all others
            error = translated(unexpected)
            log.warning("request %s: hand-off not loaded: %s", load.request_id, error, exc_info=error is not unexpected)
            self._failures[type(error).__name__] += 1
            if not self._keep and not isinstance(error, LeaseEnded | PeerLost):
                self._release(load.ticket, {*ranks, *self._own_ranks(load.ticket)})
            return [Failed(load.request_id, error)]

    def _ended(self, load: Load, task: asyncio.Task[TransferReport]) -> None:
        """The task is over, and with it every write; also when it was cancelled before it began."""
        del self._tasks[load.request_id]
        if load.request_id in self._cancelled:
            self._cancelled.discard(load.request_id)
            self._report(Released(load.request_id))
            self._release(load.ticket, self._own_ranks(load.ticket))
        elif not task.cancelled():
            report, otherwise = partial(self._report_end, task), partial(self._failed, load.request_id)
            call_contained(report, f"load {load.request_id}", otherwise)

    def _report_end(self, task: asyncio.Task[TransferReport]) -> None:
        self._report(*task.result())

    async def _sources(self, ticket: Ticket, deadline: float) -> tuple[Sequence[int], Sequence[int]]:
        """The producer's ranks that have a share of ours, and those that are read by nobody and ours to release."""
        ours = self._layout
        if ticket.tp_size == ours.tp_size:
            return (ours.tp_rank,), ()
        theirs = await self._buffer.layout_at(_source(ticket, self._own_ranks(ticket)[0]), deadline=deadline)
        return sources(ours, theirs), orphans(ours, theirs)

    async def _fetch(self, load: Load, ranks: Sequence[int], deadline: float) -> list[Taken]:
        """From all ranks at once. When this returns or raises, none of them is written from any more."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._fetch_one(load, rank, deadline)) for rank in ranks]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        return [task.result() for task in tasks]

    async def _fetch_one(self, load: Load, rank: int, deadline: float) -> Taken:
        want = Want(
            load.ticket.transfer_id,
            _source(load.ticket, rank),
            load.block_ids,
            deadline,
            load.skip_blocks,
            prefix=load.longer,
            on_sealed=ignore if self._keep else partial(self._sealed, load),
        )
        return await self._buffer.drop_select(want)

    def _sealed(self, load: Load, encoded: bytes) -> None:
        """P is done. Its token may be given out before the KV is here: whatever becomes of that, the token is right.

        Not where the request is to fail without the KV: it may still go to another instance while nothing is given out.
        """
        with suppress(msgspec.DecodeError):  # which is an error once all has come
            meta = decode_meta(encoded)
            result = _result_for(load, meta, common_prefix(meta.prefixes, load.tokens))
            if result is not None:
                self._report(Prefilled(load.request_id, result))

    # Insight.

    def statistics(self) -> dict[str, float]:
        """Loads under way, and failures by kind of error."""
        failures = {f"failed_{kind}": float(count) for kind, count in self._failures.items()}
        return {"num_loading": float(len(self._tasks)), **failures}

    def is_empty(self) -> bool:
        """Whether no load is under way, no ticket waits for one, and no report waits."""
        return not (self._tasks or self._waits or self._events)


def _judge(load: Load, taken: Sequence[Taken]) -> TransferReport:
    """All is here: is it what was promised? Raises `ProtocolError` when not."""
    try:
        metas = [decode_meta(one.meta) for one in taken]
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the hand-off's metadata cannot be read: {error}") from error
    meta = metas[0]
    if any(other != meta for other in metas):
        raise ProtocolError("the producer's ranks disagree on what the hand-off is of")
    if meta.num_tokens > len(load.tokens) and not load.longer:
        raise ProtocolError(f"the hand-off is of {meta.num_tokens} prompt tokens, this request has {len(load.tokens)}")
    wanted = min(meta.num_tokens, load.num_tokens)
    covered = common_prefix(meta.prefixes, load.tokens)
    if covered < wanted:
        raise ProtocolError("the hand-off is of other tokens: the prompt must be the same on both instances")
    if any(one.num_tokens is not None and one.num_tokens < wanted for one in taken):
        raise ProtocolError(f"the hand-off was sealed with blocks of its {meta.num_tokens} tokens missing")
    shorter = wanted if wanted < load.num_tokens else None
    loaded, result = Loaded(load.request_id, shorter), _result_for(load, meta, covered)
    return [loaded] if result is None else [Prefilled(load.request_id, result), loaded]


def _result_for(load: Load, meta: HandOffMeta, covered: int) -> PrefillResult | None:
    """P's, where the hand-off is of this very prompt, all `covered` tokens of it, and not of a part or of more."""
    is_whole = not load.longer and meta.num_tokens == covered == len(load.tokens)
    return meta.prefill_result if is_whole else None


def _source(ticket: Ticket, rank: int) -> Source:
    host, port = ticket.addresses[rank]
    return Source(host, port, ticket.remote_engine_id, rank, ticket.tp_size)
