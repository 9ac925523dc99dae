"""compose.yaml as Docker Compose itself reads it, and the files that its service for boards writes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs_site import commands

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / ".venv-compose" / "docker-compose"
COMMANDS = commands.commands()


def config(file: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The file with all defaults, by Docker Compose."""
    if not COMPOSE.exists():
        pytest.skip("needs Docker Compose: make install-compose")
    environment = {name: value for name, value in os.environ.items() if name != "KVFERRY_AUTH_TOKEN"} | variables
    arguments = [str(COMPOSE), "-f", str(file), "--project-directory", str(ROOT), "--profile", "boards"]
    arguments += ["config", "--format", "json"]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    done = config(ROOT / "compose.yaml", KVFERRY_AUTH_TOKEN="0123456789abcdef")
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(done.stdout)["services"]
    return read


def test_compose_reads_it_and_says_what_is_missing(services: dict[str, Any]) -> None:
    assert set(services) == {"router", "prefill", "decode", "boards", "prometheus", "grafana"}
    assert services["router"]["ports"][0]["host_ip"] == "127.0.0.1"
    without = config(ROOT / "compose.yaml")
    assert without.returncode != 0
    assert "of at least 16 characters" in without.stderr


def test_compose_names_a_key_that_it_does_not_know(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((ROOT / "compose.yaml").read_text().replace("depends_on", "depend_on"))
    done = config(wrong, KVFERRY_AUTH_TOKEN="0123456789abcdef")
    assert done.returncode != 0
    assert "depend_on" in done.stderr


@pytest.mark.parametrize("service", ["router", "prefill", "decode"])
def test_its_commands_have_flags_that_exist(service: str, services: dict[str, Any]) -> None:
    program, command, *arguments = services[service]["command"]
    assert (program, command) == ("kvferry", service)
    known = {name for flag in commands.flags(COMMANDS[command]) for name in flag.names}
    used = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    assert used - known == set()


@pytest.mark.processes
def test_its_boards_are_written_for_prometheus_and_grafana(tmp_path: Path) -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["boards"]
    shell, flag, script = service["command"]
    program = tmp_path / "kvferry"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvferry.cli.main "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = script.replace("/boards/", f"{tmp_path}/")
    done = subprocess.run(
        [shell, flag, script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "kvferry.json").read_text())["panels"]
    assert yaml.safe_load((tmp_path / "dashboards.yml").read_text())["providers"][0]["options"]["path"]
    [source] = yaml.safe_load((tmp_path / "datasources.yml").read_text())["datasources"]
    assert (source["url"], source["isDefault"]) == ("http://prometheus:9090", True)
    if shutil.which("promtool"):
        checked = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
        assert subprocess.run(checked, capture_output=True, timeout=60, check=False).returncode == 0
