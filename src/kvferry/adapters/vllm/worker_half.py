"""The half of a connector beside vLLM's KV cache: vLLM's calls on one side, a `WorkerSide` on the other.

Owns the worker side, and what it was told of each load. In one step vLLM calls, in this order: `begin` before blocks
that were given back are written to; `start` before the model runs, or after it; `wait_layer` and `save_layer` around
each layer's attention, or not at all when a CUDA graph is replayed; `end_step`; `report`.

On a GPU the model has only been queued when those calls come. Layers are therefore announced at the end of a step, when
the device is done with it. Never run on a GPU.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvferry.adapters.vllm import pool
from kvferry.adapters.vllm.fingerprint import model_fingerprint
from kvferry.adapters.vllm.layout import KVCacheShape, allocation, block_memory, kv_layout
from kvferry.adapters.vllm.messages import RankReport, StepMetadata, WorkerFacts
from kvferry.adapters.vllm.parts import by_group
from kvferry.adapters.vllm.settings import AdapterSettings, publishes_events
from kvferry.connectors.api import (
    ConnectorContext,
    Failed,
    HasAddress,
    HasStoreEvents,
    Loaded,
    Prefilled,
    Released,
    TransferEvent,
    TransferReport,
    WorkerSide,
)
from kvferry.connectors.ranks import RankReports
from kvferry.connectors.registry import find_connector
from kvferry.connectors.report_codec import encode_report
from kvferry.core.errors import LeakError, TransferError
from kvferry.transport.memory import Region

log = logging.getLogger(__name__)


@dataclass
class StepResults:
    """What vLLM wants to hear after a step."""

    rank_report: RankReport
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)


@dataclass
class _Load:
    """A load that vLLM lets a request wait for, and whether it was told of its end."""

    block_ids: list[int]
    reported: bool = False


class WorkerHalf:
    """See the module. Used from vLLM's worker thread only."""

    def __init__(self, settings: AdapterSettings, shape: KVCacheShape, rank: int) -> None:
        self._settings, self._shape, self._rank = settings, shape, rank
        self._slots = {name: slot for group in shape.groups for slot, name in enumerate(group.layer_names)}
        self._num_slots = len(shape.widest.layer_names)
        self._num_layers = Counter(self._slots.values())
        self._joined = RankReports(len(shape.groups))
        self._step: StepMetadata | None = None
        self._started = False
        self._written: Counter[int] = Counter()
        self._loads: dict[str, _Load] = {}
        self._step_loads: dict[str, list[int]] = {}
        self._on_gpu = False
        self._segment: pool.PooledSegment | None = None
        self._events: HasStoreEvents | None = None
        self.side: WorkerSide | None = None
        self.facts: WorkerFacts

    # Life.

    def register(self, vllm_config: Any, kv_cache_config: object, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """The KV cache is there: build the worker side on it. Raises `ConfigError` when it cannot be moved."""
        kv_caches = {name: kv_caches[name] for name in self._shape.layer_names}
        fingerprint = self._settings.options.model_fingerprint or model_fingerprint(vllm_config)
        layout = kv_layout(vllm_config, self._shape, kv_caches, fingerprint, self._rank)
        address, num_bytes = allocation(kv_caches)
        device = str(next(iter(kv_caches.values())).device)
        self._on_gpu = device != "cpu"
        self._segment = pool.find_segment(address)
        region = Region(address, num_bytes, self._segment.name if self._segment is not None else None)
        memory = block_memory(layout, self._shape, kv_cache_config, region, device)
        context = ConnectorContext(self._settings.transfer, layout, self._settings.auth_token)
        side = find_connector(self._settings.transfer).build_worker_side(context)
        side.register(memory)
        if publishes_events(vllm_config) and isinstance(side, HasStoreEvents):
            side.watch_store()
            self._events = side
        self.side = side
        self.facts = WorkerFacts(layout, side.address() if isinstance(side, HasAddress) else None)
        log.info(
            "%s: %d blocks of %d bytes in %s, %s",
            self._settings.transfer.kv_connector,
            memory.num_blocks,
            layout.block_bytes,
            "shared memory" if region.segment else f"{device} memory",
            layout.packing,
        )

    def close(self) -> None:
        """End every transfer."""
        side, self.side = self.side, None
        if side is not None:
            side.close()
        if self._segment is not None:
            self._segment.release()
            self._segment = None

    # Steps.

    def begin(self, step: StepMetadata) -> None:
        """Void what was announced of blocks that are no longer its request's."""
        self._step, self._started = step, False
        self._written.clear()
        if step.plan is not None and self.side is not None:
            self.side.withdraw(step.plan)

    def start(self, step: StepMetadata, *, model_has_run: bool) -> None:
        """Begin the step's work, once: as soon as what is in the KV cache is what was computed."""
        if self._started or self.side is None:
            return
        if self._on_gpu and step.plan is not None:
            if not model_has_run and not step.step_loads:
                return  # blocks of the step before may still be in the making: later, when the device is done
            torch.accelerator.synchronize()
        self._started = True
        for request_id, block_ids in step.loads.items():
            self._loads[request_id] = _Load(block_ids)
        self._step_loads.update(step.step_loads)
        if step.plan is not None:
            self.side.start(step.plan)
        if self._on_gpu and step.step_loads:
            for slot in range(self._num_slots):
                self.side.wait_layer(slot)

    def wait_layer(self, layer_name: str) -> None:
        """Before a layer's attention."""
        slot = self._slots.get(layer_name)
        if slot is not None and self.side is not None and self._started and not self._on_gpu:
            self.side.wait_layer(slot)

    def save_layer(self, layer_name: str) -> None:
        """After a layer's attention. A slot is written when its layers of all groups are."""
        slot = self._slots.get(layer_name)
        if slot is not None and self.side is not None and self._started and not self._on_gpu:
            self._written[slot] += 1
            if self._written[slot] == self._num_layers[slot]:
                self.side.save_layer(slot)

    def end_step(self, step: StepMetadata) -> None:
        """After the model ran, if it did: layers that no call came for have their KV by now too."""
        if self.side is None or not step.computes:
            return
        if self._on_gpu and step.plan is not None:
            torch.accelerator.synchronize()
        for slot in range(self._num_slots):
            if self._written[slot] < self._num_layers[slot]:
                self.side.save_layer(slot)
        self._written.clear()
        self.side.flush()

    def report(self, step: StepMetadata | None) -> StepResults:
        """What happened since the last report."""
        results = StepResults(RankReport(self._rank))
        if step is not None:
            results.finished_recving |= step.refused
            results.failed_recving |= step.refused
        if self.side is not None:
            self._sort(self._of_requests(self.side.poll(), step), results)
        if self._events is not None:
            results.rank_report.store = self._events.store_events()
        for request_id in step.forgotten if step is not None else ():
            self._loads.pop(request_id, None)
        return results

    def check(self) -> None:
        """Raise `LeakError` when something is kept of requests that are gone."""
        if self._loads or self._step_loads:
            raise LeakError(f"loads of vLLM's requests {[*self._loads, *self._step_loads][:8]} are not forgotten")
        self._joined.check()

    def _of_requests(self, report: TransferReport, step: StepMetadata | None) -> TransferReport:
        """What became true of whole requests, when the connector knows only their parts."""
        if len(self._shape.groups) == 1:
            return report
        for group, part in by_group(report).items():
            self._joined.add(group, part)
        for request_id, groups in step.not_held.items() if step is not None else ():
            for group in groups:
                self._joined.add(group, [Released(request_id)])
        return [_whole_or_failed(event) for event in self._joined.take()]

    def _sort(self, report: TransferReport, results: StepResults) -> None:
        for event in report:
            self._note(event, results)
        kept = [event for event in report if not isinstance(event, Prefilled)]  # vLLM's D draws the first token itself
        results.rank_report.transfers = encode_report(kept) if kept else b""

    def _note(self, event: TransferEvent, results: StepResults) -> None:
        request_id = event.request_id
        match event:
            case Loaded(num_tokens=num_tokens):
                self._load_ended(request_id, results)
                if num_tokens is not None and request_id in self._loads:
                    missing = self._loads[request_id].block_ids[num_tokens // self._shape.block_size :]
                    results.invalid_block_ids.update(missing)
                self._step_loads.pop(request_id, None)
            case Failed():
                self._load_ended(request_id, results)
                if request_id in self._loads:
                    results.failed_recving.add(request_id)
                results.invalid_block_ids.update(self._step_loads.pop(request_id, ()))
            case Released() if request_id in self._loads:  # an aborted load: vLLM lets its blocks go with its end
                self._load_ended(request_id, results)
                del self._loads[request_id]
            case Released():
                results.finished_sending.add(request_id)

    def _load_ended(self, request_id: str, results: StepResults) -> None:
        load = self._loads.get(request_id)
        if load is not None and not load.reported:
            load.reported = True
            results.finished_recving.add(request_id)


def _whole_or_failed(event: TransferEvent) -> TransferEvent:
    """vLLM takes no word of single blocks where there are several groups."""
    if isinstance(event, Loaded) and event.num_tokens is not None:
        return Failed(event.request_id, TransferError("only the KV of the prompt's beginning came"))
    return event
