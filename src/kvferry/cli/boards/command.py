"""`kvferry boards`: dashboards of Grafana and Perses, alert rules, and Prometheus' configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from kvferry.cli.boards import grafana, perses
from kvferry.cli.boards.rules import alert_rules, scrape_config
from kvferry.http.client.origin import Origin

Form = Literal["grafana", "perses", "rules", "prometheus"]


def boards(
    form: Annotated[Form, Parameter(help="What to print.")],
    *,
    url: Annotated[str, Parameter(help="prometheus: URL of the router to scrape.")] = "http://127.0.0.1:8000",
    rules: Annotated[Path | None, Parameter(help="prometheus: file with the alert rules.")] = None,
    key_file: Annotated[Path | None, Parameter(help="prometheus: file with the router's admin key.")] = None,
) -> int:
    """Print a dashboard for Grafana or Perses, alert rules, or a configuration of Prometheus.

        kvferry boards grafana > kvferry.json

        kvferry boards rules > kvferry.rules.yml

        kvferry boards prometheus --rules kvferry.rules.yml > prometheus.yml

    Prometheus scrapes the router, which returns the metrics of all its instances too (/metrics?instances=all).
    """
    match form:
        case "rules":
            sys.stdout.write(alert_rules())
        case "prometheus":
            sys.stdout.write(scrape_config(str(Origin.parse(url, "--url")), rules, key_file=key_file))
        case _:
            content = (grafana if form == "grafana" else perses).dashboard()
            sys.stdout.write(msgspec.json.format(msgspec.json.encode(content)).decode() + "\n")
    return 0
