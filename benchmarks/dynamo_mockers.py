"""Dynamo's mockers, its frontend, and kvferry's router before the same mockers, for benchmarks.

Mockers are Dynamo's own: workers that compute nothing, with the scheduler and the prefix cache of an engine. All find
each other through files of a folder. `python`: of an environment with Dynamo and kvferry (`scripts/install_dynamo.sh`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from kvferry.models.catalog import resolve

MODEL = str(resolve("kvferry/tiny-python"))


class Mockers:
    """Owns the processes; `end` ends them."""

    def __init__(self, python: str, folder: Path, on_end: Callable[[subprocess.Popen[bytes]], None]) -> None:
        self.python, self._folder, self._on_end = python, folder, on_end
        self._processes: list[subprocess.Popen[bytes]] = []
        hosts = ("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_TCP_RESPONSE_STREAM_HOST")
        self.environment = {
            **os.environ,
            **dict.fromkeys(hosts, "127.0.0.1"),
            **{"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(folder / "store"), "DYN_REQUEST_PLANE": "tcp"},
            **{"DYN_EVENT_PLANE": "zmq", "DYN_LOG": "warn", "HF_HUB_OFFLINE": "1"},
        }

    def start(self, mode: str, *flags: str) -> None:
        """Start one mocker; `mode`: prefill, decode or agg."""
        model = ("--model-path", MODEL, "--model-name", "m", "--disaggregation-mode", mode)
        command = (self.python, "-m", "dynamo.mocker", *model, *flags)
        self._processes.append(self._run(command, f"mocker-{len(self._processes)}"))

    def frontend(self, port: str, mode: str) -> list[str]:
        """The command of Dynamo's frontend. `mode`: its `--router-mode`."""
        command = [self.python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", port]
        return [*command, "--router-mode", mode]

    def router(self, port: str, *flags: str) -> list[str]:
        """The command of kvferry's router."""
        command = [sys.executable, "-m", "kvferry.cli.main", "router", "--port", port, "--dynamo-python", self.python]
        return [*command, "--disaggregate-from", "0", *flags]

    def serve(self, command: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        """Start a router or frontend."""
        process = self._run(command, name)
        self._processes.append(process)
        return process

    def _run(self, command: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)

    def end(self) -> None:
        """End all processes."""
        for process in self._processes:
            self._on_end(process)

    def versions(self) -> dict[str, str]:
        """The version of Dynamo."""
        code = "from importlib.metadata import version; print(version('ai-dynamo'))"
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=False)
        return {"dynamo": done.stdout.strip()}


def until_served(url: str, timeout_s: float = 120.0) -> None:
    """Wait until a completion is answered. Raises `TimeoutError`."""
    deadline = time.monotonic() + timeout_s
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 1}
    while True:
        try:
            if httpx.post(f"{url}/v1/completions", json=body, timeout=10).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} does not serve within {timeout_s:g} s")
        time.sleep(0.3)
