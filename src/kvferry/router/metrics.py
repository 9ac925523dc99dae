"""The router's Prometheus metrics. Each app has its own registry, so that two in one process do not meet."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvferry.router.instances.instance import Instance
from kvferry.router.paths import PROMPT_FIELDS

disable_created_metrics()  # type: ignore[no-untyped-call]  # as in `observe.metrics`

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_LABELLED_PATHS = frozenset({*PROMPT_FIELDS, "/v1/models"})
"""Paths come from clients, and there must be few labels."""
_COUNTED_AT_ONCE = 512
_OF_INSTANCE = ("role", "instance")


class Metrics:
    """What the router counts; each method counts one kind of event."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._counted: dict[str, set[tuple[Counter, tuple[str, ...]]]] = {}
        """By an instance's name, the counters and labels that are there for it."""
        self._requests = _Counts("kvferry_router_requests", "Requests answered, by path and status.", "path", "status")
        self._seconds = _Seconds(
            "kvferry_router_request_seconds", "Seconds from a request's arrival to the end of its answer.", "path"
        )
        self._hand_offs = _Counts(
            "kvferry_router_hand_offs",
            "How requests were served: handed off, whole on one instance, or local after prefill failed.",
            "kind",
            "reason",
        )
        self._errors = Counter(
            "kvferry_router_leg_errors",
            "Legs that failed: connections lost or refused (unreachable, lost), no answer in time (silent), a"
            " ticket of another hand-off (wrong_ticket), and statuses of load and fault.",
            (*_OF_INSTANCE, "reason"),
            registry=registry,
        )
        self._retries = Counter(
            "kvferry_router_retries", "Legs tried again on another instance.", ("role",), registry=registry
        )
        self._continuations = Counter(
            "kvferry_router_continuations",
            "Answers whose instance was lost in the middle, and that another one continued (done) or none (failed).",
            ("outcome",),
            registry=registry,
        )
        self._releases = Counter(
            "kvferry_router_releases", "Abandoned hand-offs reported to prefill.", ("outcome",), registry=registry
        )
        self._events = Counter(
            "kvferry_router_kv_events", "KV events received from an instance.", _OF_INSTANCE, registry=registry
        )
        self._events_missed = Counter(
            "kvferry_router_kv_event_messages_missed",
            "Messages of KV events that were lost and not replayed.",
            _OF_INSTANCE,
            registry=registry,
        )
        self._phases = _Seconds(
            "kvferry_router_phase_seconds",
            "Seconds of a request in each of its phases, as far as the router sees them.",
            "phase",
        )
        for collector in (self._requests, self._seconds, self._hand_offs, self._phases):
            registry.register(collector)
        self._threshold = Gauge(
            "kvferry_router_disaggregate_from_tokens",
            "Uncached tokens from which a prompt is computed on a prefill instance, if decode is idle.",
            registry=registry,
        )
        self._desired = Gauge(
            "kvferry_fleet_desired_instances",
            "Instances that the controller of the fleet wants, by role.",
            ("role",),
            registry=registry,
        )
        self._index_entries = Gauge(
            "kvferry_router_prefix_index_entries", "Prefixes that are remembered for all instances.", registry=registry
        )
        self._in_flight = Gauge(
            "kvferry_router_instance_in_flight", "Legs that are running.", _OF_INSTANCE, registry=registry
        )
        self._alive = Gauge(
            "kvferry_router_instance_up", "Whether the instance may be given requests.", _OF_INSTANCE, registry=registry
        )

    def request_done(self, path: str, status: int, seconds: float) -> None:
        """A client has its answer, or has disconnected."""
        label = path if path in _LABELLED_PATHS else "other"
        self._requests.add((label, status))
        self._seconds.add(((label, seconds),))

    def served(self, kind: str, reason: str = "") -> None:
        """How a request is served: `sequential`, `concurrent`, `whole` (and why) or `local`."""
        self._hand_offs.add((kind, reason))

    def leg_failed(self, instance: Instance, reason: str) -> None:
        """A leg ended without a usable answer."""
        self._count(self._errors, instance, 1, reason)

    def retried(self, role: str) -> None:
        """A leg is tried again on another instance."""
        self._retries.labels(role).inc()

    def continued(self, outcome: str) -> None:
        """An answer broke off and was continued elsewhere (`done`), or nowhere (`failed`)."""
        self._continuations.labels(outcome).inc()

    def released(self, outcome: str) -> None:
        """An abandoned hand-off was reported: `done`, `failed` or `dropped`."""
        self._releases.labels(outcome).inc()

    def phases(self, phases: Iterable[tuple[str, float]]) -> None:
        """A request is over; the duration of each phase, in seconds."""
        self._phases.add(phases)

    def choice(self, threshold: float, num_index_entries: int) -> None:
        """Set the gauges of the threshold and of the prefix index."""
        self._threshold.set(threshold)
        self._index_entries.set(num_index_entries)

    def fleet_wants(self, desired: Mapping[str, int]) -> None:
        """Set the gauge of how many instances of each role there are to be."""
        self._desired.clear()
        for role, number in desired.items():
            self._desired.labels(role).set(number)

    def events_heard(self, instance: Instance, num_events: int) -> None:
        """An instance published KV events."""
        self._count(self._events, instance, num_events)

    def events_missed(self, instance: Instance, num_messages: int) -> None:
        """Some of its KV events are lost."""
        self._count(self._events_missed, instance, num_messages)

    def expose(self, instances: Iterable[Instance]) -> bytes:
        """Everything in Prometheus' text format; metrics by instance only for `instances`, which are those that there
        are."""
        here = list(instances)
        self.keep_only(here)
        self._in_flight.clear()
        self._alive.clear()
        for instance in here:
            self._in_flight.labels(instance.role, instance.name).set(instance.in_flight)
            self._alive.labels(instance.role, instance.name).set(instance.usable)
        return generate_latest(self._registry)

    def keep_only(self, instances: Iterable[Instance]) -> None:
        """Forget what was counted of all other instances."""
        for name in self._counted.keys() - {one.name for one in instances}:
            for counter, labels in self._counted.pop(name):
                counter.remove(*labels)

    def _count(self, counter: Counter, instance: Instance, number: int, *more: str) -> None:
        labels = (instance.role, instance.name, *more)
        self._counted.setdefault(instance.name, set()).add((counter, labels))
        counter.labels(*labels).inc(number)


