"""The executor of several tensor-parallel ranks: rank 0 in this process, each other one in a process of its own. Rank 0
starts them on this machine, or users start them on any machine.

All ranks hold a share of every layer and run each step together, in lockstep through their collectives. Only rank 0
schedules and samples. The others get the inputs of each step (`messages`), and report the events of their transfers.
"""

from __future__ import annotations

import importlib.util
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec

from kvferry.connectors.api import TransferReport
from kvferry.connectors.ranks import RankReports
from kvferry.connectors.registry import find_connector
from kvferry.connectors.report_codec import decode_report
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import (
    ConfigError,
    ConnectorLost,
    LeakError,
    MissingDependency,
    RankLost,
    RequestFailed,
    UnsupportedModel,
)
from kvferry.core.runtime.closing import close_all
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.executor import group
from kvferry.engine.executor.base import Executor, PlanQueue, StepResult
from kvferry.engine.executor.failure_wait import failure_wait_s
from kvferry.engine.executor.link import Link, RankListener
from kvferry.engine.executor.messages import (
    Answer,
    Check,
    Checked,
    Command,
    Done,
    GetStatistics,
    LoadModel,
    ModelLoaded,
    OpenCache,
    Opened,
    RankStep,
    Started,
    Statistics,
    TableAnswer,
    TableRequest,
)
from kvferry.engine.executor.rank_options import RankOptions
from kvferry.engine.executor.rank_process import LOOPBACK, Losses, Process, RankProcess, RankWatch, start_rank
from kvferry.engine.executor.store import RendezvousStore, StoreTable
from kvferry.engine.model.loader import Progress, read_settings
from kvferry.engine.model.rank_placement import RankPlacement
from kvferry.engine.model_runner import LogitRows, SamplerOutput, choose_logit_rows, draw, lay_out
from kvferry.engine.scheduling.step import Chunk
from kvferry.engine.structured.token_masks import Masks, TokenMasks
from kvferry.engine.worker import Worker

A = TypeVar("A", bound=Answer)
logger = logging.getLogger(__name__)


