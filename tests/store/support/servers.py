"""Real servers for stores."""

import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest


def start_server(folder: Path, *arguments: str) -> tuple[Path, "subprocess.Popen[bytes]"]:
    """A Valkey or Redis server on a socket in `folder`, which answers."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("needs valkey-server or redis-server")
    path = folder / "server.socket"
    fixed = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    process = subprocess.Popen([program, *fixed, *arguments], stdout=subprocess.DEVNULL)
    wait_for_socket(path, process)
    return path, process


def wait_for_socket(path: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                connection.sendall(b"PING\r\n")
                if connection.recv(1):
                    return
        except OSError:
            pass
        assert process.poll() is None, "the server ended"
        assert time.monotonic() < deadline, "the server does not answer"
        time.sleep(0.01)
