"""vLLM's connector class. vLLM builds it twice: beside its scheduler, and beside the KV cache of each worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvferry.adapters.vllm import siblings
from kvferry.adapters.vllm.kv_cache.layout import cache_shape, require_attention_only
from kvferry.adapters.vllm.kv_cache.pool import SharedAllocation
from kvferry.adapters.vllm.loads import StepResults
from kvferry.adapters.vllm.messages import RankReport, StepMetadata, WorkerFacts, WorkerReports
from kvferry.adapters.vllm.metrics import KvferryPromMetrics, KvferryStats, Meter
from kvferry.adapters.vllm.pins import Pins
from kvferry.adapters.vllm.scheduler_half import SchedulerHalf
from kvferry.adapters.vllm.sections import Partition
from kvferry.adapters.vllm.settings import publishes_events, read_settings
from kvferry.adapters.vllm.worker_half import WorkerHalf
from kvferry.connectors.api import ConnectorContext, HandsOff, statistics_of
from kvferry.connectors.caching import KeepsBlocks
from kvferry.connectors.registry import find_connector
from kvferry.core.errors import ConfigError, ConnectorLost
from kvferry.core.runtime.threads import build_struct_types


class KvferryConnector(KVConnectorBase_V1):
    """The base of all of kvferry's connectors in vLLM: everything but their name. It implements vLLM's
    `KVConnectorBase_V1`; the docstrings state when vLLM calls each method."""

    connector_name: ClassVar[str]
    """The name in kvferry's registry."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        build_struct_types()
        rank = get_tensor_model_parallel_rank() if role is KVConnectorRole.WORKER else 0
        parallel = vllm_config.parallel_config
        worker = parallel.data_parallel_index * parallel.tensor_parallel_size + rank
        self._settings = read_settings(vllm_config.kv_transfer_config, self.connector_name, worker)
        self._refuse_unsupported_tp_size(parallel.tensor_parallel_size)
        self._shape = cache_shape(vllm_config, kv_cache_config, supports_groups=isinstance(self, SupportsHMA))
        self._worker: WorkerHalf | None = None
        self._scheduler: SchedulerHalf | None = None
        self._pending_requests: dict[str, Request] | None = None if role is KVConnectorRole.WORKER else {}
        """Requests that arrived before the workers' facts; None in a worker, and after the facts have arrived."""
        self._facts: dict[int, WorkerFacts] = {}
        self._pool: BlockPool | None = None
        self._results = StepResults(RankReport(rank))
        self._meter = Meter(rank)
        if role is KVConnectorRole.WORKER:
            self._worker = WorkerHalf(self._settings, self._shape, rank)
        else:
            siblings.claim_hand_offs(self, self._settings)

    def _refuse_unsupported_tp_size(self, tp_size: int) -> None:
        if find_connector(self._settings.transfer).worker_class().plan_type is None and tp_size > 1:
            raise ConfigError(f"{self.connector_name} works on one rank only, and this vLLM has {tp_size}")

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: object) -> bool:
        """False. vLLM 0.33 calls this before anything else; with vLLM 0.32, `cache_shape` refuses sleep mode."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Returns None: any layout. Also raises `ConfigError` for unsupported models: this is vLLM's first call with
        the model's configuration, and for some of these models vLLM itself fails before it builds a connector."""
        require_attention_only(vllm_config.model_config)
        return None

    # Worker: the KV cache.

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """On CPUs, a context in which the KV cache is allocated in shared memory; None: vLLM allocates it itself."""
        tensors = self._kv_cache_config.kv_cache_tensors
        if (
            not self._settings.options.shared_memory
            or not tensors
            or not siblings.claims_allocation(self, self._settings)
        ):
            return None
        if self._vllm_config.device_config.device_type != "cpu":
            return None
        return SharedAllocation(tensors[0].size)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Build the worker side on the KV cache, which vLLM has allocated."""
        group = get_kv_transfer_group() if has_kv_transfer_group() else self
        others = [connector for connector in getattr(group, "_connectors", ()) if connector is not self]
        hands_off = siblings.hands_off(self, self._settings, others)
        self._worker_half().register(
            self._vllm_config, self._kv_cache_config, kv_caches, is_alone=group is self, hands_off=hands_off
        )

    def _worker_half(self) -> WorkerHalf:
        if self._worker is None:
            raise ConnectorLost(f"{type(self).__name__}: called as a worker, and this is vLLM's scheduler")
        return self._worker

    def _step(self) -> StepMetadata:
        return _own_metadata(self._get_connector_metadata())

    # Worker: steps.

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Withdraw the announcements of blocks that vLLM is about to reuse. Called first in a step."""
        self._worker_half().withdraw(_own_metadata(kv_connector_metadata))

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        """Called before the model runs if the model waits for a load of this step, otherwise after it."""
        self._worker_half().start(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Called before a layer's attention."""
        self._worker_half().wait_layer(self._step(), layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: Any) -> None:
        """Called after a layer's attention."""
        self._worker_half().save_layer(self._step(), layer_name)

    def wait_for_save(self) -> None:
        """Called when the model has run (on a GPU: when it is queued). Announces the layers that are not announced
        yet."""
        self._worker_half().end_step(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Called once in each step. `get_block_ids_with_load_errors` and `build_connector_worker_meta` return the other
        parts of its result."""
        step = self._step() if self.has_connector_metadata() else None
        self._results = results = self._worker_half().report(step)
        return KVConnectorTransferResults(results.finished_sending, results.finished_recving, results.failed_recving)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of loads that failed."""
        return self._results.invalid_block_ids

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This rank's report to the scheduler side; None: nothing happened."""
        return WorkerReports([self._results.rank_report]) if self._results.rank_report else None

    # Scheduler.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Called once, before the first step."""
        self._pool = gpu_block_pool

    def _build_scheduler_half(self, facts: WorkerFacts) -> SchedulerHalf:
        """Build the scheduler half, after all workers have reported their facts."""
        options = msgspec.structs.replace(self._settings.options, hand_off=facts.hands_off)
        settings = replace(self._settings, options=options)
        context = ConnectorContext(settings.transfer, facts.layout, settings.auth_token, has_room=self._has_room)
        side = find_connector(settings.transfer).build_scheduler_side(context)
        addresses = [self._facts[rank].address for rank in sorted(self._facts)]
        known_addresses = [address for address in addresses if address is not None]
        if known_addresses and isinstance(side, HandsOff):
            side.set_addresses(known_addresses)
        # With data parallelism all engines step together, so none may delay the others.
        is_data_parallel = self._vllm_config.parallel_config.data_parallel_size > 1
        return SchedulerHalf(
            settings,
            side,
            facts.layout,
            Partition(self._shape.windows, self._shape.block_size),
            Pins(self._pool),
            siblings.salts(settings, self._vllm_config.lora_config),
            with_events=publishes_events(self._vllm_config),
            idle=siblings.idle_pause(settings, pauses=not is_data_parallel),
            is_alone=facts.is_alone,
        )

    def _has_room(self, num_blocks: int) -> bool:
        """True if blocks may be reserved for KV that is not computed yet (`ConnectorContext.has_room`). In vLLM, a
        request that waits for a load does not count against `max_num_seqs`."""
        if self._pool is None:
            return True
        longest = -(-self._vllm_config.model_config.max_model_len // self._shape.block_size)
        num_groups, num_free = len(self._shape.groups), self._pool.get_num_free_blocks()
        return num_free - num_blocks * num_groups >= max(longest * num_groups, self._pool.num_gpu_blocks // 2)

    def _scheduler_half(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise ConnectorLost(f"{type(self).__name__}: called as a scheduler in a worker, or when it was shut down")
        return self._scheduler

    def on_new_request(self, request: Request) -> None:
        """Called first for a request."""
        if self._pending_requests is not None:
            self._pending_requests[request.request_id] = request
        else:
            self._scheduler_half().add(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Number of tokens that can be loaded (None: not known yet, vLLM calls again), and True if the request waits
        for them."""
        if self._pending_requests is not None:
            return None, False
        return self._scheduler_half().match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Called when vLLM has reserved blocks for the request."""
        self._scheduler_half().allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The work of the workers in this step. Until all workers have reported their facts, it is empty."""
        if self._pending_requests is not None:
            return StepMetadata(None, computes=scheduler_output.total_num_scheduled_tokens > 0)
        return self._scheduler_half().plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Handle the workers' reports. Raises `ConnectorLost` for reports that are not kvferry's."""
        reports = connector_output.kv_connector_worker_meta
        if reports is not None and not isinstance(reports, WorkerReports):
            raise ConnectorLost(f"vLLM passed {type(reports).__name__} as a report of kvferry's workers")
        if self._pending_requests is not None:
            self._facts |= (
                {report.rank: report.facts for report in reports.ranks if report.facts} if reports is not None else {}
            )
            if len(self._facts) < self._vllm_config.parallel_config.tensor_parallel_size:
                return
            self._scheduler, pending, self._pending_requests = (
                self._build_scheduler_half(self._facts[0]),
                self._pending_requests,
                None,
            )
            for request in pending.values():
                self._scheduler.add(request)
        self._scheduler_half().completed(reports)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Returns True if vLLM must keep the request's blocks for now, and the request's ticket."""
        return self._finish(request, [block_ids])

    def _finish(self, request: Request, block_ids: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        if self._pending_requests is not None:
            self._pending_requests.pop(request.request_id, None)
            return False, None
        return self._scheduler_half().finish(request, block_ids)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """KV events for vLLM to publish."""
        events = self._scheduler.events if self._scheduler is not None else None
        return events.take() if events is not None else ()

    def has_pending_push_work(self) -> bool:
        """True if vLLM must step although no request is left."""
        return self._pending_requests is not None or (self._scheduler is not None and self._scheduler.has_work())

    def reset_cache(self) -> bool:
        """Drop KV that is kept for reuse, because the weights have changed; False if that is not possible."""
        if self._pending_requests is not None:
            return True
        side = self._scheduler_half().side
        return not isinstance(side, KeepsBlocks) or side.reset_cache()

    # Both.

    def shutdown(self) -> None:
        """Close connections and release memory. May be called twice."""
        siblings.forget(self, self._settings)
        if self._worker is not None:
            self._worker.close()
        self._pending_requests = None
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            scheduler.side.close()

    # Metrics.

    def get_kv_connector_stats(self) -> KvferryStats | None:
        """Metrics that have changed since the last call."""
        if self._worker is not None:
            return self._meter.read("worker", statistics_of(self._worker.side))
        if self._scheduler is None:
            return None
        return self._meter.read("scheduler", self._scheduler.statistics())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvferryStats:
        """Metrics from their serialized form."""
        return KvferryStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvferryPromMetrics:
        """Register this connector's metrics in vLLM's Prometheus registry."""
        return KvferryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, cls.connector_name)


class KvferryGroupsConnector(KvferryConnector, SupportsHMA):
    """The base for connectors that support several KV cache groups. vLLM uses its hybrid KV cache manager for models
    with sliding windows only if the connector's class derives from `SupportsHMA`."""

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns True if vLLM must keep the request's blocks for now, and the request's ticket."""
        return self._finish(request, block_ids)


def _own_metadata(metadata: KVConnectorMetadata) -> StepMetadata:
    """The metadata that `build_connector_meta` returned, as vLLM passes it to the worker. Raises `ConnectorLost` for
    any other object."""
    if not isinstance(metadata, StepMetadata):
        raise ConnectorLost(f"vLLM passed {type(metadata).__name__} as the metadata of kvferry's connector")
    return metadata
