"""A key-value server of one's own: Valkey, or Redis where that is what the machine has."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from support.stopping import StoppableServer

BINARIES = ("valkey-server", "redis-server")
START_S = 20.0


def server_binary() -> str | None:
    """The first that is installed (scripts/install_test_servers.sh installs one)."""
    return next((found for name in BINARIES if (found := shutil.which(name))), None)


class ValkeyServer(StoppableServer):
    """Running, on a Unix socket in a folder of its own, keeping nothing on disk."""

    def __init__(self, *options: str) -> None:
        binary = server_binary()
        assert binary is not None
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-server-")
        self.path = Path(self._folder.name) / "socket"
        self.url = f"unix://{self.path}"
        self._command = [binary, "--port", "0", "--unixsocket", str(self.path), "--save", "", "--appendonly", "no"]
        self._command += ["--dir", self._folder.name, "--logfile", "log", *options]
        self.start()

    def start(self) -> None:
        """Returns when it answers."""
        self.process = subprocess.Popen(self._command)
        deadline = time.monotonic() + START_S
        while True:
            try:
                if self.say("PING") == b"+PONG\r\n":
                    return
            except OSError:
                assert self.process.poll() is None, (Path(self._folder.name) / "log").read_text()
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.01)

    def say(self, *words: str) -> bytes:
        """Send one command of plain words; the beginning of its answer."""
        return self.send((" ".join(words) + "\r\n").encode())

    def send(self, request: bytes) -> bytes:
        """Send a request as it is; the beginning of the answer."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(str(self.path))
            sock.sendall(request)
            return sock.recv(65536)

    def num_keys(self) -> int:
        return int(self.say("DBSIZE")[1:])