class RanksExecutor(Executor):
    """Runs the model on several ranks, of which this process is rank 0."""

    def __init__(
        self,
        config: EngineConfig,
        transfer: KVTransferConfig | None,
        auth_token: str,
        on_progress: Progress,
        options: RankOptions,
    ) -> None:
        """Start the ranks, each of which loads its share. Raises `ConfigError`, `UnsupportedModel` or `RankLost`."""
        placement = RankPlacement.of_rank(0, config)
        _require_possible(config, transfer, placement)
        self._wake: Callable[[], None] = lambda: None
        self._options, self._losses = options, Losses()
        self._reports = RankReports(placement.size)
        self._reported: deque[tuple[int, bytes]] = deque()  # bounded by the number of transfers
        self._worker: Worker | None = None
        self._masks: TokenMasks | None = None
        self._is_open = False
        self._processes: list[RankProcess] = []
        self._watch: RankWatch | None = None
        try:
            table = StoreTable()
            address = self._start(config, transfer, auth_token, table, on_progress)
            self._load(config, placement, RendezvousStore(partial(self._request_store, table)), address, on_progress)
            self._open(transfer, auth_token)
        except BaseException:
            self.close()
            raise

    # Start.

    def _start(
        self,
        config: EngineConfig,
        transfer: KVTransferConfig | None,
        auth_token: str,
        table: StoreTable,
        on_progress: Progress,
    ) -> str:
        """Start the ranks. Returns the address at which the other ranks reach this process."""
        self._losses.on_loss = self._on_rank_lost
        address = LOOPBACK
        for rank, (link, process) in enumerate(_links(config, auth_token, self._options, on_progress), 1):
            rank_process = RankProcess(rank, link, process, self._losses, table)
            rank_process.on_report = self._on_rank_report
            self._processes.append(rank_process)
            rank_process.send(LoadModel(rank, config, transfer))
            address = link.address
        return address

    def _load(
        self,
        config: EngineConfig,
        placement: RankPlacement,
        store: RendezvousStore,
        address: str,
        on_progress: Progress,
    ) -> None:
        device = placement.choose_device(config.device)
        with self._explain_losses():
            # First, because gloo's wait for a missing rank can neither be interrupted nor end at a loss.
            self._gather(Started, self._options.start_s)
            with group.rendezvous(placement, device, store, address, self._options.step_s):
                self._worker = Worker(config, placement, on_progress)
            on_progress("waiting for the other ranks", 1.0)
            loaded = self._gather(ModelLoaded, group.LOADING_S)
        self.model, self.layout = self._worker.model, self._worker.layout
        self.max_model_len = self._worker.max_model_len
        self._masks = TokenMasks(self.model.vocab_size)
        if any(reply.fingerprint != self.model.fingerprint for reply in loaded):
            raise ConfigError(f"the ranks loaded different weights; did {config.model!r} change meanwhile?")
        self.num_blocks = min(self._worker.max_num_blocks(), *(reply.max_num_blocks for reply in loaded))

    def _open(self, transfer: KVTransferConfig | None, auth_token: str) -> None:
        self._is_open = True
        self._send_command(OpenCache(self.num_blocks))
        with self._explain_losses():
            own_address = self._rank0.open(self.num_blocks, transfer, auth_token)
            addresses = [own_address, *(opened.address for opened in self._gather(Opened, self._options.answer_s))]
        self.addresses = [address for address in addresses if address is not None]
        self._watch = RankWatch(self._processes, self._options.ping_interval_s)

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks that this process has started."""
        return [process.pid for process in self._processes if process.pid is not None]

    def _request_store(self, table: StoreTable, request: TableRequest) -> TableAnswer:
        self._losses.require_none()
        return table.answer(request)

    # Steps.

    def execute(self, chunks: Sequence[Chunk], plans: PlanQueue) -> StepResult:
        rows = choose_logit_rows(chunks)
        inputs = lay_out(chunks, rows.logits_indices) if chunks else None
        step = RankStep(inputs, [msgspec.msgpack.encode(plan) for plan in plans.waiting], plans.first, plans.num_late)
        self._losses.require_none()  # so far the other ranks do not know of the step
        filling = None if self._masks is None else self._masks.begin([sequence for _, sequence in rows.sampled])
        drawn = self._step(step, plans, rows, filling) if chunks or step.plans else SamplerOutput()
        return StepResult(drawn.sampled, self._take_report(), drawn.failed)

    def _step(self, step: RankStep, plans: PlanQueue, rows: LogitRows, filling: Future[Masks] | None) -> SamplerOutput:
        self._send_command(step)
        begun_at = SYSTEM_CLOCK.monotonic()
        try:
            logits = self._rank0.step(step.inputs, plans.waiting, plans.first, plans.num_late)
            drawn = SamplerOutput() if logits is None else draw(logits, rows, self.model.eos_token_ids, filling)
        except (RankLost, ConnectorLost):
            raise
        except Exception as error:
            failures = self._require_survived(error, plans, SYSTEM_CLOCK.monotonic() - begun_at)
            if not (failures and isinstance(error, RequestFailed)):  # otherwise only another rank failed
                raise
        else:
            self._leave_step()
            # Wait, because the ranks' reports of this step must be known before the next one is scheduled.
            failures = self._step_ended(plans, self._options.answer_s)
        if failures:
            raise RequestFailed(f"the engine failed in this request's step, on {'; '.join(failures)}")
        return drawn

    def _step_ended(self, plans: PlanQueue, timeout_s: float) -> list[str]:
        """Wait until all ranks have left the step. Returns the failures, with rank and reason. Raises `RankLost`."""
        results = list(zip(self._processes, self._gather(Done, timeout_s), strict=True))
        for process, result in results:
            self._reported.append((process.rank, result.report))
        plans.mark_begun(min(self._rank0.num_begun, *(result.num_begun for _, result in results)))
        return [f"rank {process.rank}: {result.failure}" for process, result in results if result.failure]

    def _leave_step(self) -> None:
        for process in self._processes:
            process.leave_step()

    def _require_survived(self, error: Exception, plans: PlanQueue, seconds: float) -> list[str]:
        """Return the failures of other ranks after rank 0 has failed `seconds` after the beginning of a step. Raises
        `RankLost` unless all of them have left the step.

        They have left it if the error came before a collective, or on all ranks. Otherwise they are blocked in a
        collective that rank 0 never reaches, and do not answer. Ranks that answer have run as many collectives as
        rank 0, since none returns before all ranks have reached it. On a device the host runs ahead of its collectives,
        so that this cannot be known.
        """
        if self.model.device.type == "cpu" and "timed out" not in str(error).lower():  # gloo's message
            self._leave_step()
            try:
                return self._step_ended(plans, failure_wait_s(seconds, self._options.skew_s))
            except RankLost:
                logger.debug("a rank has not left the step in which rank 0 failed", exc_info=True)
        self._losses.raise_cause(error=error)
        raise RankLost(f"rank 0 failed in a step: {error!r}") from error

    def _take_report(self) -> TransferReport:
        self._reports.add(0, self._rank0.poll())
        try:
            while self._reported:
                rank, report = self._reported.popleft()
                self._reports.add(rank, decode_report(report))
        except Exception as error:  # a rank reports each event once
            raise RankLost(f"the report of rank {rank} cannot be read: {error!r}") from error
        return self._reports.take()

    def on_report(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._rank0.on_report(wake)

    # Insight and end.

    def statistics(self) -> dict[str, float]:
        self._send_command(GetStatistics())
        total = Counter(self._rank0.statistics())
        for reply in self._gather(Statistics, self._options.answer_s):
            total.update(reply.values)  # adds the values, and keeps zeros
        return dict(total)

    def check(self) -> None:
        self._send_command(Check())
        leaks = [f"rank {process.rank}: {checked.leak}" for process, checked in self._leaks() if checked.leak]
        self._rank0.check()
        self._reports.check()
        if leaks:
            raise LeakError("; ".join(leaks))

    def _leaks(self) -> list[tuple[RankProcess, Checked]]:
        return list(zip(self._processes, self._gather(Checked, self._options.answer_s), strict=True))

    def close(self) -> None:
        self._losses.on_loss = lambda: None
        if self._watch is not None:
            self._watch.end()
        processes, self._processes = self._processes, []
        worker, self._worker = self._worker, None
        if self._masks is not None:
            self._masks.close()
        closes = (
            () if worker is None else (worker.close, group.leave)
        )  # makes a step fail that other ranks may still run
        ends = (partial(self._end_processes, processes),)
        close_all(*(process.request_exit for process in processes), *closes, *ends)

    def _end_processes(self, processes: Sequence[RankProcess]) -> None:
        """End the processes. Ranks without a KV cache have nothing to release, and are killed at once: while they load,
        they do not read commands."""
        deadline = SYSTEM_CLOCK.monotonic() + (self._options.end_timeout_s if self._is_open else 0.0)
        close_all(*(partial(process.end, deadline) for process in processes))

    # Between the ranks.

    @property
    def _rank0(self) -> Worker:
        assert self._worker is not None, "the executor is closed"
        return self._worker

    def _send_command(self, command: Command) -> None:
        for process in self._processes:
            process.send(command)

    def _gather(self, kind: type[A], timeout_s: float) -> list[A]:
        deadline = SYSTEM_CLOCK.monotonic() + timeout_s
        return [process.answer(kind, max(0.1, deadline - SYSTEM_CLOCK.monotonic())) for process in self._processes]

    @contextmanager
    def _explain_losses(self) -> Iterator[None]:
        """Raise the loss of another rank instead of the body's error if that caused it."""
        try:
            yield
        except (RankLost, ConfigError, UnsupportedModel):
            raise
        except Exception as error:
            self._losses.raise_cause(error=error)
            raise

    # The listening threads.

    def _on_rank_report(self, rank: int, report: bytes) -> None:
        self._reported.append((rank, report))
        self._wake()

    def _on_rank_lost(self) -> None:
        for process in self._processes:
            process.wake_waiting()
        group.abort()
        self._wake()


