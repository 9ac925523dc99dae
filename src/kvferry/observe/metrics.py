"""Prometheus metrics of one engine.

There are two sources: the statistics of the engine's parts, which are read at each scrape and declare their metrics
as fields (`observe.metric_fields`); and requests, which the server observes as they run. Names are vLLM's if
vLLM has a metric of the same meaning, so that dashboards and autoscalers for vLLM work; all others begin with
`kvferry:`. Prometheus adds `_total` to the names of counters.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvferry.core.clock import Clock
from kvferry.core.messages.timeline import Timeline
from kvferry.observe.metric_fields import MetricSpec, metrics_of, split_metric_name

_HELP_PREFIX = re.compile(r"(?:(?P<child>\d+)_)?(?:tier(?P<tier>\d)_)?")

_CONNECTOR_HELPS = {
    # Hand-offs.
    "num_produced": "Hand-offs that are being made or are under lease.",
    "fetches": "Hand-offs that this instance has begun to fetch.",
    "num_loading": "Loads of KV that are running.",
    "taken": "Hand-offs that arrived completely and are used.",
    "taken_bytes": "Bytes of the hand-offs that arrived, by transport.",
    "taken_seconds": "Seconds that the hand-offs that arrived took.",
    "failed": "Hand-offs that could not be fetched, by kind of error.",
    "lost": "Hand-offs that could not be fetched, by kind of error.",
    "transfer_errors": "Errors on the thread that moves KV.",
    "num_keys": "Keys of hand-offs that the lookup buffer has.",
    "held_bytes": "Bytes of KV that are held for other instances.",
    "open_connections": "Connections to other instances that are open.",
    # Stores.
    "stored_blocks": "Blocks that were stored.",
    "present_blocks": "Blocks that were to be stored and were there already.",
    "loaded_blocks": "Blocks that were loaded.",
    "missing_blocks": "Blocks that were asked for and are not there.",
    "corrupt_blocks": "Blocks whose checksum was wrong, and which were not used.",
    "dropped_blocks": "Blocks that were not stored, because there was no room or the store was too slow.",
    "evicted_blocks": "Blocks that were evicted to make room.",
    "promoted_blocks": "Blocks that were copied to a faster tier after they had been found in a slower one.",
    "prefetched_blocks": "Blocks of queued requests that were copied to the first tier.",
    "read_bytes": "Bytes that were read.",
    "written_bytes": "Bytes that were written.",
    "kept_bytes": "Bytes that are kept now.",
    "pinned_blocks": "Blocks that are protected from eviction.",
    "moving_bytes": "Bytes that are being copied between tiers.",
    "dirty_blocks": "Blocks that slower tiers do not have yet.",
    "healthy": "1 if the tier answers, 0 if it is left alone for a while.",
    "failures": "Operations that failed.",
    "late": "Operations that missed their deadline.",
    "writer_waiting_bytes": "Bytes that wait to be written.",
    "writer_dropped_blocks": "Blocks that were not written, because too many waited.",
    "not_loaded_blocks": "Blocks that were present and were computed again instead of loaded.",
    "prefill_tokens_per_s": "Prompt tokens that the model computes in a second, as measured.",
    "load_latency_s": "Seconds to the first byte of a load, as measured.",
    "load_bytes_per_s": "Bytes that a load brings in a second, as measured.",
    "load_decisions_load": "Requests of which all stored blocks were loaded.",
    "load_decisions_prefix": "Requests of which only the blocks in faster tiers were loaded.",
    "load_decisions_meet": "Requests that were loaded from the back while they were computed from the front.",
    "load_decisions_recompute": "Requests that were computed although blocks were stored.",
}
"""The helps of the metrics in which connectors and stores of kvferry's show their statistics."""


disable_created_metrics()  # type: ignore[no-untyped-call]  # its times are not of our clock

LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
INTER_TOKEN_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
)
TOKENS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

FINISHED_REASONS = ("stop", "length", "abort", "error")


class EngineStatistics(Protocol):
    """A statistics dataclass for `metrics_of` that also has the connector's own statistics."""

    @property
    def connector(self) -> Mapping[str, float]:
        """The statistics of both sides by name: counters, except those in `connector_gauges`."""

    @property
    def connector_gauges(self) -> frozenset[str]:
        """Names in `connector` that are gauges."""


