"""Events of a server that has metrics and no page."""

from __future__ import annotations

import json

import pytest

from kvferry.cli.watch.follow import engine_of, scraped_events
from kvferry.core.clock import ManualClock
from kvferry.core.errors import ConfigError

METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m"} 1.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{model_name="m"} %d
"""


@pytest.mark.parametrize(
    ("text", "engine"), [(b"kvferry:x 1\nvllm:y 2", "kvferry"), (b"sglang:x 1", "sglang"), (b"vllm:x 1", "vllm")]
)
def test_an_engine_is_known_by_its_metrics(text: bytes, engine: str) -> None:
    assert engine_of(text) == engine


async def test_a_snapshot_is_followed_by_deltas() -> None:
    clock, number = ManualClock(10.0), 0

    async def metrics() -> bytes:
        nonlocal number
        number += 100
        clock.advance(2.0)
        return METRICS % number

    events = scraped_events("http://host:1", metrics, clock, tick_s=0.001)
    first, second = json.loads(await anext(events)), json.loads(await anext(events))
    await events.aclose()
    assert (first["type"], second["type"]) == ("snapshot", "delta")
    view = first["instances"]["host:1"]
    assert (view["engine"], view["alive"], view["role"]) == ("vllm", True, "both")
    assert second["point"]["output_tokens"] == pytest.approx(50.0), "tokens a second"


async def test_a_server_without_metrics_is_named() -> None:
    async def metrics() -> bytes:
        return b"python_gc_objects 3\n"

    with pytest.raises(ConfigError, match="http://host:1 has neither a page nor metrics"):
        await anext(scraped_events("http://host:1", metrics))