def _links(
    config: EngineConfig, auth_token: str, options: RankOptions, on_progress: Progress
) -> Iterator[tuple[Link, Process | None]]:
    """Links to the other ranks, in rank order: started by this process, or joined through the listener."""
    size = config.tensor_parallel_size
    if config.ranks_at is None:
        yield from (start_rank(rank, auth_token, options.start_process) for rank in range(1, size))
        return
    listener = RankListener(config.ranks_at, auth_token)
    try:
        waiting = f"waiting for the other ranks at {config.ranks_at}"
        links = listener.wait_for_ranks(
            size - 1, options.start_s, lambda number: on_progress(f"{waiting} ({number}/{size - 1})", 0.0)
        )
    finally:
        listener.close()
    yield from ((link, None) for link in links)


def _require_possible(config: EngineConfig, transfer: KVTransferConfig | None, placement: RankPlacement) -> None:
    """Raise `ConfigError` or `UnsupportedModel` for errors that can be detected before any process is started."""
    if importlib.util.find_spec("accelerate") is None:
        raise MissingDependency("--tensor-parallel-size", "accelerate", "tp")
    group.require_no_process_group()
    placement.choose_device(config.device)
    read_settings(config, placement)
    if transfer is not None and find_connector(transfer).worker_class().plan_type is None:
        raise ConfigError(
            f"{transfer.kv_connector} works on one rank only: its worker side names no plan_type; use"
            " --tensor-parallel-size 1"
        )
    if config.ranks_at is not None and transfer is not None and _requires_tls(transfer.kv_connector_extra_config):
        raise ConfigError(
            "--ranks-at: traffic between ranks is not encrypted, and --kv-transfer-config asks for TLS; set"
            " tls_control_only if their network is private"
        )


def _requires_tls(options: dict[str, Any]) -> bool:
    """True if a connector's options, or a nested connector's, require TLS for all transfers."""
    is_required = bool(options.get("tls_cert")) and not options.get("tls_control_only")
    return is_required or any(
        _requires_tls(child.get("kv_connector_extra_config", {})) for child in options.get("connectors", ())
    )