class _Counts(Collector):
    """A counter with labels. What each request counts is counted by hand, because prometheus_client takes as long for
    it as the router for a leg."""

    def __init__(self, name: str, about: str, *labels: str) -> None:
        self._family = name, about, labels
        self._counts: defaultdict[tuple[object, ...], int] = defaultdict(int)

    def add(self, labels: tuple[object, ...]) -> None:
        """One more."""
        self._counts[labels] += 1

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        name, about, labels = self._family
        family = CounterMetricFamily(name, about, labels=labels)
        for values, count in self._counts.items():
            family.add_metric([*map(str, values)], count)
        yield family


class _Seconds(Collector):
    """A histogram with one label; as `_Counts`. What is observed is noted first, and counted when it is enough or
    somebody asks."""

    def __init__(self, name: str, about: str, label: str) -> None:
        self._family = name, about, [label]
        self._noted: defaultdict[str, list[float]] = defaultdict(list)
        self._num_noted = 0
        self._counts: dict[str, list[int]] = {}
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, observed: Iterable[tuple[str, float]]) -> None:
        """By label, how long something took; less than nothing counts as nothing."""
        noted = self._noted
        for label, seconds in observed:
            noted[label].append(seconds)
        self._num_noted += 1
        if self._num_noted >= _COUNTED_AT_ONCE:
            self._count()

    def _count(self) -> None:
        for label, found in self._noted.items():
            found.sort()
            # How many are at most as long as each edge, and all; then those of each bucket.
            below = [*(bisect_right(found, edge) for edge in _SECONDS), len(found)]
            counts = self._counts.get(label, [0] * len(below))
            self._counts[label] = [
                count + high - low for count, high, low in zip(counts, below, [0, *below[:-1]], strict=True)
            ]
            self._sums[label] += sum(found[bisect_left(found, 0.0) :])
        self._noted.clear()
        self._num_noted = 0

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        self._count()
        name, about, labels = self._family
        family = HistogramMetricFamily(name, about, labels=labels)
        edges = [*map(floatToGoString, _SECONDS), "+Inf"]
        for label, counts in self._counts.items():
            buckets = list(zip(edges, accumulate(counts), strict=True))
            family.add_metric([label], buckets, self._sums[label])
        yield family
