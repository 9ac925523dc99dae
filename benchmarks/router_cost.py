"""What the router costs: processor time for each request and for each streamed token, before mock instances.

    python benchmarks/router_cost.py [--connections 32] [--requests 2000] [--streams 64] [--tokens 200] [--rate 200]

P, D, router and clients are processes of their own, on loopback. P answers with a ticket at once; D answers whole, or
with one event for each token at `--rate` a second. Told is the processor time (user and system) of the router's
process, and its resident memory at the end. Run two builds in turn to compare them: a busy machine's figures wander.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from typing import Any

import psutil
import uvloop

from kvferry.http.client import Deadlines, HttpClient
from kvferry.http.config import HttpConfig
from kvferry.http.keys import Access
from kvferry.http.origin import Origin
from kvferry.http.request import Request
from kvferry.http.response import JSON, Response
from kvferry.http.routes import Route, Routes
from kvferry.http.server import HttpServer

ASK = Deadlines(connect_s=10, first_byte_s=60, between_s=60)
HEADERS = [JSON]
EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m",'
    b'"choices":[{"index":0,"text":" word"}]}\n\n'
)


class Mock:
    """An instance that computes nothing."""

    def __init__(self, role: str, rate: float) -> None:
        self._role, self._rate = role, rate

    def routes(self) -> Routes:
        """What a router asks of an instance."""
        return Routes(
            [
                Route("GET", "/health", self.health, Access.OPEN),
                Route("GET", "/kvferry/instance", self.instance, Access.ADMIN),
                Route("POST", "/kvferry/release", self.health, Access.ADMIN),
                Route("POST", "/v1/completions", self.prefill if self._role == "prefill" else self.decode),
            ]
        )

    async def health(self, request: Request, response: Response) -> None:
        """Always well."""
        await request.body.read()
        response.send_json(b'{"released":true}')

    async def instance(self, request: Request, response: Response) -> None:
        """As kvferry's own describe themselves."""
        facts = {
            "role": self._role, "engine_id": f"engine-{self._role}", "kv_host": "127.0.0.1", "kv_port": 4711,
            "kv_ranks": None, "kv_seal": "sealed", "connector": "P2pConnector", "layout": "f00d", "model_names": ["m"],
        }  # fmt: skip
        response.send_json(json.dumps(facts).encode())

    async def prefill(self, request: Request, response: Response) -> None:
        """The ticket, at once."""
        body = json.loads(await request.body.read())
        asked = body["kv_transfer_params"]
        ticket = {
            "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": asked["transfer_id"],
            "remote_engine_id": "engine-prefill", "remote_block_ids": [[1, 2, 3]],
            "prefill_result": {"first_token": 7, "seed": body.get("seed", 0)},
        }  # fmt: skip
        response.send_json(json.dumps({"choices": [{"text": "x"}], "kv_transfer_params": ticket}).encode())

    async def decode(self, request: Request, response: Response) -> None:
        """Whole, or token by token."""
        body = json.loads(await request.body.read())
        if not body.get("stream"):
            response.send_json(
                b'{"choices":[{"index":0,"text":"done","finish_reason":"stop"}],"usage":{"total_tokens":3}}'
            )
            return
        response.start(200, [(b"content-type", b"text/event-stream")])
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for number in range(body["max_tokens"]):
            response.write(EVENT)
            await response.drain()
            await asyncio.sleep(max(0.0, begun + (number + 1) / self._rate - loop.time()))
        response.end(b"data: [DONE]\n\n")


async def serve(role: str, rate: float) -> None:
    """Be a mock instance until killed."""
    server = HttpServer(Mock(role, rate).routes(), HttpConfig(port=0))
    await server.run(lambda _, port: print(port, flush=True))


def started(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A process, and the first line that it says."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline()


async def ask(client: HttpClient, router: Origin, body: dict[str, Any]) -> int:
    """One request to its end; the bytes that came."""
    data = json.dumps(body).encode()
    answer = await client.open(router, "POST", "/v1/completions", HEADERS, data, deadlines=ASK)
    try:
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {await answer.read(1000)!r}")
        return len(await answer.read(2**30))
    finally:
        answer.close()


async def load(router: Origin, said: argparse.Namespace, process: psutil.Process) -> None:
    """Requests, then streams; what each costs the router."""
    async with HttpClient() as client:
        left = said.requests

        async def one() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await ask(client, router, {"model": "m", "prompt": "a " * 200, "max_tokens": 8})

        await ask(client, router, {"model": "m", "prompt": "a", "max_tokens": 8})
        begun = spent(process)
        await asyncio.gather(*(one() for _ in range(said.connections)))
        print(f"{(spent(process) - begun) / said.requests * 1e6:.0f} us/request at {said.connections} connections")
        begun = spent(process)
        body = {"model": "m", "prompt": "a " * 200, "max_tokens": said.tokens, "stream": True}
        await asyncio.gather(*(ask(client, router, body) for _ in range(said.streams)))
        cost = (spent(process) - begun) / (said.streams * said.tokens) * 1e6
        print(f"{cost:.1f} us/token at {said.streams} streams of {said.rate:g} tokens/s")
        print(f"{process.memory_info().rss / 2**20:.0f} MiB")


def spent(process: psutil.Process) -> float:
    """Processor seconds so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


ROUTER = """
import json, sys
from kvferry.http.config import HttpConfig
from kvferry.router.config import RouterConfig
from kvferry.router.server import run_router
config = RouterConfig(prefill_url=tuple(sys.argv[1].split()), decode_url=(sys.argv[2],))
run_router(config, HttpConfig(port=0), on_ready=lambda about: print(about["url"], flush=True))
"""


def main() -> None:
    """Start all, measure, end all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--be", help=argparse.SUPPRESS)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--plain", action="store_true", help="one instance for both phases, no hand-off")
    said = parser.parse_args()
    if said.be:
        uvloop.run(serve(said.be, said.rate))
        return
    processes = []
    try:
        urls = {}
        for role in ("prefill", "decode"):
            process, line = started(__file__, "--be", role, "--rate", str(said.rate))
            processes.append(process)
            urls[role] = f"http://127.0.0.1:{line.strip()}"
        router, line = started("-c", ROUTER, "" if said.plain else urls["prefill"], urls["decode"])
        processes.append(router)
        uvloop.run(load(Origin.parse(line.strip()), said, psutil.Process(router.pid)))
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
