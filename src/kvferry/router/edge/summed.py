"""Merges the metrics of several processes: counters, histograms and most gauges are added up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

_Key = tuple[str, str, tuple[tuple[str, str], ...]]
"""A sample's family, name and labels."""

_JOIN: dict[str, Callable[[Sequence[float]], float]] = {
    "kvferry_router_instance_up": min,
    "kvferry_router_instance_scraped": max,
    "kvferry_router_prefix_index_entries": max,
    "kvferry_fleet_desired_instances": max,
    "kvferry_router_disaggregate_from_tokens": lambda values: sum(values) / len(values),
}
"""Merge functions of gauges that are not sums."""


def summed(texts: Iterable[bytes]) -> bytes:
    """Merge several texts, each in Prometheus' text format, into one."""
    families: dict[str, Metric] = {}
    values: dict[_Key, list[float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                key = (family.name, sample.name, tuple(sample.labels.items()))
                values.setdefault(key, []).append(sample.value)
    for (family_name, name, labels), metric_values in values.items():
        families[family_name].add_sample(name, dict(labels), _join(name, metric_values))
    registry = CollectorRegistry()
    registry.register(_Families(list(families.values())))
    return generate_latest(registry)


def _join(name: str, values: Sequence[float]) -> float:
    if name.endswith("_created"):
        return min(values)
    return _JOIN[name](values) if name in _JOIN else sum(values)


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
