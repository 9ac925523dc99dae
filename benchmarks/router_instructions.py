"""Number of instructions that the router's process executes for a request: a number that no busy machine changes.

    python benchmarks/router_instructions.py [--requests 120] [--stream] [--sequential] [--src FOLDER]

Counted by valgrind's callgrind (the programs `valgrind` and `callgrind_control`), without the kernel's. One client asks
one prefill and one decode instance that compute nothing (`router.py`), one request after the other: with more of them,
the figure depends on what comes together. What does not belong to requests is left out: the router's periodic work
(health checks, deadlines) is stopped once it is up, and what a connection costs is told apart, as each number is the
difference of two loads. `--src`: the `src` of another version of kvferry, which is measured as well.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from router import OURS, Peers, end, free_port

_TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)
_START_S = 300.0
"""Under valgrind everything takes tens of times as long."""
_TOKENS, _RATE = 100, 1000.0
_FEW = 8
_STOPPED_AFTER_S = 6.0

_QUIET = f"""
import asyncio, sys, threading
import kvferry.http.client.http_client as client, kvferry.http.server.http_server as server
client._TICK_S = server._TICK_S = 1e7
sleep = asyncio.sleep
def stop():
    asyncio.sleep = lambda seconds, *result: sleep(seconds and 1e7, *result)
threading.Timer({_STOPPED_AFTER_S}, stop).start()
from kvferry.cli.main import main
main()
"""
"""Starts a router as its command does, and stops what it does again and again."""


class Counted:
    """A router under callgrind."""

    def __init__(self, source: str, flags: list[str], folder: Path, peers: Peers, port: int) -> None:
        self._out, self._peers, self._port, self._num_dumps = folder / "out", peers, port, 0
        valgrind = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no"]
        command = [*valgrind, f"--callgrind-out-file={self._out}", sys.executable, "-c", _QUIET, *OURS[2:], *flags]
        environment = os.environ | ({"PYTHONPATH": source} if source else {})
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    def control(self, option: list[str]) -> None:
        """Tell callgrind something; it has done so on return."""
        subprocess.run(["callgrind_control", *option, str(self.process.pid)], check=True, capture_output=True)

    def instructions(self, requests: int, tokens: int) -> int:
        """Instructions of this number of requests of one client."""
        self.control(["-z"])
        self._peers.load(self._port, 1, requests, 0, tokens, _RATE)
        self.control(["-d"])
        self._num_dumps += 1
        total = _TOTAL.search(self._out.with_name(f"{self._out.name}.{self._num_dumps}").read_text())
        assert total is not None
        return int(total[1])


def measure(router: Counted, peers: Peers, port: int, options: argparse.Namespace) -> str:
    """Instructions of a request."""
    tokens = _TOKENS if options.stream else 0
    peers.until_ready(port, _START_S)
    time.sleep(_STOPPED_AFTER_S + 2.0)
    peers.load(port, 1, 2 * _FEW, 0, tokens, _RATE)
    router.control(["-i", "on"])
    peers.load(port, 1, _FEW, 0, tokens, _RATE)
    few = router.instructions(_FEW, tokens)
    each = (router.instructions(_FEW + options.requests, tokens) - few) / options.requests
    return f"{each:,.0f} instructions a request, {few - _FEW * each:,.0f} a connection of a client"


def main() -> None:
    """Start the processes, measure, and end them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--stream", action="store_true", help=f"streams of {_TOKENS} tokens")
    parser.add_argument("--sequential", action="store_true", help="D is called once P has answered")
    parser.add_argument("--src", help="the src of another version of kvferry")
    options = parser.parse_args()
    for source in [options.src, ""] if options.src else [""]:
        print(f"{source or 'this version'}: {measured(source, options)}", flush=True)


def measured(source: str, options: argparse.Namespace) -> str:
    """One version's figures."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port, peers = free_port(), Peers(folder)
        flags = ["--port", str(port), *(["--hand-off", "sequential"] if options.sequential else [])]
        for role in ("prefill", "decode"):
            process, own_port = peers.instance(role)
            stack.callback(end, process)
            flags += [f"--{role}-url", f"http://127.0.0.1:{own_port}"]
        router = Counted(source, flags, folder, peers, port)
        stack.callback(end, router.process)
        return measure(router, peers, port, options)


if __name__ == "__main__":
    main()
