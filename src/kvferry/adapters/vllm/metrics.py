"""A connector's own figures in vLLM's statistics: its log line, and its Prometheus metrics.

    vllm:kvferry_P2pConnector{side, figure}    whatever that connector counts, under its own name

The names are the connector's, so a new connector needs no line here. Figures of several ranks are added up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

METRIC = "vllm:kvferry_{}"
"""vLLM takes down, with an engine, the metrics that have its name in theirs."""


@dataclass
class KvferryStats(KVConnectorStats):
    """The latest figures."""

    data: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """{side: {rank's number: {figure: value}}}"""

    def reset(self) -> None:
        """Forget."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KvferryStats:
        """The other's are newer, or of other ranks."""
        for side, ranks in other.data.items():
            self.data.setdefault(side, {}).update(ranks)
        return self

    def totals(self) -> dict[tuple[str, str], float]:
        """By side and figure, over all ranks."""
        totals: dict[tuple[str, str], float] = {}
        for side, ranks in self.data.items():
            for figures in ranks.values():
                for figure, value in figures.items():
                    totals[side, figure] = totals.get((side, figure), 0.0) + value
        return totals

    def reduce(self) -> dict[str, int | float]:
        """For the log line: what is not zero."""
        return {f"{side} {figure}": round(value, 3) for (side, figure), value in self.totals().items() if value}

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not self.data


class Meter:
    """Reads figures of one half on one rank, and tells only when they changed."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = str(rank)
        self._last: dict[str, float] = {}

    def read(self, side: str, figures: dict[str, float]) -> KvferryStats | None:
        """None: as before."""
        if figures == self._last:
            return None
        self._last = figures
        return KvferryStats(data={side: {self._rank: figures}})


class KvferryPromMetrics(KVConnectorPromMetrics):
    """One gauge for all figures."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        connector_name: str,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._latest: dict[int, KvferryStats] = {}
        self._gauge = self._gauge_cls(
            name=METRIC.format(connector_name),
            documentation="A kvferry connector's own figure.",
            labelnames=[*labelnames, "side", "figure"],
            multiprocess_mode="mostrecent",
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Set what came."""
        latest = self._latest.setdefault(engine_idx, KvferryStats())
        latest.aggregate(KvferryStats(data=transfer_stats_data))
        labels = self.per_engine_labelvalues[engine_idx]
        for (side, figure), value in latest.totals().items():
            self._gauge.labels(*labels, side, figure).set(value)
