"""Figures read from instances' metrics."""

from __future__ import annotations

from math import inf

import pytest

from kvferry.dashboard.figures import Figures, gauges, increase, quantile, read_figures, tiers_of, total

TEXT = b"""# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:generation_tokens_total{engine="0"} 1e3
vllm:generation_tokens_total_other 7
vllm:inter_token_latency_seconds_bucket{le="0.01"} 90.0
vllm:inter_token_latency_seconds_bucket{le="0.1"} 100.0
vllm:inter_token_latency_seconds_bucket{le="+Inf"} 100.0
vllm:prompt_tokens_total nan
vllm:num_requests_waiting +Inf
"""


def test_samples_of_one_name_are_added_up_and_shares_are_the_largest() -> None:
    figures = read_figures(TEXT)
    assert figures.values == {"running": 5.0, "kv_used": 0.5, "output_tokens": 1000.0}
    assert figures.itl == {0.01: 90.0, 0.1: 100.0, inf: 100.0}
    assert gauges(figures) == {"running": 5.0, "kv_used": 0.5}


@pytest.mark.parametrize(
    "text", [b"", b"\x00\xff" * 1000, b"vllm:num_requests_running", b"vllm:num_requests_running -"]
)
def test_what_is_no_metric_gives_nothing(text: bytes) -> None:
    assert read_figures(text) == Figures()


def test_counters_of_a_process_that_began_anew_count_from_zero() -> None:
    before, after = Figures({"output_tokens": 100.0, "running": 3.0}), Figures({"output_tokens": 40.0, "running": 1.0})
    assert increase(before, after).values == {"output_tokens": 40.0}
    assert increase(Figures({"output_tokens": 10.0}), after).values == {"output_tokens": 30.0}


def test_instances_are_added_up() -> None:
    parts = [Figures({"output_tokens": 1.0}, {0.1: 2.0}), Figures({"output_tokens": 2.0, "hand_offs": 1.0}, {0.1: 3.0})]
    assert total(parts) == Figures({"output_tokens": 3.0, "hand_offs": 1.0}, {0.1: 5.0})


def test_tiers_of_stores_are_read_by_their_level() -> None:
    several = b"""kvferry:connector_1_kept_bytes{kind=""} 30.0
kvferry:connector_1_loaded_blocks_total{kind=""} 7.0
kvferry:connector_1_tier0_kept_bytes{kind=""} 10.0
kvferry:connector_1_tier0_healthy{kind=""} 1.0
kvferry:connector_1_tier1_kept_bytes{kind=""} 20.0
kvferry:connector_1_tier1_healthy{kind=""} 0.0
kvferry:connector_1_tier1_loaded_blocks_total{kind=""} 7.0
"""
    first, second = tiers_of(read_figures(several))
    assert first == {"kept_bytes": 10.0, "healthy": 1.0}
    assert second == {"kept_bytes": 20.0, "healthy": 0.0, "loaded_blocks": 7.0}
    [only] = tiers_of(read_figures(several.partition(b"kvferry:connector_1_tier0_kept")[0]))
    assert only == {"kept_bytes": 30.0, "loaded_blocks": 7.0}
    grown = increase(read_figures(several), read_figures(several.replace(b" 7.0", b" 9.0")))
    assert grown.tiers == {0: {"loaded_blocks": 0.0}, 1: {"loaded_blocks": 2.0}}
    assert total([grown, grown]).tiers[1] == {"loaded_blocks": 4.0}


def test_quantiles_are_interpolated_within_a_bucket() -> None:
    buckets = {0.01: 90.0, 0.1: 100.0, inf: 100.0}
    assert quantile(buckets, 0.5) == pytest.approx(0.01 * 50 / 90)
    assert quantile(buckets, 0.99) == pytest.approx(0.01 + 0.09 * 0.9)
    assert quantile({0.01: 0.0, inf: 5.0}, 0.5) == 0.01  # all are above the last edge
    assert quantile({}, 0.5) is None
    assert quantile({0.01: 0.0, inf: 0.0}, 0.5) is None
