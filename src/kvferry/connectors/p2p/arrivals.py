"""The consumer's half of the worker side: fetches hand-offs, and reports the end of each.

Owns the tasks of loads, the tasks of tickets that wait to be loaded, and their reports. The tasks run on the transfer
loop. A rank fetches its own share from each of the producer's ranks that has some of it (`core.blocks.sharding`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kvferry.connectors.api import Failed, Fetchable, Loaded, Prefilled, Released, TransferReport
from kvferry.connectors.p2p.plan import HandOffMeta, Load, P2pPlan, decode_meta
from kvferry.connectors.reports import Reports
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.blocks.sharding import orphans, sources
from kvferry.core.errors import LeaseEnded, PeerLost, ProtocolError
from kvferry.core.messages.hand_off import OTHER_PROMPT, PrefillResult, Ticket, common_prefix
from kvferry.transport.lookup_buffer.base import LookupBuffer, Source, Taken, Want, ignore
from kvferry.transport.transfer_loop import call_contained, run_together, translated

logger = logging.getLogger(__name__)


class Arrivals:
    """`begin` is called on the transfer loop, while `run` runs there. The ends of loads are added to `reports`.

    `timeout_s`: maximum seconds of each load. `keep_lease_on_failure`: a load that fails does not release the hand-off,
    so that another instance may fetch it with the same ticket.
    """

    release_s = 5.0

    def __init__(
        self,
        buffer: LookupBuffer,
        layout: KVLayout,
        timeout_s: float,
        reports: Reports,
        *,
        keep_lease_on_failure: bool,
    ) -> None:
        self._buffer, self._layout, self._reports = buffer, layout, reports
        self._timeout_s, self._keep = timeout_s, keep_lease_on_failure
        self.started = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[TransferReport]] = {}
        self._waits: dict[str, list[asyncio.Task[None]]] = {}
        self._cancelled: set[str] = set()
        self._group: asyncio.TaskGroup | None = None
        self._counts: Counter[str] = Counter()
        self._taken_s = 0.0

    async def run(self) -> None:
        """Run the tasks until cancelled. Cancellation ends them."""
        async with asyncio.TaskGroup() as self._group:
            self.started.set()
            try:
                await asyncio.Event().wait()
            finally:
                self._group = None

    # On the loop.

    def begin(self, plan: P2pPlan) -> None:
        """Do the consumer's part of a plan. An error in one request does not affect other requests."""
        for request_id in plan.cancels:
            _contained(request_id, partial(self._cancel, request_id), self._on_cancel_failed)
        for request_id, ticket in plan.waits.items():
            _contained(request_id, partial(self._wait, request_id, ticket), self._on_wait_failed)
        for request_id, load in plan.loads.items():
            _contained(request_id, partial(self._start, load), self._on_start_failed)
        for request_id, ticket in plan.unwanted.items():
            _contained(request_id, partial(self._abandon, request_id, ticket), self._on_wait_failed)

    def _cancel(self, request_id: str) -> None:
        """Stop a load. Its request is reported as `Released` when nothing writes to its blocks any more, also if the
        load has already ended."""
        task = self._tasks.get(request_id)
        if task is None:
            self._reports.add(Released(request_id))
        else:
            self._cancelled.add(request_id)
            task.cancel()

    def _on_cancel_failed(self, request_id: str, error: Exception) -> None:
        """Handle a cancellation that failed: the load ends by its deadline, and is then reported as `Released`."""
        if request_id in self._tasks:
            self._cancelled.add(request_id)
        else:
            self._reports.add(Released(request_id))

    def _start(self, load: Load) -> None:
        """Begin to fetch. From now on, the load keeps the lease alive."""
        self._stop_waiting(load.request_id)
        task = self._create_task(self._load(load), f"load {load.request_id}")
        self._tasks[load.request_id] = task
        task.add_done_callback(partial(self._on_load_done, load))

    def _on_start_failed(self, request_id: str, error: Exception) -> None:
        """Report a failure, unless the load has a task: the end of the task is reported as usual."""
        self._stop_waiting(request_id)
        if request_id not in self._tasks:
            self._reports.add(Failed(request_id, translated(error)))

    def _create_task(self, job: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        assert self._group is not None, "begin is called while run runs"
        return self._group.create_task(job, name=name)

    # Leases.

    def _wait(self, request_id: str, ticket: Ticket) -> None:
        """Keep the lease alive until the ticket is loaded or abandoned, and report when the producer has finished."""

        def ready() -> None:
            if ticket.is_early:
                self._reports.add(Fetchable(request_id))

        async def keep(key: str, source: Source) -> None:
            try:
                await self._buffer.keep(key, source, ready)
            except Exception:
                ready()
                raise
            ready()

        self._waits[request_id] = self._for_each_rank(ticket, self._own_ranks(ticket), "keep", keep)

    def _on_wait_failed(self, request_id: str, error: Exception) -> None:
        """Stop renewing the lease. It then expires, and a load will report this."""
        self._stop_waiting(request_id)
        self._reports.add(Fetchable(request_id))

    def _abandon(self, request_id: str, ticket: Ticket) -> None:
        """Release the producer's hand-off, which will not be fetched."""
        self._stop_waiting(request_id)
        self._release(ticket, self._own_ranks(ticket))

    def _stop_waiting(self, request_id: str) -> None:
        for task in self._waits.pop(request_id, ()):
            task.cancel()

    def _release(self, ticket: Ticket, ranks: Iterable[int]) -> None:
        if self._group is not None:
            deadline = asyncio.get_running_loop().time() + self.release_s
            self._for_each_rank(ticket, ranks, "release", partial(self._buffer.release, deadline=deadline))

    def _for_each_rank(
        self,
        ticket: Ticket,
        ranks: Iterable[int],
        action: str,
        call: Callable[[str, Source], Coroutine[Any, Any, None]],
    ) -> list[asyncio.Task[None]]:
        """Start a task for each of the producer's ranks. Their errors are only logged."""

        async def on_rank(rank: int) -> None:
            try:
                await call(ticket.transfer_id, _source(ticket, rank))
            except (
                Exception
            ) as unexpected:  # leases expire by themselves, and a load with the same error reports the error
                error = translated(unexpected)
                logger.info("could not %s: %s", name, error, exc_info=error is not unexpected)

        name = f"{action} hand-off {ticket.transfer_id}"
        return [self._create_task(on_rank(rank), name) for rank in ranks]

    def _own_ranks(self, ticket: Ticket) -> Sequence[int]:
        """The producer's ranks that this rank connects to while the producer's layout is not known. Together, all own
        ranks reach all of them."""
        own_size, peer_size = self._layout.tp_size, ticket.tp_size
        return sorted({self._layout.tp_rank * peer_size // own_size, *range(self._layout.tp_rank, peer_size, own_size)})

    # Loads.

    async def _load(self, load: Load) -> TransferReport:
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        ranks = self._own_ranks(load.ticket)
        try:
            ranks, unread = await self._sources(load.ticket, deadline)
            taken = await self._fetch(load, ranks, deadline)
            report = _report(load, taken)
            self._count(taken)
            self._release(load.ticket, unread)
            return report
        except Exception as unexpected:  # any error ends only this load
            error = translated(unexpected)
            was_evicted = load.longer and isinstance(
                error, LeaseEnded
            )  # blocks kept for next turns may be evicted at any time
            level = logging.INFO if was_evicted else logging.WARNING
            message = "request %s: hand-off not loaded: %s"
            logger.log(level, message, load.request_id, error, exc_info=error is not unexpected)
            self._counts[f"failed_{type(error).__name__}"] += 1
            if not self._keep and not isinstance(error, LeaseEnded | PeerLost):
                self._release(load.ticket, {*ranks, *self._own_ranks(load.ticket)})
            return [Failed(load.request_id, error)]

    def _on_load_done(self, load: Load, task: asyncio.Task[TransferReport]) -> None:
        """Report the end of a load's task, with which all its writes have ended. Called also if the task was cancelled
        before it began."""
        del self._tasks[load.request_id]
        if load.request_id in self._cancelled:
            self._cancelled.discard(load.request_id)
            self._reports.add(Released(load.request_id))
            self._release(load.ticket, self._own_ranks(load.ticket))
        elif not task.cancelled():
            on_error = partial(self._on_start_failed, load.request_id)
            call_contained(lambda: self._reports.add(*task.result()), f"load {load.request_id}", on_error)

    async def _sources(self, ticket: Ticket, deadline: float) -> tuple[Sequence[int], Sequence[int]]:
        """The ranks of the producer that have some of this rank's KV; and the ranks that this rank releases because no
        rank reads from them."""
        own_layout = self._layout
        if ticket.tp_size == own_layout.tp_size:
            return (own_layout.tp_rank,), ()
        peer_layout = await self._buffer.layout_at(_source(ticket, self._own_ranks(ticket)[0]), deadline=deadline)
        return sources(own_layout, peer_layout), orphans(own_layout, peer_layout)

    async def _fetch(self, load: Load, ranks: Sequence[int], deadline: float) -> list[Taken]:
        """Fetch from all ranks at once. When this has returned or raised, nothing from any of them writes any more."""
        return await run_together(*(self._fetch_one(load, rank, deadline) for rank in ranks))

    async def _fetch_one(self, load: Load, rank: int, deadline: float) -> Taken:
        selection = Want(
            load.ticket.transfer_id,
            _source(load.ticket, rank),
            load.block_ids,
            deadline,
            load.skip_blocks,
            prefix=load.longer,
            on_sealed=ignore if self._keep else partial(self._sealed, load),
        )
        return await self._buffer.drop_select(selection)

    def _count(self, taken: Sequence[Taken]) -> None:
        for share in taken:
            self._counts["taken"] += 1
            self._counts[f"taken_bytes_{share.fabric}"] += share.num_bytes
            self._taken_s += share.seconds

    def _sealed(self, load: Load, encoded: bytes) -> None:
        """Report P's first token when P has finished, before the KV has arrived: the token is right even if the KV
        never arrives. Not called with `keep_lease_on_failure`, because another instance may take over as long as
        nothing was reported.
        """
        with suppress(ProtocolError):  # `_report` raises it when everything has arrived
            meta = decode_meta(encoded)
            result = _result_for(load, meta, common_prefix(meta.prefixes, load.tokens, load.salt))
            if result is not None:
                self._reports.add(Prefilled(load.request_id, result))

    # Statistics and checks.

    def statistics(self) -> dict[str, float]:
        """Numbers of running and completed loads, bytes and seconds of the completed ones, and failures by kind of
        error."""
        counts = {name: float(count) for name, count in self._counts.copy().items()}
        return {"num_loading": float(len(self._tasks)), "taken_seconds": self._taken_s, **counts}

    def is_empty(self) -> bool:
        """True if no load is running, and no ticket waits for one."""
        return not (self._tasks or self._waits)


def _contained(request_id: str, call: Callable[[], None], on_error: Callable[[str, Exception], None]) -> None:
    call_contained(call, f"a transfer of request {request_id}", partial(on_error, request_id))


def _report(load: Load, taken: Sequence[Taken]) -> TransferReport:
    """The events of a load that all ranks have delivered. Raises `ProtocolError` if it differs from the promise."""
    metas = [decode_meta(share.meta) for share in taken]
    meta = metas[0]
    if any(other != meta for other in metas):
        raise ProtocolError("the producer's ranks disagree about the tokens of the hand-off")
    if meta.num_tokens > len(load.tokens) and not load.longer:
        raise ProtocolError(f"the hand-off is of {meta.num_tokens} prompt tokens, this request has {len(load.tokens)}")
    num_expected = min(meta.num_tokens, load.num_tokens)
    num_common = common_prefix(meta.prefixes, load.tokens, load.salt)
    if num_common < num_expected:
        raise ProtocolError(OTHER_PROMPT)
    if any(share.num_tokens is not None and share.num_tokens < num_expected for share in taken):
        raise ProtocolError(f"the hand-off was sealed with blocks of its {meta.num_tokens} tokens missing")
    num_loaded = num_expected if num_expected < load.num_tokens else None
    loaded, result = Loaded(load.request_id, num_loaded), _result_for(load, meta, num_common)
    return [loaded] if result is None else [Prefilled(load.request_id, result), loaded]


def _result_for(load: Load, meta: HandOffMeta, num_common: int) -> PrefillResult | None:
    """P's result, if the hand-off is of exactly this prompt; None if it is of a prefix of the prompt, or of more
    tokens."""
    is_same_prompt = not load.longer and meta.num_tokens == num_common == len(load.tokens)
    return meta.prefill_result if is_same_prompt else None


def _source(ticket: Ticket, rank: int) -> Source:
    host, port = ticket.addresses[rank]
    return Source(host, port, ticket.remote_engine_id, rank, ticket.tp_size)
