"""The engine's interface for asyncio callers, independent of the thread of its steps. Callers submit *calls* (functions
of the engine), which run between two steps, and listen for the outputs of their requests. After each step, all outputs
are delivered at once.
"""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal, TypeVar

from kvferry.core import entropy
from kvferry.core.errors import KvferryError, RequestAborted, StoreError, Unavailable
from kvferry.core.messages.hand_off import HandOff, Produce
from kvferry.core.messages.instance_facts import EventsAddress, InstanceFacts, TicketKinds
from kvferry.core.messages.kept import KeptBlocks
from kvferry.core.request import EngineOutput, Request
from kvferry.core.runtime.tasks import WakeUp
from kvferry.core.sampling import SamplingParams
from kvferry.engine.core import EngineCore
from kvferry.engine.statistics import EngineSnapshot
from kvferry.engine.structured.library import can_constrain

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

_ROLES: dict[str, Literal["prefill", "decode", "both"]] = {
    "kv_producer": "prefill",
    "kv_consumer": "decode",
    "kv_both": "both",
}
PENDING_WRITE_GAUGES = ("writer_waiting_bytes", "dirty_blocks")
"""Connector gauges that count bytes and blocks that are not in all tiers of a store yet."""


class SteppedEngine(ABC):
    """One engine and the runner of its steps. The owner calls `start` and `close`; all other methods are called from
    one event loop."""

    call_deadline_s = 30.0
    poll_s = 0.005
    """Seconds between checks while a request waits for what sends no wake-up (a marker file, its deadline)."""

    def __init__(self, engine: EngineCore, model_names: Sequence[str]) -> None:
        self.engine = engine
        self._process_name = entropy.token_hex(16)
        self.engine_id = engine.transfer.engine_id if engine.transfer else entropy.token_hex(16)
        self.model_names = tuple(model_names)
        self.max_model_len = engine.max_model_len
        self.vocab_size = engine.model.vocab_size
        self.tokenizer = engine.model.tokenizer
        self.eos_token_ids = engine.model.eos_token_ids
        self.default_sampling: dict[str, Any] = engine.model.default_sampling
        self._calls: deque[Callable[[], None]] = deque()
        self._closing = False
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._listeners: dict[str, _Mailbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def model_identity(self) -> str:
        """The name of the model as it computes."""
        return self.engine.layout.model_identity

    # Lifecycle.

    def start(self) -> None:
        """Begin stepping. Call from the event loop that will listen."""
        self._loop = asyncio.get_running_loop()

    @abstractmethod
    async def close(self) -> None:
        """End all requests, the steps and the engine."""

    @property
    @abstractmethod
    def is_stepping(self) -> bool:
        """True if steps are running."""

    @abstractmethod
    def wake(self) -> None:
        """Wake the runner of the steps: there is something to do. Thread-safe."""

    @property
    def healthy(self) -> bool:
        """True if requests can be served."""
        return self.is_stepping and self._failure is None and not self._closing

    async def failed(self) -> None:
        """Wait until the engine has failed."""
        await self._failed.wait()

    def describe(self) -> InstanceFacts:
        """The facts about this instance for routers."""
        engine, transfer, side = self.engine, self.engine.transfer, self.engine.hands_off
        ranks = [(str(address["host"]), int(address["port"])) for address in engine.addresses if address]
        kv_host, kv_port = ranks[0] if ranks else ("", 0)
        return InstanceFacts(
            role="both" if transfer is None else _ROLES[transfer.kv_role],
            engine_id=self.engine_id,
            process=self._process_name,
            connector=transfer.kv_connector if transfer else None,
            tickets=side.tickets() if side is not None else TicketKinds(),
            keeps_keys=engine.keeps_keys,
            structured_outputs=can_constrain(),
            stores_take_kv=side is None or side.stores_take_kv(),
            kv_host=kv_host,
            kv_port=kv_port,
            kv_ranks=ranks if len(ranks) > 1 else None,
            kv_seal=side.address_seal() if side is not None else "",
            tp_size=engine.layout.tp_size,
            layout=engine.layout.fingerprint(),
            kv_layout=engine.layout,
            num_kv_tokens=engine.pool.num_blocks * engine.layout.block_size,
            block_size=engine.layout.block_size,
            kv_events=None if engine.events is None else EventsAddress(**vars(engine.events.addresses)),
            max_model_len=self.max_model_len,
            max_num_seqs=engine.scheduler.limits.max_num_seqs,
            model_names=list(self.model_names),
        )

    # Requests.

    async def generate(self, request: Request) -> AsyncIterator[EngineOutput]:
        """Serve a request; yields the output of each step. Leaving the iterator early ends the request at once.

        Raises `RequestError` (or the error that ended the request) instead of yielding an output with an error.
        """
        queue = _Mailbox()
        if request.request_id in self._listeners:
            request.request_id = f"{request.request_id}-{entropy.token_hex(4)}"
        self._listeners[request.request_id] = queue
        finished = False
        try:
            await self._call_engine(lambda: self.engine.add(request))
            while not finished:
                output = await queue.get()
                finished = output.finish_reason is not None
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            del self._listeners[request.request_id]
            if not finished:
                self._run_between_steps(lambda: self.engine.abort(request.request_id))

    async def release(self, transfer_id: str) -> bool:
        """End the lease of a ticket that will not be fetched. Returns True if there was one."""
        return await self._call_engine(lambda: self.engine.release(transfer_id))

    def continues(self, sampling: SamplingParams, *, is_seeded: bool) -> bool:
        """True: each token depends on the seed and on the tokens before it, and on nothing else."""
        return True

    def refused(self, hand_off: HandOff) -> None:
        """Have the connector notify the instance that waits for the prefill of a refused request. Does not wait."""
        if isinstance(hand_off, Produce):
            transfer_id = hand_off.transfer_id
            self._run_between_steps(lambda: self.engine.prefill_refused(transfer_id))

    async def stored_blocks(self, request: Request, *, pin: bool | None) -> KeptBlocks:
        """The blocks of a prompt in the connector's store; `pin` True: pin them; False: unpin them; None: change
        nothing. Raises `InvalidRequest`."""
        hashes = await asyncio.to_thread(self.engine.scheduler.prompt_block_hashes, request)
        # Pending writes come first: if there are none, the look-up after it is complete.
        figures = (await self.statistics()).connector
        waiting = sum(value for name, value in figures.items() if name.endswith(PENDING_WRITE_GAUGES))
        lookups = await self._call_engine(lambda: self.engine.stored_blocks(hashes, pin=pin))
        try:
            tiers = [share for lookup in lookups for share in await asyncio.wrap_future(lookup)]
        except StoreError as error:
            raise Unavailable(f"the store cannot be reached: {error}") from error
        return KeptBlocks(
            num_tokens=len(request.prompt_token_ids),
            block_size=self.engine.layout.block_size,
            num_blocks=len(hashes),
            tiers=tiers,
            is_settled=waiting == 0,
        )

    async def reset_prefix_cache(self) -> bool:
        """Evict all cached blocks that no request uses. Returns False if others are left."""

        def reset() -> bool:
            self.engine.pool.forget_all()
            return self.engine.pool.statistics().num_cached == 0

        return await self._call_engine(reset)

    def abort_requests(self, request_ids: Collection[str]) -> int:
        """End running requests with `RequestAborted`; all of them if `request_ids` is empty. Returns their number."""
        aborted = [name for name in self._listeners if not request_ids or any(_names(i, name) for i in request_ids)]
        for name in aborted:
            error = RequestAborted("an operator aborted the request")
            self._listeners[name].put(EngineOutput(request_id=name, token_ids=[], error=error))
        return len(aborted)

    async def statistics(self) -> EngineSnapshot:
        """A snapshot, taken between two steps."""
        return await self._call_engine(self.engine.statistics)

    async def check(self) -> None:
        """Raise `LeakError` if no request is left, but a resource is still held."""
        await self._call_engine(self.engine.check)

    # Between callers and steps.

    def _run_between_steps(self, call: Callable[[], object]) -> None:
        """Run `call` before the next step."""
        self._calls.append(lambda: void(call))
        self.wake()

    async def _call_engine(self, call: Callable[[], Answer]) -> Answer:
        """Run `call` before the next step, and return its result. Raises `Unavailable` if there will be none."""
        if not self.healthy:
            raise Unavailable(self._why_unavailable())
        future: Future[Answer] = Future()
        self._calls.append(lambda: _resolve(future, call))
        self.wake()
        try:
            async with asyncio.timeout(self.call_deadline_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise Unavailable("the engine did not answer in time") from None

    def _why_unavailable(self) -> str:
        return f"the engine failed: {self._failure}" if self._failure else "the engine is shutting down"

    # For the runner of the steps.

    def _serve_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _idle_timeout_s(self) -> float | None:
        """Max seconds to wait for work before the next step; None: without limit."""
        if not self.engine.has_work:
            return None
        return self.poll_s if self.engine.idle else 0.0

    def _on_failure(self, failure: BaseException) -> None:
        logger.error("the engine failed", exc_info=failure)
        self._failure = failure
        self._call_loop(self._failed.set)

    def _on_end(self) -> None:
        """Wake all waiters, because there will be no more steps."""
        self._closing = True
        self._serve_calls()
        self._end_listeners()

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        if outputs:
            self._call_loop(lambda: self._dispatch(outputs))

    def _call_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None, "start comes first"
        with suppress(RuntimeError):  # the loop is closed, so there are no listeners
            self._loop.call_soon_threadsafe(call)

    def _dispatch(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            queue = self._listeners.get(output.request_id)
            if queue is not None:
                queue.put(output)

    def _end_listeners(self) -> None:
        error = Unavailable(self._why_unavailable())
        for request_id in list(self._listeners):
            self._deliver([EngineOutput(request_id=request_id, finish_reason="error", error=error)])


class _Mailbox:
    """The outputs of one request, for its one listener. Simpler than an `asyncio.Queue`, since every token passes
    through it. Bounded by the request's own `max_tokens`."""

    __slots__ = ("_outputs", "_waiter")

    def __init__(self) -> None:
        self._outputs: deque[EngineOutput] = deque()
        self._waiter = WakeUp()

    def put(self, output: EngineOutput) -> None:
        """Queue an output; never waits."""
        self._outputs.append(output)
        self._waiter.wake()

    async def get(self) -> EngineOutput:
        """Wait for the next output."""
        while not self._outputs:
            await self._waiter.wait()
        return self._outputs.popleft()


_SEQUENCE = re.compile(r"(-[0-9]+)?(-[0-9a-f]{8})?")
"""The end of a sequence's name after its request's: its number, and digits if the name was in use."""


def _names(request_id: str, name: str) -> bool:
    """True if a client's id, or an answer's, is the one of the engine's request `name`, or of its first sequence's."""
    names = [prefix + request_id for prefix in ("", "cmpl-", "chatcmpl-")]
    return any(name.startswith(request_name) and _SEQUENCE.fullmatch(name, len(request_name)) for request_name in names)


def void(call: Callable[[], object]) -> None:
    """Run a call whose result and expected errors are not needed."""
    try:
        call()
    except KvferryError:
        pass
    except Exception:  # the error is for this caller; other callers share the engine's thread
        logger.exception("a call of the engine failed")


def _resolve(future: Future[Answer], call: Callable[[], Answer]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - any error belongs to the caller
        future.set_exception(error)
