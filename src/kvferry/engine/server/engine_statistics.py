"""What the engine reports about itself, as the metrics want it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.observe.metrics import EngineStatistics

if TYPE_CHECKING:  # the server imports without torch
    from kvferry.engine.engine import EngineSnapshot


def engine_statistics(snapshot: EngineSnapshot) -> EngineStatistics:
    """The snapshot's figures under the metrics' names."""
    scheduler, blocks = snapshot.scheduler, snapshot.blocks
    return EngineStatistics(
        num_requests_running=scheduler.num_running,
        num_requests_waiting=scheduler.num_waiting,
        num_requests_loading=scheduler.num_loading,
        num_hand_offs_held=scheduler.num_held,
        num_blocks=blocks.num_blocks,
        num_used_blocks=blocks.num_blocks - blocks.num_free,
        num_steps=snapshot.num_steps,
        num_preemptions=scheduler.num_preemptions,
        num_prefix_queries=scheduler.num_prefix_queries,
        num_prefix_hits=scheduler.num_prefix_hits,
        num_external_hits=scheduler.num_external_hits,
        num_load_failures=dict(scheduler.num_load_failures),
        num_recomputed=scheduler.num_recomputed,
        connector=dict(snapshot.connector),
        connector_gauges=snapshot.connector_gauges,
    )
