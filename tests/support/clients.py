"""Clients that others have written, each in an environment of its own (scripts/install_clients.sh)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CALLS = Path(__file__).parent / "client_calls.py"
ENVIRONMENTS = {
    "openai": "",
    "anthropic": "",
    "litellm": "litellm",
    "instructor": "agents",
    "langchain": "agents",
    "pydantic-ai": "agents",
    "openai-agents": "agents",
    "llama-index": "llamaindex",
}
"""The environment that has each library of `CALLS`; empty: that of the tests."""


def environment_of(client: str) -> Path:
    """Where it is installed; `KVFERRY_LITELLM`, `KVFERRY_AIPERF` and so on say that it is elsewhere."""
    return Path(os.environ.get(f"KVFERRY_{client.upper()}", ROOT / f".venv-{client}"))


def needs(client: str) -> pytest.MarkDecorator:
    """Skips where it is not installed."""
    is_there = (environment_of(client) / "bin/python").is_file()
    return pytest.mark.skipif(not is_there, reason=f"needs {client}: scripts/install_clients.sh {client}")


def run_client(client: str, program: str, *arguments: str, folder: Path, timeout_s: float, **more: str) -> str:
    """What a program of its environment prints. It knows nothing of this one, and asks no hub."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [environment_of(client).absolute() / "bin" / program, *arguments],
        cwd=folder,
        env={**kept, "HF_HUB_OFFLINE": "1", **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout


def library_calls(
    url: str, library: str, count: int, at_once: int, *names: str, folder: Path, timeout_s: float
) -> list[tuple[str, Any]]:
    """The name and the result of each call of a library (`client_calls.py`)."""
    arguments = (str(CALLS), url, library, str(count), str(at_once), *names)
    if environment := ENVIRONMENTS[library]:
        # litellm would fetch its list of prices.
        offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        printed = run_client(environment, "python", *arguments, folder=folder, timeout_s=timeout_s, **offline)
    else:
        command = [sys.executable, *arguments]
        printed = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True, timeout=timeout_s
        ).stdout
    return [(name, result) for name, result in json.loads(printed.splitlines()[-1])]


def failed_calls(results: dict[str, Any]) -> list[str]:
    """The errors among the results of calls, by name."""
    return [result for result in results.values() if isinstance(result, str) and "Error: " in result[:60]]


def differing_calls(results: list[tuple[str, Any]], expected: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Name, result and expected result of the calls that have another one."""
    return [(name, result, expected[name]) for name, result in results if result != expected[name]]
