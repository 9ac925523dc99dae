"""The router's Prometheus metrics. Each router has its own, so that two in one process are independent.

The router counts itself, because a count of prometheus_client takes as long as a leg; prometheus_client formats the
text.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvferry.api.dialects.translator import TRANSLATED_PATHS
from kvferry.router.instances.instance import Instance
from kvferry.router.paths import PROMPT_FIELDS

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_LABELLED_PATHS = frozenset({*PROMPT_FIELDS, *TRANSLATED_PATHS, "/v1/models"})
"""Paths with a label of their own: paths come from clients, and the number of labels must be bounded."""
_BATCH_SIZE = 512
_INSTANCE_LABELS = ("role", "instance")


class Metrics:
    """The router's counters; each method counts one kind of event."""

    def __init__(self) -> None:
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
        self._errors = _Counts(
            "kvferry_router_leg_errors",
            "Legs that failed: connections lost or refused (unreachable, lost), no answer in time (silent), a"
            " ticket of another hand-off (wrong_ticket), and statuses of load and fault.",
            *_INSTANCE_LABELS,
            "reason",
        )
        self._retries = _Counts("kvferry_router_retries", "Legs tried again on another instance.", "role")
        self._continuations = _Counts(
            "kvferry_router_continuations",
            "Answers whose instance was lost in the middle, and that another one continued (done) or none (failed).",
            "outcome",
        )
        self._releases = _Counts("kvferry_router_releases", "Abandoned hand-offs reported to prefill.", "outcome")
        self._events = _Counts("kvferry_router_kv_events", "KV events received from an instance.", *_INSTANCE_LABELS)
        self._events_missed = _Counts(
            "kvferry_router_kv_event_messages_missed",
            "Messages of KV events that were lost and not replayed.",
            *_INSTANCE_LABELS,
        )
        self._phases = _Seconds(
            "kvferry_router_phase_seconds",
            "Seconds of a request in each of its phases, as far as the router sees them.",
            "phase",
        )

    def request_done(self, path: str, status: int, seconds: float) -> None:
        """Count a request whose client has its answer, or has disconnected."""
        label = path if path in _LABELLED_PATHS else "other"
        self._requests.counts[label, status] += 1
        self._seconds.add(((label, seconds),))

    def served(self, kind: str, reason: str = "") -> None:
        """Count a request by the way it is served: `sequential`, `concurrent`, `whole` (with a reason) or `local`."""
        self._hand_offs.counts[kind, reason] += 1

    def leg_failed(self, instance: Instance, reason: str) -> None:
        """Count a leg that ended without a usable answer."""
        self._errors.counts[instance.role, instance.name, reason] += 1

    def retried(self, role: str) -> None:
        """Count a leg that is tried again on another instance."""
        self._retries.counts[role,] += 1

    def continued(self, outcome: str) -> None:
        """Count an answer that broke off and was continued on another instance (`done`), or on none (`failed`)."""
        self._continuations.counts[outcome,] += 1

    def released(self, outcome: str) -> None:
        """Count a release of an abandoned hand-off: `done`, `failed` or `dropped`."""
        self._releases.counts[outcome,] += 1

    def phases(self, phases: Iterable[tuple[str, float]]) -> None:
        """Record the duration of each phase of a finished request, in seconds."""
        self._phases.add(phases)

    def events_received(self, instance: Instance, num_events: int) -> None:
        """Count KV events that an instance published."""
        self._events.counts[instance.role, instance.name] += num_events

    def events_missed(self, instance: Instance, num_messages: int) -> None:
        """Count KV events of an instance that are lost."""
        self._events_missed.counts[instance.role, instance.name] += num_messages

    def expose(
        self,
        instances: Iterable[Instance],
        *,
        threshold: float = 0.0,
        num_index_entries: int = 0,
        desired: Mapping[str, int] | None = None,
    ) -> bytes:
        """All metrics in Prometheus' text format; metrics by instance only for the current `instances`. `threshold` and
        `num_index_entries`: current values of the choice; `desired`: desired number of instances by role, in the plan
        of the fleet's controller."""
        current = list(instances)
        self.keep_only(current)
        collectors: list[Collector] = [
            self._requests, self._seconds, self._hand_offs, self._errors, self._retries, self._continuations,
            self._releases, self._events, self._events_missed, self._phases,
        ]  # fmt: skip
        gauges = [
            _gauge(
                "kvferry_router_disaggregate_from_tokens",
                "Uncached tokens from which a prompt is computed on a prefill instance, if decode is idle.",
                {(): threshold},
            ),
            _gauge(
                "kvferry_fleet_desired_instances",
                "Desired number of instances by role, of the controller of the fleet.",
                {(role,): number for role, number in (desired or {}).items()},
                "role",
            ),
            _gauge(
                "kvferry_router_prefix_index_entries",
                "Prefixes that are remembered for all instances.",
                {(): num_index_entries},
            ),
            _gauge(
                "kvferry_router_instance_in_flight",
                "Legs that are running.",
                {(instance.role, instance.name): instance.load.num_legs for instance in current},
                *_INSTANCE_LABELS,
            ),
            _gauge(
                "kvferry_router_instance_up",
                "Whether the instance may be given requests.",
                {(instance.role, instance.name): instance.usable for instance in current},
                *_INSTANCE_LABELS,
            ),
        ]
        return generate_latest(
            _Families([*(family for collector in collectors for family in collector.collect()), *gauges])
        )

    def keep_only(self, instances: Iterable[Instance]) -> None:
        """Forget the counts of all other instances."""
        names = {instance.name for instance in instances}
        for counter in (self._errors, self._events, self._events_missed):
            for labels in [labels for labels in counter.counts if labels[1] not in names]:
                del counter.counts[labels]


