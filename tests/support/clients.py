"""Clients that others have written, each in an environment of its own (scripts/install_clients.sh)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
