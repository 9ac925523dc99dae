"""How many instructions the router's process executes for a request: a number that no busy machine changes.

    python benchmarks/router_instructions.py [--requests 64] [--stream]

Counted by valgrind's callgrind (the programs `valgrind` and `callgrind_control`), without the kernel's, over 8
connections to one prefill and one decode instance that compute nothing (`router.py`). The second of the two figures is
of twice as many requests. To compare two versions, run it with each on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from router import OURS, Peers, free_port

_TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)
_START_S = 240.0
"""Under valgrind everything takes tens of times as long."""
_TOKENS = 100
_CONNECTIONS = 8


def control(option: list[str], process: subprocess.Popen[bytes]) -> None:
    """Tell callgrind something; it has done so on return."""
    subprocess.run(["callgrind_control", *option, str(process.pid)], check=True, capture_output=True)


def measure(said: argparse.Namespace, peers: Peers, process: subprocess.Popen[bytes], port: int, out: Path) -> None:
    """Print what a request takes, twice."""

    def ask(number: int) -> None:
        peers.load(port, _CONNECTIONS, max(1, number // _CONNECTIONS), 0, _TOKENS if said.stream else 0, 200.0)

    peers.until_ready(port, _START_S)
    ask(5 * _CONNECTIONS)
    control(["-i", "on"], process)
    ask(2 * _CONNECTIONS)
    for turn, number in enumerate((said.requests, 2 * said.requests), 1):
        control(["-z"], process)
        ask(number)
        control(["-d"], process)
        found = _TOTAL.search(out.with_name(f"{out.name}.{turn}").read_text())
        assert found is not None
        print(f"{number} requests: {int(found[1]) / number:,.0f} instructions each")


def main() -> None:
    """Start the processes, measure, and end them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--stream", action="store_true", help=f"streams of {_TOKENS} tokens")
    said = parser.parse_args()
    processes: list[subprocess.Popen[Any]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            out, port, peers = Path(folder) / "out", free_port(), Peers(Path(folder))
            urls = []
            for role in ("prefill", "decode"):
                process, own_port = peers.instance(role)
                processes.append(process)
                urls.append(f"http://127.0.0.1:{own_port}")
            valgrind = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
            flags = ["--port", str(port), "--prefill-url", urls[0], "--decode-url", urls[1]]
            router = subprocess.Popen([*valgrind, sys.executable, *OURS, *flags])
            processes.append(router)
            measure(said, peers, router, port, out)
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