class EngineMetrics:
    """The metrics of one engine, in a registry of their own. Used on the server's event loop."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self.registry = CollectorRegistry()
        self._statistics = StatisticsCollector(self._labels)
        self.registry.register(self._statistics)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests.")
        self._tokens = TokenTally(self._labels)
        self.registry.register(self._tokens)
        self._ends = self._counter_by_reason("vllm:request_success", "Requests ended, by reason.")
        self._request_prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Tokens of the prompt of each request.", TOKENS_BUCKETS
        )
        self._request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", TOKENS_BUCKETS
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "From a request's arrival to its first token, including prefill on another instance and transfer.",
            FIRST_TOKEN_BUCKETS,
        )
        self._end_to_end = self._histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to its end.", LATENCY_BUCKETS
        )
        self._spans = [
            (start, end, self._histogram(name, documentation, LATENCY_BUCKETS))
            for name, documentation, start, end in _SPANS
        ]

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(name, documentation, list(self._labels), registry=self.registry).labels(**self._labels)

    def _counter_by_reason(self, name: str, documentation: str) -> dict[str, Counter]:
        family = Counter(name, documentation, [*self._labels, "finished_reason"], registry=self.registry)
        return {reason: family.labels(**self._labels, finished_reason=reason) for reason in FINISHED_REASONS}

    def _histogram(self, name: str, documentation: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(name, documentation, list(self._labels), buckets=tuple(buckets), registry=self.registry)
        return family.labels(**self._labels)

    @contextmanager
    def track(self, num_prompt_tokens: int, arrived: float, clock: Clock) -> Iterator[RequestTracker]:
        """Observe one sequence while the body runs. `arrived`: seconds since the epoch.

        If the body raises without a call of `record_end`, the sequence counts as failed, or as aborted if the body was
        cancelled or closed.
        """
        tracker = RequestTracker(self, num_prompt_tokens, arrived, clock)
        try:
            yield tracker
        except Exception:
            tracker.record_end("error", None)
            raise
        except BaseException:
            tracker.record_end("abort", None)
            raise

    def observe_token(self, latency_s: float, *, first: bool) -> None:
        """Record that new tokens arrived, `latency_s` after the request (`first`), or after the previous tokens."""
        if first:
            self._first_token.observe(latency_s)
        else:
            self._tokens.observe(latency_s)

    def count_tokens(self, *, prompt: int = 0, generated: int = 0) -> None:
        """Count prompt tokens and generated tokens."""
        if prompt:
            self._prompt_tokens.inc(prompt)
        self._tokens.num_generated += generated

    def observe_end(
        self, reason: str, timeline: Timeline | None, latency_s: float, num_prompt: int, num_generated: int
    ) -> None:
        """Observe the end of a request. `timeline`: None if it was cut short."""
        self._ends[reason].inc()
        self._end_to_end.observe(latency_s)
        self._request_prompt_tokens.observe(num_prompt)
        self._request_generation_tokens.observe(num_generated)
        if timeline is not None:
            self._observe_phases(timeline)

    def _observe_phases(self, timeline: Timeline) -> None:
        """A decode instance leaves out the prefill, whose stamps are also in its timeline: the prefill instance
        observes it."""
        decodes_only = timeline.decode_queued is not None
        for start, end, histogram in self._spans:
            seconds = timeline.span(start, end)
            if seconds is not None and not (decodes_only and start.startswith("prefill")):
                histogram.observe(max(seconds, 0.0))

    def exposition(self, statistics: EngineStatistics | None, accept: str = "") -> tuple[bytes, str]:
        """The body and content type of the response to a scrape with the header `accept`. `statistics` None: the engine
        does not respond."""
        self._statistics.snapshot = statistics
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type


class RequestTracker:
    """Observes one sequence while it runs."""

    def __init__(self, metrics: EngineMetrics, num_prompt_tokens: int, arrived: float, clock: Clock) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._num_generated = 0
        self._arrived = self._last = arrived
        self._clock = clock
        self._ended = False

    def record_tokens(self, number: int) -> None:
        """Record that `number` new tokens arrived."""
        if number == 0:
            return
        now, first = self._clock.wall(), self._num_generated == 0
        self._metrics.observe_token(max(now - self._last, 0.0), first=first)
        self._metrics.count_tokens(prompt=self._num_prompt_tokens if first else 0, generated=number)
        self._num_generated += number
        self._last = now

    def record_end(self, reason: str, timeline: Timeline | None) -> None:
        """Record that the sequence ended; only the first call counts."""
        if self._ended:
            return
        self._ended = True
        latency = max(self._clock.wall() - self._arrived, 0.0)
        self._metrics.observe_end(reason, timeline, latency, self._num_prompt_tokens, self._num_generated)


class TokenTally(Collector):
    """The metrics that are updated for every token, as plain numbers: the client library's own objects take a lock.

    Used on the server's event loop only, as scrapes are.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self.num_generated = 0
        self._seconds = 0.0
        self._counts = [0] * (len(INTER_TOKEN_BUCKETS) + 1)

    def observe(self, latency_s: float) -> None:
        """Record that new tokens arrived `latency_s` after the previous ones."""
        self._counts[bisect_left(INTER_TOKEN_BUCKETS, latency_s)] += 1
        self._seconds += latency_s

    def collect(self) -> Iterator[Metric]:
        """The metrics in Prometheus' form, with cumulative buckets."""
        names, values = list(self._labels), list(self._labels.values())
        generated = CounterMetricFamily(
            "vllm:generation_tokens", "Tokens of answers that were generated.", labels=names
        )
        generated.add_metric(values, self.num_generated)
        yield generated
        between = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Time between two outputs of a request.", labels=names
        )
        bounds = [*(str(float(bound)) for bound in INTER_TOKEN_BUCKETS), "+Inf"]
        between.add_metric(values, list(zip(bounds, accumulate(self._counts), strict=True)), self._seconds)
        yield between


