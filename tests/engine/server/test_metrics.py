"""What a scrape says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.core.clock import ManualClock
from kvferry.core.messages.timeline import Timeline
from kvferry.engine.blocks.block_pool import BlockPoolStatistics
from kvferry.engine.scheduling.external_kv import ExternalKVStatistics
from kvferry.engine.scheduling.scheduler import SchedulerStatistics
from kvferry.engine.statistics import EngineSnapshot
from kvferry.observe.metric_fields import counter
from kvferry.observe.metrics import EngineMetrics

STATISTICS = EngineSnapshot(
    SchedulerStatistics(
        num_running=2,
        num_waiting=3,
        num_preemptions=5,
        num_context_recomputes=7,
        num_prefix_queries=64,
        num_prefix_hits=32,
    ),
    ExternalKVStatistics(num_loading=1, num_held=4, num_external_hits=16, num_load_failures={"PeerLost": 2}),
    BlockPoolStatistics(num_blocks=100, num_free=75, num_cached=30, num_evicted=8),
    num_steps=9,
    connector={
        "bytes sent": 12.0,
        "taken_bytes_shm": 5.0,
        "taken_bytes_tcp": 6.0,
        "failed_LeaseEnded": 1.0,
        "num_loading": 3.0,
    },
    connector_gauges=frozenset({"num_loading"}),
)


def scrape(metrics: EngineMetrics, statistics: EngineSnapshot | None = STATISTICS) -> dict[str, float]:
    """Samples by name and by the labels that are not on all of them."""
    text = metrics.exposition(statistics)[0].decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            assert "model_name" in sample.labels
            found[sample.name + "".join(f"[{value}]" for value in labels.values())] = sample.value
    return found


def test_the_engines_figures_have_vllms_names() -> None:
    found = scrape(EngineMetrics("m"))
    assert found["vllm:num_requests_running"] == 2
    assert found["vllm:num_requests_waiting"] == 4
    assert found["vllm:num_requests_waiting_by_reason[capacity]"] == 3
    assert found["vllm:num_requests_waiting_by_reason[deferred]"] == 1
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert found["vllm:num_preemptions_total"] == 5
    assert found["vllm:prefix_cache_queries_total"] == 64
    assert found["vllm:prefix_cache_hits_total"] == 32
    assert found["vllm:external_prefix_cache_hits_total"] == 16
    assert found["kvferry:num_hand_offs_held"] == 4
    assert found["kvferry:kv_load_failures_total[PeerLost]"] == 2
    assert found["kvferry:num_recomputed_total"] == 7
    assert found["kvferry:connector_bytes_sent_total[]"] == 12
    assert found["kvferry:connector_taken_bytes_total[shm]"] == 5
    assert found["kvferry:connector_taken_bytes_total[tcp]"] == 6
    assert found["kvferry:connector_failed_total[LeaseEnded]"] == 1
    assert found["kvferry:connector_num_loading[]"] == 3


def test_a_new_figure_is_one_edit() -> None:
    @dataclass
    class WithOneMore(SchedulerStatistics):
        num_naps: int = counter("kvferry:naps", "Naps taken.")

    found = scrape(EngineMetrics("m"), EngineSnapshot(WithOneMore(num_naps=3)))
    assert found["kvferry:naps_total"] == 3


def test_an_engine_that_cannot_be_asked_leaves_the_requests() -> None:
    found = scrape(EngineMetrics("m"), None)
    assert "vllm:num_requests_running" not in found
    assert found["vllm:request_success_total[stop]"] == 0


def test_a_request_is_observed_as_it_goes() -> None:
    metrics, clock = EngineMetrics("m"), ManualClock(100.0)
    with metrics.track(num_prompt_tokens=10, arrived=99.0, clock=clock) as tracker:
        tracker.record_tokens(0)
        tracker.record_tokens(1)
        for _ in range(3):
            clock.advance(0.25)
            tracker.record_tokens(2)
        timeline = Timeline(
            prefill_queued=99.0, prefill_started=99.5, prefill_done=100.0, first_token=100.0, done=101.0
        )
        tracker.record_end("length", timeline)
    found = scrape(metrics)
    assert found["vllm:prompt_tokens_total"] == 10
    assert found["vllm:generation_tokens_total"] == 7
    assert found["vllm:time_to_first_token_seconds_sum"] == 1.0
    assert found["vllm:inter_token_latency_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_sum"] == 0.75
    assert found["vllm:e2e_request_latency_seconds_sum"] == 1.75
    assert found["vllm:request_queue_time_seconds_sum"] == 0.5
    assert found["vllm:request_prefill_time_seconds_sum"] == 0.5
    assert found["vllm:request_decode_time_seconds_sum"] == 1.0
    assert found["kvferry:request_transfer_time_seconds_count"] == 0
    assert found["vllm:request_success_total[length]"] == 1
    assert found["vllm:request_generation_tokens_sum"] == 7


def test_a_decode_instance_leaves_the_prefill_to_the_other() -> None:
    metrics, clock = EngineMetrics("m"), ManualClock(100.0)
    timeline = Timeline(
        prefill_queued=1.0, prefill_started=2.0, prefill_done=3.0, decode_queued=3.0, decode_started=5.0,
        transfer_started=3.0, transfer_done=4.0, first_token=3.0, done=9.0,
    )  # fmt: skip
    with metrics.track(10, 99.0, clock) as tracker:
        tracker.record_end("stop", timeline)
    found = scrape(metrics)
    assert found["vllm:request_prefill_time_seconds_count"] == 0
    assert found["kvferry:request_transfer_time_seconds_sum"] == 1.0
    assert found["kvferry:request_decode_queue_time_seconds_sum"] == 2.0
    assert found["vllm:request_decode_time_seconds_sum"] == 6.0


@pytest.mark.parametrize(("error", "reason"), [(ValueError(), "error"), (asyncio.CancelledError(), "abort")])
def test_a_request_that_is_cut_short_is_counted(error: BaseException, reason: str) -> None:
    metrics = EngineMetrics("m")
    with pytest.raises(type(error)), metrics.track(10, 99.0, ManualClock(100.0)):
        raise error
    assert scrape(metrics)[f"vllm:request_success_total[{reason}]"] == 1


def test_every_metric_has_a_type() -> None:
    text = EngineMetrics("m").exposition(STATISTICS)[0].decode()
    kinds = {line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}
    assert kinds <= {"counter", "gauge", "histogram"}
