"""What an engine reports about itself, each part counted by its owner."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.engine.blocks.block_pool import BlockPoolStatistics
from kvferry.engine.external_kv import ExternalKVStatistics
from kvferry.engine.scheduler import SchedulerStatistics
from kvferry.observe.metric_fields import computed_gauge, counter


@dataclass(frozen=True)
class EngineSnapshot:
    """An engine's gauges now and its counters since the start. `observe.metric_fields` says how one becomes a
    metric."""

    scheduler: SchedulerStatistics = field(default_factory=SchedulerStatistics)
    external: ExternalKVStatistics = field(default_factory=ExternalKVStatistics)
    blocks: BlockPoolStatistics = field(default_factory=BlockPoolStatistics)
    num_steps: int = counter("kvferry:engine_steps", "Steps of the engine.")
    connector: dict[str, float] = field(default_factory=dict)
    """The connector's own figures, both sides, by name: counters, but for those that `connector_gauges` names."""
    connector_gauges: frozenset[str] = frozenset()

    @computed_gauge("vllm:num_requests_waiting", "Requests that wait to be scheduled, or for their KV.")
    def num_requests_waiting(self) -> int:
        """Requests that wait for their turn or for their KV, as vLLM counts them."""
        return self.scheduler.num_waiting + self.external.num_loading

    @computed_gauge("vllm:num_requests_waiting_by_reason", "Requests that wait, by reason.", label="reason")
    def num_waiting_by_reason(self) -> dict[str, int]:
        """`capacity`: they wait for their turn; `deferred`: for their KV."""
        return {"capacity": self.scheduler.num_waiting, "deferred": self.external.num_loading}
