"""Figures of one instance for the page, read from its Prometheus metrics: kvferry's, vLLM's or SGLang's."""

from __future__ import annotations

import re
from itertools import pairwise
from math import isfinite

import msgspec

MAX_METRICS_BYTES = 4 * 2**20
"""Longest text of metrics that is read."""

_NAMES = {
    b"vllm:num_requests_running": "running",
    b"vllm:num_requests_waiting": "waiting",
    b"vllm:kv_cache_usage_perc": "kv_used",
    b"kvferry:num_hand_offs_held": "held",
    b"vllm:prompt_tokens_total": "prompt_tokens",
    b"vllm:generation_tokens_total": "output_tokens",
    b"vllm:request_success_total": "ended",
    b"vllm:prefix_cache_queries_total": "looked_up_tokens",
    b"vllm:prefix_cache_hits_total": "cached_tokens",
    b"vllm:external_prefix_cache_hits_total": "loaded_tokens",
    b"kvferry:connector_taken_bytes_total": "hand_off_bytes",
    b"kvferry:connector_taken_seconds_total": "hand_off_seconds",
    b"kvferry:connector_taken_total": "hand_offs",
    b"kvferry:request_decode_queue_time_seconds_sum": "decode_queue_seconds",
    b"kvferry:request_decode_queue_time_seconds_count": "decode_queue_requests",
    b"sglang:num_running_reqs": "running",
    b"sglang:num_queue_reqs": "waiting",
    b"sglang:token_usage": "kv_used",
    b"sglang:prompt_tokens_total": "prompt_tokens",
    b"sglang:generation_tokens_total": "output_tokens",
}
_GAUGES = ("running", "waiting", "kv_used", "held")
_HISTOGRAMS = {
    b"vllm:inter_token_latency_seconds_bucket": "itl",
    b"sglang:inter_token_latency_seconds_bucket": "itl",
    b"vllm:time_to_first_token_seconds_bucket": "ttft",
    b"sglang:time_to_first_token_seconds_bucket": "ttft",
}
_STORE = rb"kvferry:connector_(?:\d_)?(?:tier(\d)_)?(kept_bytes|healthy|loaded_blocks_total)"
_ALL_TIERS = -1
"""The level of samples that name none: of the only tier, or of the sum of several."""
_TIER = re.compile(_STORE)
_LINE = re.compile(
    rb"^(?P<name>%b|%b)(?:\{(?P<labels>[^}\n]*)\})? (?P<value>[0-9eE.+-]{1,32})$"
    % (b"|".join(re.escape(name) for name in [*_NAMES, *_HISTOGRAMS]), _STORE),
    re.MULTILINE,
)
_EDGE = re.compile(rb'\ble="([0-9eE.+-]{1,24}|\+Inf)"')


class Figures(msgspec.Struct):
    """The gauges now and the counters since the instance's start; a name that its metrics lack is absent.

    `itl`: the number of gaps between two tokens that were at most so many seconds long, by the edge in seconds.
    `ttft`: the same of times to first token. `tiers`: figures of each tier of the stores, by its level.
    """

    values: dict[str, float] = {}
    itl: dict[float, float] = {}
    ttft: dict[float, float] = {}
    tiers: dict[int, dict[str, float]] = {}


def read_figures(metrics: bytes) -> Figures:
    """The figures in a text of metrics; samples of one name with different labels are added up, the share of KV in use
    is the largest."""
    figures = Figures()
    for line in _LINE.finditer(metrics[:MAX_METRICS_BYTES]):
        name, labels, text = line["name"], line["labels"] or b"", line["value"]
        try:
            value = float(text)
        except ValueError:
            continue
        if not isfinite(value):
            continue
        if name in _HISTOGRAMS:
            edge, buckets = _EDGE.search(labels), getattr(figures, _HISTOGRAMS[name])
            if edge is not None:
                seconds = float(edge[1])
                buckets[seconds] = buckets.get(seconds, 0.0) + value
            continue
        if (tier := _TIER.fullmatch(name)) is not None:
            level, key = int(tier[1]) if tier[1] else _ALL_TIERS, tier[2].decode().removesuffix("_total")
            figures.tiers.setdefault(level, {})[key] = value
            continue
        key = _NAMES[name]
        before = figures.values.get(key, 0.0)
        figures.values[key] = max(before, value) if key == "kv_used" else before + value
    of_all = figures.tiers.pop(_ALL_TIERS, {})
    if not any("kept_bytes" in tier for tier in figures.tiers.values()) and of_all:
        figures.tiers[0] = of_all | figures.tiers.get(0, {})
    return figures


def tiers_of(figures: Figures) -> list[dict[str, float]]:
    """The tiers of the stores, the fastest first: `kept_bytes`, `healthy` (1 or 0) and `loaded_blocks`."""
    return [figures.tiers[level] for level in sorted(figures.tiers)]


def gauges(figures: Figures) -> dict[str, float]:
    """The gauges among these figures."""
    return {name: figures.values[name] for name in _GAUGES if name in figures.values}


def increase(before: Figures, after: Figures) -> Figures:
    """The increase of the counters; all of `after` if the process has restarted, as its counters began at 0."""
    restarted = any(value < before.values.get(name, 0.0) for name, value in after.values.items() if name not in _GAUGES)
    if restarted:
        before = Figures()
    values = {name: value - before.values.get(name, 0.0) for name, value in after.values.items() if name not in _GAUGES}
    tiers = {
        level: {
            "loaded_blocks": max(
                0.0, tier.get("loaded_blocks", 0.0) - before.tiers.get(level, {}).get("loaded_blocks", 0.0)
            )
        }
        for level, tier in after.tiers.items()
    }
    return Figures(values, _grown(before.itl, after.itl), _grown(before.ttft, after.ttft), tiers)


def _grown(before: dict[float, float], after: dict[float, float]) -> dict[float, float]:
    return {edge: max(0.0, value - before.get(edge, 0.0)) for edge, value in after.items()}


def total(parts: list[Figures]) -> Figures:
    """The sum of several instances' figures."""
    result = Figures()
    for part in parts:
        for name, value in part.values.items():
            result.values[name] = result.values.get(name, 0.0) + value
        for level, tier in part.tiers.items():
            blocks = result.tiers.setdefault(level, {"loaded_blocks": 0.0})
            blocks["loaded_blocks"] += tier["loaded_blocks"]
        for buckets, others in ((result.itl, part.itl), (result.ttft, part.ttft)):
            for edge, count in others.items():
                buckets[edge] = buckets.get(edge, 0.0) + count
    return result


def quantile(buckets: dict[float, float], share: float) -> float | None:
    """The quantile of a histogram with cumulative buckets, in seconds, by linear interpolation within a bucket, as
    Prometheus' `histogram_quantile`; None: it is empty. In the last bucket, the edge below it."""
    edges = sorted(buckets)
    if not edges or buckets[edges[-1]] <= 0.0:
        return None
    rank = share * buckets[edges[-1]]
    for low, high in pairwise([0.0, *edges]):
        below, upto = buckets.get(low, 0.0) if low else 0.0, buckets[high]
        if upto >= rank and upto > below:
            return low if high == float("inf") else low + (high - low) * (rank - below) / (upto - below)
    return edges[-1] if isfinite(edges[-1]) else None
