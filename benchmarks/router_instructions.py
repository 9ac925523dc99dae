"""How many instructions the router's process executes for a request: a number that no busy machine changes.

    python benchmarks/router_instructions.py [--requests 60] [--stream]

Counted by valgrind's callgrind (the programs `valgrind` and `callgrind_control`), without the kernel's, over 8
connections to one prefill and one decode instance that compute nothing (`router.py`). The second of the two figures is
of twice as many requests. To compare two versions, run it with each on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvloop

from kvferry.core.errors import KvferryError
from kvferry.http.client import HttpClient
from kvferry.http.origin import Origin
from router import OURS, ask, free_port, started

_TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)
_START_S = 240.0
"""Under valgrind everything takes tens of times as long."""
_TOKENS = 100
_CONNECTIONS = 8


def control(option: list[str], process: subprocess.Popen[bytes]) -> None:
    """Tell callgrind something; it has done so on return."""
    subprocess.run(["callgrind_control", *option, str(process.pid)], check=True, capture_output=True)


async def burst(client: HttpClient, router: Origin, number: int, body: dict[str, Any]) -> None:
    """So many requests over all connections."""
    left = iter(range(number))

    async def one() -> None:
        for _ in left:
            await ask(client, router, body)

    await asyncio.gather(*(one() for _ in range(_CONNECTIONS)))


async def until_ready(client: HttpClient, router: Origin) -> None:
    """Wait until it answers."""
    async with asyncio.timeout(_START_S):
        while True:
            with suppress(KvferryError, RuntimeError):
                await ask(client, router, {"model": "m", "prompt": "a", "max_tokens": 8})
                return
            await asyncio.sleep(0.5)


async def measure(said: argparse.Namespace, process: subprocess.Popen[bytes], port: int, out: Path) -> None:
    """Print what a request takes, twice."""
    body: dict[str, Any] = {"model": "m", "prompt": "a " * 200, "max_tokens": 8}
    if said.stream:
        body = {"model": "m", "prompt": "200 " + "a " * 200, "max_tokens": _TOKENS, "stream": True}
    router = Origin.parse(f"http://127.0.0.1:{port}")
    async with HttpClient() as client:
        await until_ready(client, router)
        await burst(client, router, 5 * _CONNECTIONS, body)
        control(["-i", "on"], process)
        await burst(client, router, 2 * _CONNECTIONS, body)
        for turn, number in enumerate((said.requests, 2 * said.requests), 1):
            control(["-z"], process)
            await burst(client, router, number, body)
            control(["-d"], process)
            found = _TOTAL.search(out.with_name(f"{out.name}.{turn}").read_text())
            assert found is not None
            print(f"{number} requests: {int(found[1]) / number:,.0f} instructions each")


def main() -> None:
    """Start the processes, measure, and end them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--stream", action="store_true", help=f"streams of {_TOKENS} tokens")
    said = parser.parse_args()
    processes: list[subprocess.Popen[Any]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            out, port = Path(folder) / "out", free_port()
            urls = []
            for role in ("prefill", "decode"):
                process, line = started(str(Path(__file__).with_name("router.py")), "--be", role)
                processes.append(process)
                urls.append(f"http://127.0.0.1:{line.strip()}")
            valgrind = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
            flags = ["--port", str(port), "--prefill-url", urls[0], "--decode-url", urls[1]]
            router = subprocess.Popen([*valgrind, sys.executable, *OURS, *flags])
            processes.append(router)
            uvloop.run(measure(said, router, port, out))
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
