"""A connector's figures as Prometheus has them, with prometheus_client itself and no vLLM around."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

pytestmark = pytest.mark.vllm


@pytest.fixture
def metrics() -> Iterator[Any]:
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    from kvferry.adapters.vllm.metrics import KvferryPromMetrics

    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    yield KvferryPromMetrics(config, types, ["engine"], {0: ["0"], 1: ["1"]}, "P2pConnector")
    unregister_vllm_metrics()


def lines() -> dict[str, float]:
    """What is scraped, but for the times at which metrics were made."""
    text = generate_latest(REGISTRY).decode()
    found = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("vllm:kvferry"))
    return {name: float(value) for name, value in found if "_created{" not in name}


def test_counters_are_counters_and_gauges_gauges(metrics: Any) -> None:
    figures = {
        "taken": 2.0,
        "taken_bytes_shm": 96.0,
        "failed_LeaseEnded": 1.0,
        "held_bytes": 48.0,
        "taken_seconds": 0.5,
    }
    metrics.observe({"worker": {"0": figures}})
    labels = 'engine="0",kind="{}",side="worker"'
    assert lines() == {
        f"vllm:kvferry_p2p_connector_{name}{{{labels.format(kind)}}}": value
        for name, kind, value in (
            ("taken_total", "", 2.0),
            ("taken_bytes_total", "shm", 96.0),
            ("failed_total", "LeaseEnded", 1.0),
            ("held_bytes", "", 48.0),
            ("taken_seconds_total", "", 0.5),
        )
    }
    kinds = {
        line.split()[2]: line.split()[3]
        for line in generate_latest(REGISTRY).decode().splitlines()
        if "# TYPE vllm:kvferry" in line
    }
    assert kinds["vllm:kvferry_p2p_connector_taken_total"] == "counter"
    assert kinds["vllm:kvferry_p2p_connector_held_bytes"] == "gauge"


def test_what_came_is_added_up_over_ranks_and_never_falls(metrics: Any) -> None:
    taken = 'vllm:kvferry_p2p_connector_taken_total{engine="1",kind="",side="worker"}'
    held = 'vllm:kvferry_p2p_connector_held_bytes{engine="1",kind="",side="worker"}'
    seen = []
    for rank, count, num_bytes in (
        ("0", 2.0, 10.0),
        ("1", 3.0, 5.0),
        ("0", 4.0, 0.0),
        ("0", 0.0, 0.0),
        ("0", 1.0, 7.0),
    ):
        metrics.observe({"worker": {rank: {"taken": count, "held_bytes": num_bytes}}}, engine_idx=1)
        seen.append((lines()[taken], lines()[held]))
    # The fourth is of a rank that counts from 0 again.
    assert seen == [(2.0, 10.0), (5.0, 15.0), (7.0, 5.0), (7.0, 5.0), (8.0, 12.0)]


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        ("taken", ("taken", "")),
        ("failed_TransferTimeout", ("failed", "TransferTimeout")),
        ("lost_LayoutMismatch", ("lost", "LayoutMismatch")),
        ("taken_bytes_my-pipe", ("taken_bytes", "my-pipe")),
        ("ended_taken", ("ended_taken", "")),
        ("num_keys", ("num_keys", "")),
    ],
)
def test_a_figure_and_its_kind(figure: str, expected: tuple[str, str]) -> None:
    from kvferry.observe.metric_fields import split_metric_name

    assert split_metric_name(figure) == expected


def test_names_are_in_snake_case() -> None:
    from kvferry.adapters.vllm.metrics import metric_name

    assert metric_name("P2pNcclConnector", "taken") == "vllm:kvferry_p2p_nccl_connector_taken"
    assert metric_name("my.module:Class", "some-figure_total") == "vllm:kvferry_my_module_class_some_figure"
