"""Alert rules, and a configuration of Prometheus that scrapes a router and all its instances."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from kvferry.cli.boards.panels import ALERTS


def alert_rules() -> str:
    """The rules as YAML."""
    return "\n".join(["groups:", "- name: kvferry", "  rules:", *_rules()]) + "\n"


def _rules() -> Iterator[str]:
    for alert in ALERTS:
        yield f"  - alert: {alert.name}"
        yield f"    expr: {_text(alert.expression)}"
        yield f"    for: {alert.for_s}s"
        yield "    labels:"
        yield f"      severity: {alert.severity}"
        yield "    annotations:"
        yield f"      summary: {_text(alert.summary)}"
        yield f"      remedy: {_text(alert.remedy)}"


def scrape_config(url: str, rules: Path | None = None, interval_s: int = 5, key_file: Path | None = None) -> str:
    """A configuration as YAML. Labels of instances are the router's (`honor_labels`), which knows their names.
    `key_file`: has the router's admin key."""
    parts = urlsplit(url)
    return (
        "\n".join(
            [
                "global:",
                f"  scrape_interval: {interval_s}s",
                *(["rule_files:", f"- {_text(str(rules))}"] if rules is not None else []),
                "scrape_configs:",
                "- job_name: kvferry",
                f"  scheme: {parts.scheme}",
                "  metrics_path: /metrics",
                "  params: {instances: [all]}",
                "  honor_labels: true",
                *(
                    ["  authorization:", f"    credentials_file: {_text(str(key_file))}"]
                    if key_file is not None
                    else []
                ),
                f"  static_configs: [{{targets: [{_text(parts.netloc)}]}}]",
            ]
        )
        + "\n"
    )


def _text(text: str) -> str:
    """A string of YAML; JSON's are."""
    return msgspec.json.encode(text).decode()
