"""The engine around a ready executor: schedule → run → postprocess, one step at a time. Synchronous; used from one
thread. No tensors.

Owns the scheduler, the connector's scheduler side and the executor, and closes them. It does not know on which device
or how many ranks the model runs: the executor does. `engine.Engine` loads the model first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from kvferry.connectors.api import (
    ConnectorContext,
    HandsOff,
    SchedulerSide,
    StepPlan,
    TransferEvent,
    failures,
    gauges_of,
    statistics_of,
)
from kvferry.connectors.caching import KeepsBlocks
from kvferry.connectors.registry import find_connector
from kvferry.core import entropy
from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.clock import Clock
from kvferry.core.errors import ConnectorLost, InvalidRequest, LeakError, RankLost, RequestError
from kvferry.core.messages.hand_off import Consume, Produce
from kvferry.core.messages.kept import TierShare
from kvferry.core.messages.kv_keys import LOAD_FIELD, STORE_FIELD
from kvferry.core.request import EngineOutput, Request, are_tokens
from kvferry.core.runtime.closing import close_all
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.blocks.block_pool import BlockPool
from kvferry.engine.blocks.cached_order import make_cached_order
from kvferry.engine.config import EngineConfig
from kvferry.engine.executor.base import Executor, PlanQueue, StepResult
from kvferry.engine.kv_events import BlockEvents
from kvferry.engine.scheduling.limits import SchedulerLimits
from kvferry.engine.scheduling.scheduler import Scheduler
from kvferry.engine.scheduling.speculation import SpeculativeConfig
from kvferry.engine.scheduling.step import Chunk
from kvferry.engine.statistics import EngineSnapshot
from kvferry.store.machine import MACHINE, Machine

logger = logging.getLogger(__name__)


class EngineCore:
    """One model, served step by step."""

    max_plans = 64
    """Max number of plans that have not been started; then the connector is lost."""
    max_failed_steps = 8
    """Max number of consecutive failed steps that no single request caused; then the engine ends."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        transfer: KVTransferConfig | None,
        auth_token: str,
        clock: Clock,
        events: BlockEvents | None = None,
        machine: Machine = MACHINE,
    ) -> None:
        """Takes over `executor` and `events`, also if it raises. Raises `ConfigError`."""
        self.config, self.executor, self.transfer, self.clock, self.events = config, executor, transfer, clock, events
        self._machine = machine
        self.model = executor.model
        self.scheduler_side: SchedulerSide[StepPlan] | None = None
        try:
            if transfer is not None:
                self.scheduler_side = self._build_scheduler_side(transfer, auth_token)
        except BaseException:
            self.close()
            raise
        order = make_cached_order(config.prefix_cache_eviction, executor.num_blocks, clock)
        self.pool = BlockPool(executor.num_blocks, prefix_caching=config.prefix_caching, order=order)
        self.pool.events = events
        self.scheduler = Scheduler(self._limits(), self.pool, self.layout.model_identity, clock, self.scheduler_side)
        self.plans, self._report = PlanQueue(), list[TransferEvent]()
        self.num_steps = self._num_failed_steps = 0

    # Requests.

    def add(self, request: Request) -> None:
        """Add a request. Raises `RequestError` when it cannot be served."""
        try:
            self._add(request)
        except RequestError:
            if isinstance(request.hand_off, Produce):
                self.prefill_refused(request.hand_off.transfer_id)
            raise

    def _add(self, request: Request) -> None:
        if request.hand_off is not None and self.scheduler_side is None:
            raise InvalidRequest(
                "kv_transfer_params asks for a hand-off, but this instance has no connector;"
                " start it with --kv-transfer-config",
                param="kv_transfer_params",
            )
        self._require_keys(request)
        if self.transfer is not None:
            self._require_role(request, self.transfer)
        vocab_size = self.model.vocab_size
        for tokens in (request.prompt_token_ids, request.answer_token_ids):
            if not are_tokens(tokens, vocab_size):
                raise InvalidRequest(f"the prompt has token ids outside the vocabulary of {vocab_size}", param="prompt")
        if request.sampling.seed is None:
            seed = entropy.token_bits(63) if self.config.seed is None else self.config.seed
            request.sampling = msgspec.structs.replace(request.sampling, seed=seed)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request at once."""
        self.scheduler.abort(request_id)

    @property
    def layout(self) -> KVLayout:
        """The layout of a block."""
        return self.executor.layout

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.executor.max_model_len

    @property
    def addresses(self) -> Sequence[dict[str, Any]]:
        """`ServesPeers.address` of each rank."""
        return self.executor.addresses

    @property
    def hands_off(self) -> HandsOff | None:
        """The connector's scheduler side, if it hands off."""
        side = self.scheduler_side
        return side if side is not None and isinstance(side, HandsOff) else None

    @property
    def keeps_keys(self) -> bool:
        """True if requests can store and load KV under keys."""
        side = self.scheduler_side
        return side is not None and isinstance(side, KeepsBlocks) and side.keeps_keys()

    def release(self, transfer_id: str) -> bool:
        """End the lease of a ticket that will not be fetched. Returns True if there was one."""
        return self.hands_off is not None and self.hands_off.release(transfer_id)

    def prefill_refused(self, transfer_id: str) -> None:
        """Notify the instance that waits for the KV of a prefill that this instance refused before it became a
        request."""
        if self.hands_off is not None:
            self.hands_off.refused(transfer_id)

    def stored_blocks(self, hashes: Sequence[BlockHash], *, pin: bool | None) -> Sequence[Future[list[TierShare]]]:
        """Call `KeepsBlocks.stored_blocks`. Raises `InvalidRequest` where no connector keeps KV."""
        side = self.scheduler_side
        lookups = side.stored_blocks(hashes, pin=pin) if side is not None and isinstance(side, KeepsBlocks) else ()
        if not lookups:
            raise InvalidRequest(
                "this instance has no connector that keeps KV; start it with --kv-transfer-config and a"
                " KVStoreConnector"
            )
        return lookups

    # The step.

    def step(self) -> list[EngineOutput]:
        """Do one step; returns its outputs. Fast when there is nothing to compute.

        An exception in one request's part ends that request. Raises only errors after which the engine cannot go on:
        `RankLost`, `ConnectorLost`, `LeakError` when the accounting of KV blocks is wrong, or an error that recurs in
        every step.
        """
        stepping = self.stepping()
        try:
            chunks = next(stepping)
            while True:
                try:
                    result = self.executor.execute(chunks, self.plans)
                except Exception as error:  # noqa: BLE001 - the boundary between scheduling and the ranks: see `_execute`
                    chunks = stepping.throw(error)
                else:
                    chunks = stepping.send(result)
        except StopIteration as end:
            outputs: list[EngineOutput] = end.value
            return outputs

    def stepping(self) -> Generator[list[Chunk], StepResult, list[EngineOutput]]:
        """A step in parts, for callers that do other work while the ranks compute: yields the chunks that the executor
        has to execute with `plans`, and receives its result by `send` or its error by `throw`. Returns and raises as
        `step`; no other method of the engine may be called until it has ended."""
        num_faults = self.scheduler.num_faults
        try:
            yield from self._step()
            self._num_failed_steps = 0
        except (RankLost, ConnectorLost, LeakError):
            raise
        except Exception as error:  # noqa: BLE001 - the boundary between two steps: see `_step_failed`
            self._step_failed(error)
        if self.scheduler.num_faults != num_faults:
            self.scheduler.audit()
        if self.events is not None:
            self.events.flush()
        return self.scheduler.take_outputs()

    def _step(self) -> Generator[list[Chunk], StepResult, None]:
        begun = self.clock.monotonic()
        step = self.scheduler.schedule()
        self.plans.begin_step(step.plan)  # stored first, so that no later failure can lose it
        result = yield from self._execute(step.chunks)
        self.num_steps += bool(step.chunks)
        self.scheduler.record_step_duration(step, self.clock.monotonic() - begun)
        for request_id, error in result.failed.items():
            self.scheduler.fail(request_id, error)
        try:
            self.scheduler.update(step, result.sampled, failures(result.report))
        except Exception as error:  # noqa: BLE001 - as in `_execute`
            self.scheduler.fail_step(step.chunks, error)
        self._transferred()
        if (plan := self.scheduler.plan_between_steps()) is not None:
            self.plans.begin_step(plan)
            yield from self._execute([])
            self._transferred()
        self.idle = not step.chunks and step.plan is None and not result.report

    def _execute(self, chunks: list[Chunk]) -> Generator[list[Chunk], StepResult, StepResult]:
        """Run the chunks and the waiting plans. A step that fails as a whole ends its requests, since the cause may be
        any of them. Plans that were not started are started with the next step."""
        if len(self.plans.waiting) > self.max_plans:
            raise ConnectorLost(f"the transfers of {self.max_plans} steps could not be started")
        try:
            result = yield chunks
        except (RankLost, ConnectorLost):
            raise
        except Exception as error:  # noqa: BLE001 - the boundary between this step's requests and all others
            self.scheduler.fail_step(chunks, error)
            return StepResult({}, [])
        report = self.scheduler.fail_incomplete_loads(chunks, result.report)
        self._report += report
        return StepResult(result.sampled, report, result.failed)

    def _transferred(self) -> None:
        """Pass the report of transfers to the scheduler; if that raises, event by event, so that an event does not
        affect other requests."""
        report = self._report
        try:
            self.scheduler.on_transferred(report)
        except Exception as error:
            logger.exception("a report of transfers could not be processed")
            for event in report:
                try:
                    self.scheduler.on_transferred([event])
                except Exception:  # noqa: BLE001 - logged above, and this event's request ends
                    self.scheduler.fail(event.request_id, error)
        self._report = []

    def _step_failed(self, error: Exception) -> None:
        """Handle an error that belongs to no request. The first one is only logged, since it may not recur; the next
        ones end all requests; after `max_failed_steps` consecutive ones, the engine ends."""
        self._num_failed_steps += 1
        logger.exception("a step failed outside of any request's part, %d in a row", self._num_failed_steps)
        if self._num_failed_steps >= self.max_failed_steps:
            raise error
        if self._num_failed_steps > 1:
            self.scheduler.fail_all(error)

    idle = True
    """True if the last step had nothing to do: the engine waits for requests or transfers."""

    @property
    def has_work(self) -> bool:
        """True if a step may do something."""
        return self.scheduler.has_work or bool(self.plans.waiting or self._report)

    def on_transfer(self, wake: Callable[[], None]) -> None:
        """Register `wake`, which is called from any thread when a transfer has made progress that a step should
        handle."""
        self.executor.on_report(wake)
        if self.scheduler_side is not None:
            self.scheduler_side.on_answer(wake)

    # Insight and end.

    def statistics(self) -> EngineSnapshot:
        """A snapshot of gauges and counters."""
        connector = statistics_of(self.scheduler_side) | self.executor.statistics()
        return EngineSnapshot(
            scheduler=self.scheduler.statistics(),
            external_kv=self.scheduler.external_kv.statistics(),
            blocks=self.pool.statistics(),
            num_steps=self.num_steps,
            connector=connector,
            connector_gauges=self._connector_gauges(),
        )

    def _connector_gauges(self) -> frozenset[str]:
        """Names of the connector's metrics that are gauges."""
        if self.transfer is None or self.scheduler_side is None:
            return frozenset()
        return gauges_of(type(self.scheduler_side)) | gauges_of(find_connector(self.transfer).worker_class())

    def check(self) -> None:
        """Raise `LeakError` if no request is left, but a resource is still held."""
        self.scheduler.check()
        if self.scheduler.is_empty:
            self.executor.check()

    def close(self) -> None:
        """End every transfer and free the memory. Raises the first error of a part, after all are closed."""
        parts = (self.events, self.executor, self.scheduler_side)
        close_all(*(part.close for part in parts if part is not None))

    # Parts.

    def _limits(self) -> SchedulerLimits:
        config = self.config
        return SchedulerLimits(
            block_size=config.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_waiting=config.max_waiting,
            itl_target_s=config.itl_target_s,
            vocab_size=self.model.vocab_size,
            eos_token_ids=self.model.eos_token_ids,
            trained_context=self.model.trained_context,
            speculation=SpeculativeConfig.parse(config.speculative_config) if config.speculative_config else None,
            fail_on_load_failure=bool(self.transfer and self.transfer.kv_load_failure_policy == "fail"),
        )

    def _build_scheduler_side(self, transfer: KVTransferConfig, auth_token: str) -> SchedulerSide[StepPlan]:
        context = ConnectorContext(
            transfer,
            self.layout,
            auth_token,
            self.clock,
            computes_meanwhile=True,
            delays_answers=True,
            machine=self._machine,
            has_room=lambda num_blocks: self.scheduler.has_room(num_blocks),  # noqa: PLW0108 - made after this
        )
        side = find_connector(transfer).build_scheduler_side(context)
        if self.addresses and isinstance(side, HandsOff):
            side.set_addresses(self.addresses)
        return side

    def _require_keys(self, request: Request) -> None:
        """Raise `InvalidRequest` for keys that this instance cannot store or load."""
        params = request.transfer_params
        if params is None or not (params.stores or params.loads):
            return
        field = STORE_FIELD if params.stores else LOAD_FIELD
        if not self.keeps_keys:
            raise InvalidRequest(
                f"{field} needs a connector with a store that instances share, such as KVStoreConnector; start this"
                " instance with it (--kv-transfer-config)",
                param=field,
            )
        if params.stores and self.transfer is not None and not self.transfer.produces:
            raise InvalidRequest("this instance only decodes (kv_consumer), and stores nothing", param=field)

    @staticmethod
    def _require_role(request: Request, transfer: KVTransferConfig) -> None:
        if isinstance(request.hand_off, Produce) and not transfer.produces:
            raise InvalidRequest("this instance only decodes (kv_consumer)", param="kv_transfer_params")
        if isinstance(request.hand_off, Consume) and not transfer.consumes:
            raise InvalidRequest("this instance only prefills (kv_producer)", param="kv_transfer_params")
