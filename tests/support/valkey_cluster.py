"""A cluster of key-value servers of one's own, as small as one can be: three nodes, without replicas."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress

from support.ports import free_port
from support.valkey_server import START_S, server_binary

NUM_NODES, NUM_SLOTS = 3, 16384


class ValkeyCluster:
    """Running on 127.0.0.1; keeps nothing on disk."""

    def __init__(self, *options: str) -> None:
        binary = server_binary()
        assert binary is not None
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-cluster-")
        self.ports = [free_port() for _ in range(NUM_NODES)]
        common = ["--bind", "127.0.0.1", "--cluster-enabled", "yes", "--save", "", "--appendonly", "no", *options]
        self.processes = [
            subprocess.Popen(
                [binary, "--port", str(port), "--cluster-port", str(free_port()), *common, *self._files(port)]
            )
            for port in self.ports
        ]
        self.url = f"valkey://127.0.0.1:{self.ports[0]}"
        self._join()

    def _files(self, port: int) -> list[str]:
        names = ["--cluster-config-file", f"nodes-{port}", "--logfile", f"log-{port}"]
        return ["--dir", self._folder.name, *names]

    def _join(self) -> None:
        deadline = time.monotonic() + START_S
        self._until(lambda port: self.say(port, "PING") == b"+PONG\r\n", deadline)
        bounds = [NUM_SLOTS * number // NUM_NODES for number in range(NUM_NODES + 1)]
        buses = [self.bus_of(port) for port in self.ports]
        for number, port in enumerate(self.ports):
            self.say(port, "CLUSTER", "ADDSLOTSRANGE", str(bounds[number]), str(bounds[number + 1] - 1))
            self.say(self.ports[0], "CLUSTER", "MEET", "127.0.0.1", str(port), buses[number])
        self._until(lambda port: b"cluster_state:ok" in self.say(port, "CLUSTER", "INFO"), deadline)
        self._until(lambda port: self.say(port, "CLUSTER", "NODES").count(b"connected") == NUM_NODES, deadline)

    def _until(self, holds: Callable[[int], bool], deadline: float) -> None:
        for port in self.ports:
            while True:
                with suppress(OSError):
                    if holds(port):
                        break
                assert time.monotonic() < deadline, "the cluster did not come up"
                time.sleep(0.05)

    def bus_of(self, port: int) -> str:
        """The port at which a node talks to the others."""
        nodes = self.say(port, "CLUSTER", "NODES").decode()
        return nodes.partition("@")[2].partition(" ")[0].partition(",")[0]

    def say(self, port: int, *words: str) -> bytes:
        """Send a node one command of plain words; the beginning of its answer."""
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall((" ".join(words) + "\r\n").encode())
            return sock.recv(65536)

    def nums_of_keys(self) -> list[int]:
        """Number of keys on each node."""
        return [int(self.say(port, "DBSIZE")[1:]) for port in self.ports]

    def kill(self, number: int) -> None:
        """Kill one node."""
        self.processes[number].kill()
        self.processes[number].wait(20)

    def close(self) -> None:
        """End all nodes."""
        for process in self.processes:
            process.kill()
            process.wait(20)
        self._folder.cleanup()
