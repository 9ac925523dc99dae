"""Boards and alert rules name metrics that exist, are what Grafana and Prometheus read, and show data of a fleet."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from docs_site import metrics
from kvferry.cli.boards import grafana, perses
from kvferry.cli.boards.panels import ALERTS, ROWS, expressions
from kvferry.cli.boards.rules import alert_rules, scrape_config
from kvferry.cli.main import main
from kvferry.fleet.processes.vllm.ports import free_ports
from support.processes import Cluster, cluster
from support.waiting import until

NAME = re.compile(r"\b(?:vllm:|kvferry:|kvferry_)\w+")
FROM_CONNECTORS = {"kvferry:connector_taken_bytes_total"}
"""Metrics that a connector names while it runs; the test with a fleet sees them."""
NOT_YET = ("kvferry_router_leg_errors", "kvferry_router_retries", "kvferry_router_continuations")
"""Counters of failures, without series until something has failed."""

needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs Prometheus: scripts/install_prometheus.sh"
)


def known() -> set[str]:
    names = set()
    for metric in (*metrics.engine(), *metrics.router()):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(metric.type, ("",))
        names |= {metric.name + suffix for suffix in suffixes}
    return names | FROM_CONNECTORS


def test_queries_name_metrics_that_exist() -> None:
    used = {name for expression in expressions() for name in NAME.findall(expression)}
    assert used - known() == set()


def test_every_panel_has_a_place_of_its_own_and_says_what_it_tells() -> None:
    panels = [panel for panel in grafana.dashboard()["panels"] if panel["type"] != "row"]
    assert len(panels) == sum(len(row.panels) for row in ROWS)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in grafana.dashboard()["panels"]}) == len(grafana.dashboard()["panels"])
    assert all(panel["description"].endswith(".") and panel["targets"] for panel in panels)


@pytest.mark.processes
def test_the_types_of_perses_take_its_board(tmp_path: Path) -> None:
    folder = Path(__file__).parents[3] / ".browser" / "perses" / "node_modules"
    if not (folder / ".bin" / "tsc").is_file():
        pytest.skip("needs the types of Perses: make install-browser")
    (tmp_path / "node_modules").symlink_to(folder)
    board = json.dumps(perses.dashboard())
    kind = 'import { DashboardResource } from "@perses-dev/core";\n'
    (tmp_path / "board.ts").write_text(f"{kind}export const board: DashboardResource = {board};\n")
    options = ["--noEmit", "--skipLibCheck", "--strict", "--module", "nodenext", "--target", "es2022"]
    command = [str(folder / ".bin" / "tsc"), *options, "board.ts"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


def test_references_of_perses_lead_to_panels() -> None:
    spec = perses.dashboard()["spec"]
    shown = [item["content"]["$ref"] for grid in spec["layouts"] for item in grid["spec"]["items"]]
    assert sorted(shown) == sorted(f"#/spec/panels/{name}" for name in spec["panels"])


def test_grafanas_own_types_read_the_board() -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    board = models.Dashboard.from_json(grafana.dashboard())
    assert board.uid == "kvferry"
    assert len(board.panels) == len(grafana.dashboard()["panels"])


@needs_prometheus
def test_promtool_finds_nothing_wrong(tmp_path: Path) -> None:
    rules, config = tmp_path / "rules.yml", tmp_path / "prometheus.yml"
    rules.write_text(alert_rules())
    config.write_text(scrape_config("http://127.0.0.1:8000", rules))
    done = subprocess.run(["promtool", "check", "config", str(config)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {len(ALERTS)} rules found" in done.stdout + done.stderr


@pytest.mark.parametrize("form", ["grafana", "perses", "rules", "prometheus"])
def test_the_command_prints_each(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["boards", form]) == 0
    printed = capsys.readouterr().out
    assert "kvferry" in printed
    if form in ("grafana", "perses"):
        json.loads(printed)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(Path("kvferry/tiny-python"), tmp_path_factory.mktemp("fleet")) as running:
        yield running


@contextmanager
def prometheus(url: str, folder: Path) -> Iterator[str]:
    """A real Prometheus that scrapes this router once a second."""
    rules, config = folder / "rules.yml", folder / "prometheus.yml"
    rules.write_text(alert_rules())
    config.write_text(scrape_config(url, rules, interval_s=1))
    (port,) = free_ports(1)
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            address = f"http://127.0.0.1:{port}"
            until(lambda: _is_ready(address), 60, (folder / "log").read_text)
            yield address
        finally:
            process.terminate()


def _is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/-/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def ask(address: str, expression: str) -> list[Any]:
    answer = httpx.get(f"{address}/api/v1/query", params={"query": expression}, timeout=10).json()
    assert answer["status"] == "success", answer
    result: list[Any] = answer["data"]["result"]
    return result


@needs_prometheus
@pytest.mark.processes
def test_every_query_returns_data_of_a_running_fleet(fleet: Cluster, tmp_path: Path) -> None:
    with prometheus(fleet.router.url, tmp_path) as address:

        def send() -> None:
            fleet.router.complete("def add(a, b):\n" * 20)

        send()
        charts = [query.expression for row in ROWS for panel in row.panels for query in panel.queries]
        missing = [expression for expression in charts if not any(name in expression for name in NOT_YET)]
        deadline = time.monotonic() + 90
        while missing and time.monotonic() < deadline:
            send()  # rates need two scrapes that differ
            missing = [expression for expression in missing if not ask(address, expression)]
        assert missing == []
        assert [one["metric"]["role"] for one in ask(address, "sum by (role) (kvferry_router_instance_up)")]
        firing = httpx.get(f"{address}/api/v1/alerts", timeout=10).json()["data"]["alerts"]
        assert [alert for alert in firing if alert["state"] == "firing"] == []
