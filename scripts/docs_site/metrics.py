"""The reference of Prometheus metrics, made from what a new engine and a new router expose."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from docs_site.tables import code, table
from kvferry.engine.statistics import EngineSnapshot
from kvferry.observe.metrics import EngineMetrics
from kvferry.router.edge.fleet_metrics import merge
from kvferry.router.metrics import Metrics

HEAD = """# Metrics

Every instance and the router answer `GET /metrics` in Prometheus' text format. Names are vLLM's where the meaning is
the same; kvferry's own begin with `kvferry`.

"""

CONNECTOR = """
Metrics of the connector are named `kvferry:connector_` and the connector's own name for the figure. Inside vLLM the
same figures are `vllm:kvferry_p2p_connector_…` (the connector's name in snake case): see
[check that the KV was transferred](../vllm.md#five-minutes).
"""


def page() -> str:
    return "".join([HEAD, "## Engine\n\n", _table(engine()), CONNECTOR, "\n## Router\n\n", _table(router())])


def engine() -> list[Metric]:
    """Of an engine that has answered nothing yet."""
    text, _ = EngineMetrics("model").exposition(EngineSnapshot())
    return _families(text)


def router() -> list[Metric]:
    """Of a router that has answered nothing yet, and what it adds to the metrics of an instance."""
    return _families(Metrics().expose([]) + merge([("decode", "decode-0", b"")]))


def _families(text: bytes) -> list[Metric]:
    """Without the times of creation, which Prometheus' client adds as a gauge to each."""
    families = [one for one in text_string_to_metric_families(text.decode()) if not one.name.endswith("_created")]
    return sorted(families, key=lambda metric: metric.name)


def _table(metrics: list[Metric]) -> str:
    return table(("metric", "type", "meaning"), map(_row, metrics))


def _row(metric: Metric) -> Iterator[str]:
    yield code(metric.name + ("_total" if metric.type == "counter" else ""))
    yield metric.type if metric.type != "unknown" else ""
    yield metric.documentation
