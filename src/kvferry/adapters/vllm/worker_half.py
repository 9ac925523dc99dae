"""The half of a connector beside vLLM's KV cache, which translates vLLM's calls to calls of a `WorkerSide`.

Owns the worker side. The order of vLLM's calls in one step:

- if the model needs a load of this step: `withdraw`, `start`, the layers, `end_step`, `report`;
- otherwise: `withdraw`, the layers, `start`, `end_step`, `report`.

`withdraw` comes before blocks that were freed are written to. For each layer, vLLM calls `wait_layer` before its
attention and `save_layer` after it. When a CUDA graph is replayed, these two are not called.

On the CPU, the first call for the step's layers begins the step's work, so that layers are announced while the model
runs. On a GPU, the model is only queued when the calls come. There each layer leaves a mark in the stream, and after
the model has been queued the layers are announced one by one, as the device reaches their marks.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvferry.adapters.vllm.identity.fingerprint import model_fingerprint
from kvferry.adapters.vllm.kv_cache import pool
from kvferry.adapters.vllm.kv_cache.device import CpuDevice, Device, DeviceMark, device_of
from kvferry.adapters.vllm.kv_cache.layout import KVCacheShape, allocation, block_memory, kv_layout
from kvferry.adapters.vllm.loads import Loads, StepResults
from kvferry.adapters.vllm.messages import RankReport, StepMetadata, WorkerFacts
from kvferry.adapters.vllm.settings import AdapterSettings, publishes_events
from kvferry.connectors.api import (
    ByLayers,
    ConnectorContext,
    ServesPeers,
    StepPlan,
    TransferReport,
    WorkerSide,
)
from kvferry.connectors.caching import StoresBlocks
from kvferry.connectors.registry import find_connector
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.runtime.closing import close_all
from kvferry.transport.memory import Region

logger = logging.getLogger(__name__)


@dataclass
class _Progress:
    """The state of one step."""

    step: StepMetadata
    previous_work: DeviceMark
    """A mark after all work of earlier steps."""
    is_started: bool = False
    marks: defaultdict[int, list[DeviceMark]] = field(default_factory=lambda: defaultdict(list))
    """The marks of the computed layers at each layer position (`_LayerPositions`); several for one layer if vLLM runs a
    step in micro-batches."""


class _LayerPositions:
    """The layer position of each layer by its name, and the number of layers at each position. Position k has the k-th
    layer of every KV cache group (`KVCacheShape`)."""

    def __init__(self, shape: KVCacheShape) -> None:
        self.of_layer = {
            name: layer_position for group in shape.groups for layer_position, name in enumerate(group.layer_names)
        }
        self.count = len(shape.widest.layer_names)
        self.num_layers = Counter(self.of_layer.values())


class WorkerHalf:
    """Calls a `WorkerSide` in the order that its contract requires. Used from vLLM's worker thread only."""

    def __init__(self, settings: AdapterSettings, shape: KVCacheShape, rank: int) -> None:
        self._settings, self._shape, self._rank = settings, shape, rank
        self._layer_positions = _LayerPositions(shape)
        self._loads = Loads(shape.block_size, len(shape.groups))
        self._progress: _Progress | None = None
        self._device: Device = CpuDevice()
        self._segment: pool.PooledSegment | None = None
        self._events: StoresBlocks | None = None
        self._has_report = threading.Event()
        """Set when the worker side has a report."""
        self.side: WorkerSide[StepPlan] | None = None
        self.facts: WorkerFacts
        self._unreported_facts: WorkerFacts | None = None
        """`facts`, until they are reported."""

    # Life.

    def register(
        self,
        vllm_config: Any,
        kv_cache_config: object,
        kv_caches: Mapping[str, torch.Tensor],
        *,
        is_alone: bool = True,
        hands_off: bool = True,
    ) -> None:
        """Build the worker side on the allocated KV cache. `is_alone`, `hands_off`: see `WorkerFacts`. Raises
        `ConfigError` if the cache cannot be moved."""
        kv_caches = {name: kv_caches[name] for name in self._shape.layer_names}
        fingerprint = model_fingerprint(vllm_config, self._settings.options.model_fingerprint)
        mix_kernels = self._settings.options.mix_kernels
        layout = kv_layout(vllm_config, self._shape, kv_caches, fingerprint, self._rank, mix_kernels=mix_kernels)
        address, num_bytes = allocation(kv_caches)
        device = str(next(iter(kv_caches.values())).device)
        self._segment = pool.find_segment(address)
        region = Region(address, num_bytes, self._segment.name if self._segment is not None else None)
        memory = block_memory(layout, self._shape, kv_cache_config, region, device)
        # Each layer's mark is waited for before the layer is saved.
        context = ConnectorContext(self._settings.transfer, layout, self._settings.auth_token, saves_are_complete=True)
        side = find_connector(self._settings.transfer).build_worker_side(context)
        side.register(memory)
        self.attach(side, device_of(device))
        if publishes_events(vllm_config) and isinstance(side, StoresBlocks):
            side.watch_store()
            self._events = side
        peer_address = side.address() if isinstance(side, ServesPeers) else None
        self.facts = self._unreported_facts = WorkerFacts(layout, peer_address, is_alone, hands_off)
        logger.info(
            "%s: %d blocks of %d bytes in %s, %s",
            self._settings.transfer.kv_connector,
            memory.num_blocks,
            layout.block_bytes,
            "shared memory" if region.segment else f"{device} memory",
            layout.packing,
        )

    def attach(self, side: WorkerSide[StepPlan], device: Device) -> None:
        """Use a worker side whose memory is registered. `device`: computes the model."""
        self.side, self._device = side, device
        side.on_report(self._has_report.set)

    def close(self) -> None:
        """End all transfers."""
        side, self.side = self.side, None
        segment, self._segment = self._segment, None
        close_all(*([side.close] if side is not None else []), *([segment.release] if segment is not None else []))

    # Steps.

    @property
    def _layers(self) -> ByLayers:
        """The side's hooks around each layer; hooks without effect if the worker side does not work by layers."""
        side = self.side
        return side if side is not None and isinstance(side, ByLayers) else ByLayers()

    def withdraw(self, step: StepMetadata) -> None:
        """Withdraw the announcements of blocks that no longer belong to their request."""
        if step.plan is not None and self.side is not None and isinstance(self.side, ServesPeers):
            self.side.withdraw(step.plan)

    def start(self, step: StepMetadata) -> None:
        """Begin the step's work, unless an earlier call of the step has done so."""
        progress = self._progress_of(step)
        if progress.is_started or self.side is None:
            return
        progress.is_started = True
        self._loads.begin(step)
        if step.plan is not None:
            progress.previous_work.wait()  # work of earlier steps may still use the blocks
            self.side.start(step.plan)
        if self._device.is_asynchronous and step.step_loads:
            for layer_position in range(self._layer_positions.count):
                self._layers.wait_layer(layer_position)

    def wait_layer(self, step: StepMetadata, layer_name: str) -> None:
        """Called before a layer's attention; on the CPU, blocks until the layer is loaded."""
        layer_position = self._layer_positions.of_layer.get(layer_name)
        if layer_position is None or self.side is None:
            return
        self._progress_of(step)
        if not self._device.is_asynchronous:
            self.start(step)
            self._layers.wait_layer(layer_position)

    def save_layer(self, step: StepMetadata, layer_name: str) -> None:
        """Called after a layer's attention. A layer position is complete when its layers of all groups are computed."""
        layer_position = self._layer_positions.of_layer.get(layer_name)
        if layer_position is None or self.side is None or step.plan is None:
            return
        progress = self._progress_of(step)
        progress.marks[layer_position].append(self._device.mark())
        if (
            not self._device.is_asynchronous
            and len(progress.marks[layer_position]) == self._layer_positions.num_layers[layer_position]
        ):
            self.start(step)
            self._layers.save_layer(layer_position)

    def end_step(self, step: StepMetadata) -> None:
        """Called after the model has run: announce the layers without a call of `save_layer`."""
        if self.side is None or not step.computes:
            return
        if step.plan is not None:
            self._save_remaining(self._progress_of(step))
        self.side.flush()

    def _save_remaining(self, progress: _Progress) -> None:
        """Announce the remaining layers in the order in which the device computes them."""
        end_mark = self._device.mark()
        for layer_position in range(self._layer_positions.count):
            marks = progress.marks[layer_position]
            is_complete = len(marks) >= self._layer_positions.num_layers[layer_position]
            if is_complete and not self._device.is_asynchronous:
                continue  # announced when it was written
            for mark in marks if is_complete else [end_mark]:
                mark.wait()
            self._layers.save_layer(layer_position)

    def _progress_of(self, step: StepMetadata) -> _Progress:
        if self._progress is None or self._progress.step is not step:
            self._progress = _Progress(step, self._device.mark())
        return self._progress

    def report(self, step: StepMetadata | None) -> StepResults:
        """Return the results since the last report."""
        results = StepResults(RankReport(self._rank, facts=self._unreported_facts))
        self._unreported_facts = None
        if step is not None:
            # vLLM expects a load that failed in both sets.
            results.finished_recving |= step.refused
            results.failed_recving |= step.refused
        forgotten = step.forgotten if step is not None else set()
        self._loads.forget(forgotten, unless_running=True)
        if self.side is not None:
            wait_s = 0.0 if step is None or self._loads.have_ended else step.wait_s  # another rank may load for longer
            not_held = step.not_held if step is not None else {}
            self._loads.add_results(self._poll(self.side, wait_s), not_held, results)
        if self._events is not None:
            results.rank_report.store = self._events.store_events()
        self._loads.forget(forgotten)
        return results

    def _poll(self, side: WorkerSide[StepPlan], wait_s: float) -> TransferReport:
        """The side's report. If it is empty now, wait up to `wait_s` seconds for one that is not."""
        deadline = SYSTEM_CLOCK.monotonic() + wait_s
        while True:
            self._has_report.clear()
            report = self._loads.translate_for_vllm(side.poll())
            left_s = deadline - SYSTEM_CLOCK.monotonic()
            if report or left_s <= 0 or not self._has_report.wait(left_s):
                return report

    def check(self) -> None:
        """Raise `LeakError` if state of ended requests is left."""
        self._loads.check()
