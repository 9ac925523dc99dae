"""Points of the page's history: rates and latencies of a few seconds, from the requests that a router has seen."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.core.messages.traffic import RequestObservation
from kvferry.core.percentile import percentile
from kvferry.dashboard.figures import Figures, quantile


class Point(msgspec.Struct, omit_defaults=True):
    """Figures of the interval that ends at `at` (seconds since 1970). Latencies, in ms, are of requests whose first
    token came in the interval. Rates are per second. None: there was nothing to measure.

    `requests`: rate of arrivals. `waiting`: number of requests that wait now. `input_tokens`, `output_tokens`,
    `hand_off_bytes`: rates, from the instances' counters. `hand_off_ms`: mean time of one hand-off, from the same.

    `queue`, `prefill`, `hand_off`, `decode_queue`, `aggregated`: parts of the time to first token, each a mean over the
    requests that the router has seen. `aggregated`: the whole wait of requests that one instance served. `hand_off`
    ends with D's first token, less `decode_queue` where D's metrics show it. `hits`: fraction of the prompts' tokens
    that were not computed. `loaded`: blocks per second that were read from each tier of the stores, the fastest first.
    """

    at: float
    requests: float = 0.0
    input_tokens: float | None = None
    output_tokens: float | None = None
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    itl_p50: float | None = None
    itl_p99: float | None = None
    queue: float = 0.0
    prefill: float = 0.0
    hand_off: float = 0.0
    decode_queue: float = 0.0
    aggregated: float = 0.0
    hits: float | None = None
    hand_off_bytes: float = 0.0
    hand_off_ms: float | None = None
    waiting: int = 0
    loaded: list[float] = []


def make_point(
    at: float,
    seconds: float,
    requests: Sequence[RequestObservation],
    figures: Figures | None = None,
    figure_seconds: float = 0.0,
    num_waiting: int = 0,
) -> Point:
    """The point of the `seconds` before `at`. `figures`: by how much all instances' counters grew in
    `figure_seconds`."""
    answered = [
        request
        for request in requests
        if request.first_s is not None and at - seconds <= request.arrived + request.first_s < at
    ]
    firsts = sorted(1000 * request.first_s for request in answered if request.first_s is not None)
    point = Point(
        at=at,
        requests=sum(at - seconds <= request.arrived < at for request in requests) / seconds,
        waiting=num_waiting,
    )
    if firsts:
        point.ttft_p50, point.ttft_p99 = percentile(firsts, 0.5), percentile(firsts, 0.99)
        _set_ttft_parts(point, answered)
    num_tokens = sum(request.prompt_tokens for request in answered)
    if num_tokens:
        point.hits = 1.0 - min(1.0, sum(request.uncached for request in answered) / num_tokens)
    if figures is not None and figure_seconds > 0:
        _set_counter_rates(point, figures, figure_seconds)
    return point


def _set_ttft_parts(point: Point, answered: Sequence[RequestObservation]) -> None:
    ms_per_request = 1000 / len(answered)
    for request in answered:
        ttft_s = request.first_s or 0.0
        if request.prefill and request.prefill_s is not None:
            hand_off_s = min(ttft_s, request.hand_off_s or 0.0)
            prefill_s = min(ttft_s - hand_off_s, request.prefill_s)
            point.hand_off += ms_per_request * hand_off_s
            point.prefill += ms_per_request * prefill_s
            point.queue += ms_per_request * (ttft_s - hand_off_s - prefill_s)
        else:
            point.aggregated += ms_per_request * ttft_s


def _set_counter_rates(point: Point, figures: Figures, seconds: float) -> None:
    values = figures.values
    if "prompt_tokens" in values:
        point.input_tokens = values["prompt_tokens"] / seconds
    if "output_tokens" in values:
        point.output_tokens = values["output_tokens"] / seconds
    for name, fraction in (("itl_p50", 0.5), ("itl_p99", 0.99)):
        gap_s = quantile(figures.itl, fraction)
        setattr(point, name, None if gap_s is None else 1000 * gap_s)
    point.hand_off_bytes = values.get("hand_off_bytes", 0.0) / seconds
    if values.get("hand_offs", 0.0) > 0:
        point.hand_off_ms = 1000 * values.get("hand_off_seconds", 0.0) / values["hand_offs"]
    point.loaded = [figures.tiers[level]["loaded_blocks"] / seconds for level in sorted(figures.tiers)]
    if point.ttft_p50 is None:
        _requests_of_metrics(point, figures, seconds)
    if values.get("decode_queue_requests", 0.0) > 0 and point.hand_off:
        queued = 1000 * values["decode_queue_seconds"] / values["decode_queue_requests"]
        point.decode_queue = min(point.hand_off, queued)
        point.hand_off -= point.decode_queue


def _requests_of_metrics(point: Point, figures: Figures, seconds: float) -> None:
    """Set the rates and times of requests that no router has seen: of an instance that is used without one."""
    values = figures.values
    for name, fraction in (("ttft_p50", 0.5), ("ttft_p99", 0.99)):
        ttft_s = quantile(figures.ttft, fraction)
        setattr(point, name, None if ttft_s is None else 1000 * ttft_s)
    point.requests = point.requests or values.get("ended", 0.0) / seconds
    if point.hits is None and values.get("looked_up_tokens", 0.0) > 0:
        cached = values.get("cached_tokens", 0.0) + values.get("loaded_tokens", 0.0)
        point.hits = min(1.0, cached / values["looked_up_tokens"])


def history(now: float, seconds: float, step_s: float, requests: Sequence[RequestObservation]) -> list[Point]:
    """The points of the last `seconds`, one each `step_s`, from remembered requests alone; the oldest first."""
    num = max(1, round(seconds / step_s))
    ends = [now - step_s * (num - 1 - index) for index in range(num)]
    bins: list[list[RequestObservation]] = [[] for _ in ends]
    for request in requests:
        for moment in {request.arrived, request.arrived + (request.first_s or 0.0)}:
            index = num - 1 - int((now - moment) // step_s)
            if 0 <= index < num and (not bins[index] or bins[index][-1] is not request):
                bins[index].append(request)
    return [make_point(end, step_s, part) for end, part in zip(ends, bins, strict=True)]