_SPANS = (
    (
        "vllm:request_queue_time_seconds",
        "Seconds that requests waited in the queue before prefill.",
        "prefill_queued",
        "prefill_started",
    ),
    ("vllm:request_prefill_time_seconds", "Seconds that requests were in prefill.", "prefill_started", "prefill_done"),
    (
        "vllm:request_decode_time_seconds",
        "Seconds from the first token of a request to its end.",
        "first_token",
        "done",
    ),
    ("kvferry:request_transfer_time_seconds", "Time of loading a request's KV.", "transfer_started", "transfer_done"),
    (
        "kvferry:request_decode_queue_time_seconds",
        "From a request's arrival at decode to the start of decoding.",
        "decode_queued",
        "decode_started",
    ),
)
"""Histograms of a request's phases: name, documentation, and the stamps at which the phase begins and ends."""


class StatisticsCollector(Collector):
    """Turns an engine's statistics into metrics; `snapshot` is set at each scrape."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self.snapshot: EngineStatistics | None = None

    def collect(self) -> Iterator[Metric]:
        """The current metrics; none if `snapshot` is None."""
        if self.snapshot is None:
            return
        for figure, value in metrics_of(self.snapshot):
            yield self._metric(figure, value)
        yield from self._connector(self.snapshot)

    def _metric(self, figure: MetricSpec, value: Any) -> Metric:
        kind = CounterMetricFamily if figure.is_counter else GaugeMetricFamily
        if not figure.label:
            return self._filled(kind(figure.name, figure.documentation, labels=self._names()), value)
        family = kind(figure.name, figure.documentation, labels=self._names(figure.label))
        for label, number in value.items():
            self._filled(family, number, label)
        return family

    def _connector(self, now: EngineStatistics) -> Iterator[Metric]:
        """A metric for each name; the kind at the end of a name is the value of the label `kind`."""
        families: dict[str, Metric] = {}
        for figure, value in now.connector.items():
            name, kind = split_metric_name(figure)
            if name not in families:
                family = GaugeMetricFamily if figure in now.connector_gauges else CounterMetricFamily
                metric = "kvferry:connector_" + re.sub(r"\W", "_", name)
                families[name] = family(metric, connector_help(name), labels=self._names("kind"))
            self._filled(families[name], value, kind)
        yield from families.values()

    def _names(self, *more: str) -> list[str]:
        return [*self._labels, *more]

    def _filled(self, family: Metric, value: float, *more: str) -> Metric:
        family.add_metric([*self._labels.values(), *more], value)  # type: ignore[attr-defined]
        return family


def connector_help(name: str) -> str:
    """One sentence about a statistic. In a `MultiConnector` its name begins with the number of the connector, and that
    of a tier with the tier."""
    prefix = _HELP_PREFIX.match(name)
    assert prefix is not None
    statistic = name[prefix.end() :]
    text = _CONNECTOR_HELPS.get(statistic)
    if text is None and statistic.startswith("ended_"):
        text = f"Hand-offs whose keys ended at the producer, for the reason {statistic.removeprefix('ended_')!r}."
    if text is None:
        text = f"Statistic {statistic!r} of the connector, which describes it."
    where = [f"tier {prefix['tier']}"] if prefix["tier"] else []
    where += [f"connector {prefix['child']} of several"] if prefix["child"] else []
    return f"{text[:-1]} ({', '.join(where)})." if where else text
