"""A process that is stopped when this returns: the signal alone is only on its way."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

STOP_S = 20.0


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGSTOP, and wait until no thread of it runs."""
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + STOP_S
    while not all(state == "T" for state in _states(process.pid)):
        assert time.monotonic() < deadline, f"process {process.pid} does not stop"
        time.sleep(0.001)


def _states(pid: int) -> list[str]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads]
