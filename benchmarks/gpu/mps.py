"""NVIDIA's Multi-Process Service: without it, processes that share a GPU take turns; with it, their kernels overlap.

Never run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gpu.records import NotPossible

START_S = 10.0
"""Seconds for the daemon to start or end."""
CHECK_S = 30.0
"""Seconds for a client to run."""
CHECK = "import torch; assert (torch.ones(8, device='cuda') * 2).sum().item() == 16"
"""A program that uses the GPU."""


def shares(prefill: int, decode: int) -> tuple[dict[str, str], dict[str, str]]:
    """Environments that give P and D so many per cent of the GPU's multiprocessors."""
    name = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    return {name: str(prefill)}, {name: str(decode)}


@contextmanager
def mps(folder: Path, check_s: float = CHECK_S) -> Iterator[Mapping[str, str]]:
    """Run the daemon with its pipes in `folder`; yields the environment of its clients. The GPU's settings stay as
    they are. Raises `NotPossible` if it does not run here, or if a client takes longer than `check_s`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "control").unlink(missing_ok=True)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    everything = {**os.environ, **environment}
    try:
        # In the foreground, so that it is a child of this process and ends with it.
        daemon = subprocess.Popen(
            ["nvidia-cuda-mps-control", "-f"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=everything,
        )
    except OSError as error:
        raise NotPossible(f"MPS is not installed (nvidia-cuda-mps-control: {error.strerror})") from error
    try:
        _wait_for(folder / "control", daemon)
        _require_clients(everything, check_s)
        yield environment
    finally:
        daemon.terminate()
        try:
            daemon.wait(START_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _wait_for(control: Path, daemon: subprocess.Popen[str]) -> None:
    """Until the daemon takes commands."""
    end = time.monotonic() + START_S
    while not control.exists():
        if daemon.poll() is not None:
            assert daemon.stdout is not None
            lines = daemon.stdout.read().strip().splitlines() or [f"exit status {daemon.returncode}"]
            raise NotPossible(f"MPS does not start: {lines[-1]}")
        if time.monotonic() > end:
            raise NotPossible(f"MPS does not start within {START_S:g} s")
        time.sleep(0.05)


def _require_clients(environment: Mapping[str, str], check_s: float) -> None:
    """Raise `NotPossible` if a program under MPS cannot use the GPU."""
    command = [sys.executable, "-c", CHECK]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=check_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotPossible("MPS starts, but its clients hang") from error
    if done.returncode != 0:
        raise NotPossible(f"MPS starts, but its clients fail: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
