"""LMCache's server of one's own."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.ports import free_port
from support.stopping import StoppableServer

START_S = 120.0


def is_installed() -> bool:
    """Whether there is one (`scripts/install_media.sh` installs it)."""
    return importlib.util.find_spec("lmcache") is not None


class LMCacheServer(StoppableServer):
    """Running, on a port of the loopback interface."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-lmcache-")
        self.port = free_port()
        self.start()

    def start(self) -> None:
        """Returns when it answers."""
        settings = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(self.port)]
        log = Path(self._folder.name) / "log"
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=settings)
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.05)