class _Families(Collector):
    """Metric families, as `generate_latest` takes them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """The metric families, unchanged."""
        return self._families


def _gauge(name: str, documentation: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


class _Counts(Collector):
    """A counter with labels."""

    def __init__(self, name: str, documentation: str, *labels: str) -> None:
        self._family = name, documentation, labels
        self.counts: defaultdict[tuple[object, ...], int] = defaultdict(int)
        """Counts by the values of the labels."""

    def collect(self) -> Iterator[Metric]:
        """The counter in Prometheus' form."""
        name, documentation, labels = self._family
        family = CounterMetricFamily(name, documentation, labels=labels)
        for values, count in self.counts.items():
            family.add_metric([*map(str, values)], count)
        yield family


class _Seconds(Collector):
    """A histogram with one label; as `_Counts`. Observations are collected, and counted in batches and before
    output."""

    def __init__(self, name: str, documentation: str, label: str) -> None:
        self._family = name, documentation, [label]
        self._pending: list[tuple[str, float]] = []
        self._counts: dict[str, list[int]] = {}
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, durations: Iterable[tuple[str, float]]) -> None:
        """Record durations in seconds, by label; negative ones count as 0."""
        self._pending.extend(durations)
        if len(self._pending) >= _BATCH_SIZE:
            self._count()

    def _count(self) -> None:
        by_label: defaultdict[str, list[float]] = defaultdict(list)
        for label, seconds in self._pending:
            by_label[label].append(seconds)
        self._pending.clear()
        for label, durations in by_label.items():
            durations.sort()
            # Number of durations up to each edge, and in all; then per bucket.
            cumulative = [*(bisect_right(durations, edge) for edge in _SECONDS), len(durations)]
            counts = self._counts.get(label, [0] * len(cumulative))
            self._counts[label] = [
                count + high - low for count, high, low in zip(counts, cumulative, [0, *cumulative[:-1]], strict=True)
            ]
            self._sums[label] += sum(durations[bisect_left(durations, 0.0) :])

    def collect(self) -> Iterator[Metric]:
        """The histogram in Prometheus' form."""
        self._count()
        name, documentation, labels = self._family
        family = HistogramMetricFamily(name, documentation, labels=labels)
        edges = [*map(floatToGoString, _SECONDS), "+Inf"]
        for label, counts in self._counts.items():
            buckets = list(zip(edges, accumulate(counts), strict=True))
            family.add_metric([label], buckets, self._sums[label])
        yield family
