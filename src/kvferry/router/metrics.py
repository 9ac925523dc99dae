"""The router's Prometheus metrics. Each app has its own registry, so that two in one process do not meet."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvferry.router.instance import Instance
from kvferry.router.paths import PROMPT_FIELDS
from kvferry.router.prefix_index import IndexStatistics

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_OF_INSTANCE = ("role", "instance")


M = TypeVar("M", Counter, Histogram)


class Metrics:
    """What the router counts, as verbs."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._counted: dict[str, set[tuple[Counter, tuple[str, ...]]]] = {}
        """By an instance's name, the counters and labels that are there for it."""
        self._children: dict[tuple[object, ...], Counter | Histogram] = {}
        self._requests = Counter(
            "kvferry_router_requests", "Requests answered, by path and status.", ("path", "status"), registry=registry
        )
        self._seconds = Histogram(
            "kvferry_router_request_seconds",
            "Seconds from a request's arrival to the end of its answer.",
            ("path",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._first_byte_seconds = Histogram(
            "kvferry_router_first_byte_seconds",
            "Seconds from a request's arrival to the first byte of its answer's body.",
            ("path",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._hand_offs = Counter(
            "kvferry_router_hand_offs",
            "Ways requests were served: handed off, whole on one instance, or local after prefill failed.",
            ("kind", "reason"),
            registry=registry,
        )
        self._errors = Counter(
            "kvferry_router_leg_errors",
            "Legs that failed: connections lost or refused (unreachable, lost), no answer in time (silent), and"
            " statuses of load and fault.",
            (*_OF_INSTANCE, "reason"),
            registry=registry,
        )
        self._retries = Counter(
            "kvferry_router_retries", "Legs tried again on another instance.", ("role",), registry=registry
        )
        self._continuations = Counter(
            "kvferry_router_continuations",
            "Answers whose instance was lost in the middle, and that went on at another (done) or nowhere (failed).",
            ("outcome",),
            registry=registry,
        )
        self._releases = Counter(
            "kvferry_router_releases", "Abandoned hand-offs reported to prefill.", ("outcome",), registry=registry
        )
        self._events = Counter(
            "kvferry_router_kv_events", "KV events heard of an instance.", _OF_INSTANCE, registry=registry
        )
        self._events_missed = Counter(
            "kvferry_router_kv_event_messages_missed",
            "Messages of KV events that were lost and not told again.",
            _OF_INSTANCE,
            registry=registry,
        )
        self._phases = _PhaseSeconds()
        registry.register(self._phases)
        self._threshold = Gauge(
            "kvferry_router_disaggregate_from_tokens",
            "Uncached tokens from which a prompt is computed on a prefill instance, decode being idle.",
            registry=registry,
        )
        self._index_entries = Gauge(
            "kvferry_router_prefix_index_entries", "Prefixes remembered of all instances.", registry=registry
        )
        self._in_flight = Gauge("kvferry_router_instance_in_flight", "Legs under way.", _OF_INSTANCE, registry=registry)
        self._alive = Gauge(
            "kvferry_router_instance_up", "Whether the instance may be given requests.", _OF_INSTANCE, registry=registry
        )

    def request_done(self, path: str, status: int, seconds: float) -> None:
        """A client has its answer, or has left."""
        path = _bounded(path)
        self._child(self._requests, path, str(status)).inc()
        self._child(self._seconds, path).observe(seconds)

    def first_byte(self, path: str, seconds: float) -> None:
        """An answer's first body byte went out."""
        self._first_byte_seconds.labels(_bounded(path)).observe(seconds)

    def served(self, kind: str, reason: str = "") -> None:
        """A way to serve a request was taken: `sequential`, `concurrent`, `whole` (and why) or `local`."""
        self._child(self._hand_offs, kind, reason).inc()

    def leg_failed(self, instance: Instance, reason: str) -> None:
        """A leg ended without a usable answer."""
        self._count(self._errors, instance, 1, reason)

    def retried(self, role: str) -> None:
        """A leg is tried again elsewhere."""
        self._retries.labels(role).inc()

    def continued(self, outcome: str) -> None:
        """An answer broke off and went on elsewhere: `done` or `failed`."""
        self._continuations.labels(outcome).inc()

    def released(self, outcome: str) -> None:
        """An abandoned hand-off was reported: `done`, `failed` or `dropped`."""
        self._releases.labels(outcome).inc()

    def phases(self, phases: Iterable[tuple[str, float]]) -> None:
        """A request is over; how long each phase took."""
        for name, seconds in phases:
            self._phases.observe(name, seconds)

    def choice(self, threshold: float, index: IndexStatistics) -> None:
        """What choices are made by now."""
        self._threshold.set(threshold)
        self._index_entries.set(index.num_entries)

    def events_heard(self, instance: Instance, num_events: int) -> None:
        """An instance told of its cache."""
        self._count(self._events, instance, num_events)

    def events_missed(self, instance: Instance, num_messages: int) -> None:
        """Some of what it told is lost."""
        self._count(self._events_missed, instance, num_messages)

    def expose(self, instances: Iterable[Instance]) -> bytes:
        """Everything, in Prometheus' text form; of `instances` only, which are those that are there."""
        here = list(instances)
        self._in_flight.clear()
        self._alive.clear()
        for instance in here:
            self._in_flight.labels(instance.role, instance.name).set(instance.in_flight)
            self._alive.labels(instance.role, instance.name).set(instance.usable)
        for name in self._counted.keys() - {one.name for one in here}:
            for counter, labels in self._counted.pop(name):
                counter.remove(*labels)
        return generate_latest(self._registry)

    def _child(self, metric: M, *labels: str) -> M:
        """As `metric.labels`, which checks and converts them each time. Not for what is ever removed."""
        key = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return cast(M, child)

    def _count(self, counter: Counter, instance: Instance, number: int, *more: str) -> None:
        labels = (instance.role, instance.name, *more)
        self._counted.setdefault(instance.name, set()).add((counter, labels))
        counter.labels(*labels).inc(number)


class _PhaseSeconds(Collector):
    """A histogram for each phase. Counted by hand: several observations for each request would be dear."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, phase: str, seconds: float) -> None:
        """A phase took so long."""
        counts = self._counts.get(phase)
        if counts is None:
            counts = self._counts[phase] = [0] * (len(_SECONDS) + 1)
            self._sums[phase] = 0.0
        counts[bisect_left(_SECONDS, seconds)] += 1
        self._sums[phase] += seconds

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        family = HistogramMetricFamily(
            "kvferry_router_phase_seconds",
            "Seconds of a request in each of its phases, as far as the router sees them.",
            labels=["phase"],
        )
        edges = [*map(floatToGoString, _SECONDS), "+Inf"]
        for phase, counts in self._counts.items():
            buckets = list(zip(edges, accumulate(counts), strict=True))
            family.add_metric([phase], buckets, self._sums[phase])
        yield family


def _bounded(path: str) -> str:
    """A path as a label; paths are the client's, and labels must be few."""
    return path if path in PROMPT_FIELDS or path == "/v1/models" else "other"
