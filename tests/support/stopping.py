"""Servers that tests stop, kill and end. A signal to stop is only on its way when it was sent, so `stop` waits."""

from __future__ import annotations

import signal
import subprocess
import tempfile
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


class StoppableServer:
    """What servers of one's own have in common: a process, and a folder that goes with it."""

    process: subprocess.Popen[bytes]
    _folder: tempfile.TemporaryDirectory[str]

    def pause(self) -> None:
        stop(self.process)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.resume()
        self.kill()
        self._folder.cleanup()
