"""Real servers for stores."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.ports import free_port


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


def start_mooncake_master(folder: Path) -> "tuple[str, subprocess.Popen[bytes]]":
    """Mooncake's master, which answers; its address."""
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    program = Path(sys.executable).parent / "mooncake_master"
    ports = [free_port(), free_port()]
    addresses = ["--rpc_address=127.0.0.1", f"--rpc_port={ports[0]}", "--metrics_host=127.0.0.1"]
    log = (folder / "log").open("wb")
    process = subprocess.Popen([str(program), *addresses, f"--metrics_port={ports[1]}"], stdout=log, stderr=log)
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", ports[0]), 1).close()
            return f"127.0.0.1:{ports[0]}", process
        except OSError:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "the master does not answer"
            time.sleep(0.02)


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
