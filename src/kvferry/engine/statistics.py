"""An engine's statistics, each part counted by its owner."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.engine.blocks.block_pool import BlockPoolStatistics
from kvferry.engine.scheduling.external_kv import ExternalKVStatistics
from kvferry.engine.scheduling.scheduler import SchedulerStatistics
from kvferry.observe.metric_fields import computed_gauge, counter


@dataclass(frozen=True)
class EngineSnapshot:
    """An engine's gauges now and its counters since the start. `observe.metric_fields` turns them into
    metrics."""

    scheduler: SchedulerStatistics = field(default_factory=SchedulerStatistics)
    external_kv: ExternalKVStatistics = field(default_factory=ExternalKVStatistics)
    blocks: BlockPoolStatistics = field(default_factory=BlockPoolStatistics)
    num_steps: int = counter("kvferry:engine_steps", "Steps in which the engine has computed something.")
    connector: dict[str, float] = field(default_factory=dict)
    """The connector's own statistics, of both sides, by name: counters, except the names in `connector_gauges`."""
    connector_gauges: frozenset[str] = frozenset()

    @computed_gauge("vllm:num_requests_waiting", "Requests that wait to be scheduled, or for their KV.")
    def num_requests_waiting(self) -> int:
        """Number of requests that wait to be scheduled or for their KV, as vLLM counts them."""
        return self.scheduler.num_waiting + self.external_kv.num_loading

    @computed_gauge("vllm:num_requests_waiting_by_reason", "Requests that wait, by reason.", label="reason")
    def num_waiting_by_reason(self) -> dict[str, int]:
        """Number of waiting requests by reason. `capacity`: they wait to be scheduled; `deferred`: for their KV."""
        return {"capacity": self.scheduler.num_waiting, "deferred": self.external_kv.num_loading}
