"""A connector's statistics in vLLM: its log line and its Prometheus metrics.

    vllm:kvferry_p2p_connector_taken_total{side, kind}    a counter: the connector's statistic "taken"
    vllm:kvferry_p2p_connector_held_bytes{side, kind}     a gauge

The names come from the connector, so a new connector needs no line here. Its classes list the names that are gauges
(`gauges`). `kind` is the end of a name: a kind of error, or a transport. Values of several ranks are added up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.connectors.api import gauges_of
from kvferry.connectors.registry import find_connector
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.observe.metric_fields import split_metric_name

PREFIX = "vllm:kvferry_"
"""The prefix by which vLLM removes an engine's metrics."""


@dataclass
class KvferryStats(KVConnectorStats):
    """The latest values of a connector's metrics, as vLLM collects them."""

    data: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """{side: {rank: {name: value}}}"""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KvferryStats:
        """Merge: the values of `other` are newer, or from other ranks."""
        for side, ranks in other.data.items():
            self.data.setdefault(side, {}).update(ranks)
        return self

    def totals(self) -> dict[tuple[str, str], float]:
        """Sums over all ranks, by (side, name)."""
        totals: dict[tuple[str, str], float] = {}
        for side, ranks in self.data.items():
            for figures in ranks.values():
                for figure, value in figures.items():
                    totals[side, figure] = totals.get((side, figure), 0.0) + value
        return totals

    def reduce(self) -> dict[str, int | float]:
        """The metrics that are not zero, as text for vLLM's log line."""
        return {f"{side} {figure}": round(value, 3) for (side, figure), value in self.totals().items() if value}

    def is_empty(self) -> bool:
        return not self.data


class Meter:
    """Reads the statistics of one half on one rank, and returns them only when they have changed."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = str(rank)
        self._last: dict[str, float] = {}

    def read(self, side: str, figures: dict[str, float]) -> KvferryStats | None:
        """The metrics in vLLM's form; None if they have not changed since the last call."""
        if figures == self._last:
            return None
        self._last = figures
        return KvferryStats(data={side: {self._rank: figures}})


class KvferryPromMetrics(KVConnectorPromMetrics):
    """A metric for each name in the statistics, registered when it first appears."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        connector_name: str,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._connector_name = connector_name
        self._gauges = gauges_of_connector(connector_name)
        self._labelnames = [*labelnames, "side", "kind"]
        self._latest: dict[int, KvferryStats] = {}
        self._families: dict[str, Any] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Update the metrics: counters by the increase of each rank, gauges to their current value."""
        latest = self._latest.setdefault(engine_idx, KvferryStats())
        for side, ranks in transfer_stats_data.items():
            for rank, figures in ranks.items():
                previous = latest.data.get(side, {}).get(rank, {})
                for figure in figures.keys() - self._gauges:
                    self._of(engine_idx, side, figure).inc(_growth(previous.get(figure, 0.0), figures[figure]))
        latest.aggregate(KvferryStats(data=transfer_stats_data))
        for (side, figure), value in latest.totals().items():
            if figure in self._gauges:
                self._of(engine_idx, side, figure).set(value)

    def _of(self, engine_idx: int, side: str, figure: str) -> Any:
        name, kind = split_metric_name(figure)
        family = self._family(name, figure in self._gauges)
        return family.labels(*self.per_engine_labelvalues[engine_idx], side, kind)

    def _family(self, name: str, is_gauge: bool) -> Any:
        if name not in self._families:
            common = {
                "name": metric_name(self._connector_name, name),
                "documentation": f"{self._connector_name}: {name.replace('_', ' ')}.",
                "labelnames": self._labelnames,
            }
            gauge_options = {"multiprocess_mode": "mostrecent"} if is_gauge else {}
            self._families[name] = (self._gauge_cls if is_gauge else self._counter_cls)(**common, **gauge_options)
        return self._families[name]


def _growth(previous: float, current: float) -> float:
    """The increase since the last value; the whole value if the count has restarted from 0."""
    return current - previous if current >= previous else current


def gauges_of_connector(connector_name: str) -> frozenset[str]:
    """The names in a connector's statistics that are gauges."""
    spec = find_connector(KVTransferConfig(kv_connector=connector_name))
    return gauges_of(spec.scheduler_class()) | gauges_of(spec.worker_class())


def metric_name(connector_name: str, name: str) -> str:
    """The Prometheus name: snake case, of letters, digits and underscores. `_total` is added to counters by the
    client."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", f"{connector_name}_{name}")
    return PREFIX + re.sub(r"\W+", "_", words).lower().removesuffix("_total")
