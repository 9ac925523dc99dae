"""Events as a router's page has them, made from the metrics of one server that has no page: an instance of kvferry's,
vLLM's or SGLang's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec

from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import ConfigError
from kvferry.dashboard.figures import Figures, gauges, increase, quantile, read_figures
from kvferry.dashboard.series import make_point

TICK_S = 2.0
"""Seconds between two looks at a server's metrics."""


async def scraped_events(
    url: str, metrics: Callable[[], Awaitable[bytes]], clock: Clock = SYSTEM_CLOCK, tick_s: float = TICK_S
) -> AsyncGenerator[bytes]:
    """A snapshot, and a delta every `tick_s`. `metrics`: the server's text of metrics. Raises `ConfigError` if it has
    no metric of a known engine."""
    text = await metrics()
    figures, at = read_figures(text), clock.monotonic()
    if not figures.values:
        raise ConfigError(f"{url} has neither a page nor metrics of kvferry's, vLLM's or SGLang's")
    engine, name = engine_of(text), url.partition("://")[2]
    head = {"type": "snapshot", "kind": "instance", "models": [], "points": []}
    yield _encode({**head, "now": clock.wall(), "instances": {name: _view(name, engine, figures)}})
    while True:
        await asyncio.sleep(tick_s)
        before, figures = figures, read_figures(await metrics())
        seconds, at = clock.monotonic() - at, clock.monotonic()
        grown = increase(before, figures)
        point = msgspec.to_builtins(make_point(clock.wall(), seconds, (), grown, seconds))
        for label, share in (("ttft_p50", 0.5), ("ttft_p99", 0.99)):
            first_s = quantile(grown.ttft, share)
            point[label] = None if first_s is None else 1000 * first_s
        point["requests"] = sum(grown.ttft.values()) and max(grown.ttft.values()) / seconds
        yield _encode(
            {
                "type": "delta",
                "now": clock.wall(),
                "instances": {name: _view(name, engine, figures)},
                "point": point,
            }
        )


def engine_of(metrics: bytes) -> str:
    """The engine whose metrics these are."""
    if b"kvferry:" in metrics:
        return "kvferry"
    return "sglang" if b"sglang:" in metrics else "vllm"


def _view(name: str, engine: str, figures: Figures) -> dict[str, Any]:
    return {"name": name, "role": "both", "state": "up", "alive": True, "engine": engine, **gauges(figures)}


def _encode(event: dict[str, Any]) -> bytes:
    return msgspec.json.encode(event)
