"""Charts and alerts as queries of Prometheus. Metric names are as in the reference of metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Unit = Literal["s", "reqps", "short", "percentunit", "Bps", "cps"]
"""Units in Grafana's names: seconds, requests a second, a number, a share, bytes a second, counts a second."""
RATE = "[1m]"
"""Range of rates; at least four times the scrape interval."""


@dataclass(frozen=True)
class Query:
    """A query of Prometheus. `legend`: the name of its series, with labels in double braces."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One chart. `description`: explains the chart to its reader."""

    title: str
    unit: Unit
    queries: tuple[Query, ...]
    description: str


@dataclass(frozen=True)
class Row:
    """Charts about one thing."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Alert:
    """One alert rule. `for_s`: how long `expression` must hold; `remedy`: what to do."""

    name: str
    expression: str
    for_s: int
    summary: str
    remedy: str
    severity: Literal["warning", "critical"] = "warning"
    labels: dict[str, str] = field(default_factory=dict)


def _quantiles(histogram: str, *shares: float, by: str = "") -> tuple[Query, ...]:
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        Query(
            f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket{RATE})))",
            f"P{share * 100:g}{legend}",
        )
        for share in shares
    )


def _rate(counter: str, by: str = "", legend: str = "") -> Query:
    grouped = f"sum by ({by}) " if by else "sum "
    return Query(f"{grouped}(rate({counter}{RATE}))", legend or (f"{{{{{by}}}}}" if by else counter))


ROWS: tuple[Row, ...] = (
    Row(
        "Answers",
        (
            Panel(
                "Requests",
                "reqps",
                (_rate("kvferry_router_requests_total", "status"),),
                "Answers a second by status.",
            ),
            Panel(
                "Time to first token",
                "s",
                _quantiles("vllm:time_to_first_token_seconds", 0.5, 0.99),
                "From a request's arrival at the instance that answers to its first token, prefill elsewhere included.",
            ),
            Panel(
                "Time between tokens",
                "s",
                _quantiles("vllm:inter_token_latency_seconds", 0.5, 0.99),
                "Prefill on other instances keeps P99 near P50.",
            ),
            Panel(
                "Tokens",
                "cps",
                (
                    _rate("vllm:prompt_tokens_total", legend="prompts"),
                    _rate("vllm:generation_tokens_total", legend="answers"),
                ),
                "Tokens a second of prompts and of answers, of all instances.",
            ),
        ),
    ),
    Row(
        "Hand-offs",
        (
            Panel(
                "How requests were served",
                "reqps",
                (_rate("kvferry_router_hand_offs_total", "kind"),),
                "Handed off, whole on one instance, or local after prefill failed.",
            ),
            Panel(
                "Phases",
                "s",
                _quantiles("kvferry_router_phase_seconds", 0.5, by="phase"),
                "The median of each phase of a request, as the router sees them.",
            ),
            Panel(
                "KV that moves",
                "Bps",
                (_rate("kvferry:connector_taken_bytes_total", "kind", legend="{{kind}}"),),
                "Bytes a second that decode instances fetch, by medium.",
            ),
            Panel(
                "Loading KV",
                "s",
                _quantiles("kvferry:request_transfer_time_seconds", 0.5, 0.99),
                "Time of loading a request's KV on decode instances.",
            ),
            Panel(
                "Hand-offs held",
                "short",
                (Query("sum by (instance) (kvferry:num_hand_offs_held)", "{{instance}}"),),
                "Prefilled and not yet fetched; each holds blocks until it is fetched or its lease ends.",
            ),
            Panel(
                "What failed",
                "reqps",
                (
                    _rate("kvferry_router_leg_errors_total", "reason", legend="leg: {{reason}}"),
                    _rate("kvferry_router_retries_total", "role", legend="again: {{role}}"),
                    _rate("kvferry_router_continuations_total", "outcome", legend="continued: {{outcome}}"),
                ),
                "Legs that failed, that were tried again, and answers that another instance continued.",
            ),
        ),
    ),
    Row(
        "Instances",
        (
            Panel(
                "Up",
                "short",
                (Query("sum by (role) (kvferry_router_instance_up)", "{{role}}"),),
                "Instances that may be given requests, by role.",
            ),
            Panel(
                "Running",
                "short",
                (Query("sum by (instance) (vllm:num_requests_running)", "{{instance}}"),),
                "Requests that are computed on each instance.",
            ),
            Panel(
                "Waiting",
                "short",
                (Query("sum by (instance) (vllm:num_requests_waiting)", "{{instance}}"),),
                "Requests that wait to be scheduled, or for their KV.",
            ),
            Panel(
                "KV cache in use",
                "percentunit",
                (Query("max by (instance) (vllm:kv_cache_usage_perc)", "{{instance}}"),),
                "Near 1, requests wait for blocks, and some are preempted.",
            ),
            Panel(
                "Prompts found in the prefix cache",
                "percentunit",
                (
                    Query(
                        f"sum (rate(vllm:prefix_cache_hits_total{RATE}))"
                        f" / sum (rate(vllm:prefix_cache_queries_total{RATE}))",
                        "prefix cache",
                    ),
                ),
                "Share of prompts' tokens that need not be computed.",
            ),
            Panel(
                "Preemptions",
                "reqps",
                (_rate("vllm:num_preemptions_total", "instance"),),
                "Requests that were preempted because blocks ran out.",
            ),
        ),
    ),
)

ALERTS: tuple[Alert, ...] = (
    Alert(
        "KvferryNoDecodeInstance",
        'sum(kvferry_router_instance_up{role="decode"}) == 0',
        30,
        "No decode instance is up: every request fails.",
        "kvferry status",
        "critical",
    ),
    Alert(
        "KvferryNoPrefillInstance",
        'sum(kvferry_router_instance_up{role="prefill"}) == 0',
        120,
        "No prefill instance is up: decode instances compute prompts, and answers stall meanwhile.",
        "kvferry status",
    ),
    Alert(
        "KvferryInstanceDown",
        "kvferry_router_instance_up == 0",
        120,
        "{{ $labels.instance }} has been down for two minutes.",
        "kvferry status",
    ),
    Alert(
        "KvferryRequestsFail",
        'sum(rate(kvferry_router_requests_total{status=~"5.."}[5m]))'
        " / sum(rate(kvferry_router_requests_total[5m])) > 0.01",
        300,
        "More than one answer in a hundred is an error.",
        "kvferry doctor URL",
        "critical",
    ),
    Alert(
        "KvferryHandOffsFail",
        'sum(rate(kvferry_router_hand_offs_total{kind="local"}[5m]))'
        " / sum(rate(kvferry_router_hand_offs_total[5m])) > 0.05",
        600,
        "More than one request in twenty is computed on decode, because its hand-off failed.",
        "kvferry doctor URL",
    ),
    Alert(
        "KvferryKvCacheFull",
        "max by (instance) (vllm:kv_cache_usage_perc) > 0.95",
        600,
        "{{ $labels.instance }} has no room for further KV.",
        "more decode instances, or --kv-cache-memory",
    ),
    Alert(
        "KvferryAnswersLost",
        'sum(rate(kvferry_router_continuations_total{outcome="failed"}[5m])) > 0',
        60,
        "Answers broke off because their instance was lost, and no other could continue them.",
        "kvferry status",
        "critical",
    ),
)


def expressions() -> Iterator[str]:
    """All queries, of charts and of alerts."""
    for row in ROWS:
        for panel in row.panels:
            for query in panel.queries:
                yield query.expression
    for alert in ALERTS:
        yield alert.expression
