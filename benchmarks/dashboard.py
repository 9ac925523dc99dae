"""The cost of an open page for a router: CPU of the router without a page, with one, and with ten, at 100 instances.

    python benchmarks/dashboard.py              100 instances, 30 s each

The instances are one process of this machine that answers as vLLM's servers do, with metrics of a real server's length.
The router is `kvferry router`, with clients that ask without a pause at a few requests a second, so that there is
something to show. The goal is at most 1 % of a core for one page, and for ten about what one costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import aiohttp
from aiohttp import web

from report import save

GOAL = 0.01
METRICS_LINES = 150
"""Of a vLLM server's, beside those that the page reads."""


def metrics(number: int) -> str:
    """As a vLLM server's, about 15 kB."""
    edges = ("0.001", "0.0025", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1.0", "+Inf")
    lines = [
        f'vllm:num_requests_running{{engine="0"}} {number % 7}',
        'vllm:num_requests_waiting{engine="0"} 0',
        f'vllm:kv_cache_usage_perc{{engine="0"}} {number % 90 / 100}',
        f'vllm:prompt_tokens_total{{engine="0"}} {number * 1000}',
        f'vllm:generation_tokens_total{{engine="0"}} {number * 100}',
        *(f'vllm:inter_token_latency_seconds_bucket{{engine="0",le="{edge}"}} {number * 10}' for edge in edges),
        *(
            f'vllm:other_{index}_total{{engine="0",model_name="a-model/of-some-length"}} {number}'
            for index in range(METRICS_LINES)
        ),
    ]
    return "".join(f"# HELP {line.split('{')[0]} Something about it.\n{line}\n" for line in lines)


def serve_instances(count: int) -> None:
    """Serve all instances until the end of stdin; prints their ports."""

    async def run() -> None:
        looks = 0

        async def completions(request: web.Request) -> web.StreamResponse:
            await request.read()
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for _ in range(20):
                await response.write(b'data: {"choices":[{"index":0,"text":"a"}]}\n\n')
                await asyncio.sleep(0.01)
            await response.write(b"data: [DONE]\n\n")
            return response

        async def show_metrics(request: web.Request) -> web.Response:
            nonlocal looks
            looks += 1
            return web.Response(text=metrics(looks))

        app = web.Application()
        app.router.add_get("/health", lambda request: _text("ok"))
        app.router.add_get("/version", lambda request: _json({"version": "0.32.0"}))
        models = {"data": [{"id": "m", "owned_by": "vllm"}]}
        app.router.add_get("/v1/models", lambda request: _json(models))
        app.router.add_get("/metrics", show_metrics)
        app.router.add_post("/v1/completions", completions)
        runner = web.AppRunner(app)
        await runner.setup()
        for _ in range(count):
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(json.dumps([address[1] for address in runner.addresses]), flush=True)
        await asyncio.to_thread(sys.stdin.read)

    asyncio.run(run())


async def _text(text: str) -> web.Response:
    return web.Response(text=text)


async def _json(content: object) -> web.Response:
    return web.json_response(content)


@contextmanager
def instances(count: int) -> Iterator[list[int]]:
    """The ports of so many instances."""
    command = [sys.executable, __file__, "--serve-instances", str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()


@contextmanager
def router(ports: list[int]) -> Iterator[tuple[str, int]]:
    """URL and process of a router in front of instances, once it serves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    urls = [f"--decode-url=http://127.0.0.1:{port}" for port in ports]
    program = str(Path(sys.executable).with_name("kvferry"))
    with subprocess.Popen([program, "router", *urls, f"--port={url.rpartition(':')[2]}"]) as process:
        try:
            wait_until_healthy(url)
            yield url, process.pid
        finally:
            process.terminate()


def wait_until_healthy(url: str, timeout_s: float = 60.0) -> None:
    """Wait for a router with an instance."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"{url} does not serve")


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(url: str, pid: int, num_pages: int, seconds: float) -> float:
    """The share of a core that the router takes with so many open pages."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def follow() -> None:
            async with session.get(url + "/kvferry/page/feed") as answer:
                async for _ in answer.content.iter_any():
                    pass

        async def ask() -> None:
            body = {"model": "m", "prompt": "a prompt " * 100, "stream": True, "max_tokens": 20}
            while True:
                async with session.post(url + "/v1/completions", json=body) as answer:
                    await answer.read()
                await asyncio.sleep(0.3)

        tasks = [asyncio.create_task(follow()) for _ in range(num_pages)] + [asyncio.create_task(ask())]
        await asyncio.sleep(3)
        begun, at = cpu_s(pid), time.monotonic()
        await asyncio.sleep(seconds)
        share = (cpu_s(pid) - begun) / (time.monotonic() - at)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return share


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve-instances", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results")
    options = parser.parse_args()
    if options.serve_instances:
        serve_instances(options.serve_instances)
        return
    shares: dict[int, list[float]] = {0: [], 1: [], 10: []}
    with instances(options.instances) as ports, router(ports) as (url, pid):
        for _ in range(options.rounds):
            for num_pages, measured in shares.items():
                measured.append(asyncio.run(measure(url, pid, num_pages, options.seconds)))
    medians = {num_pages: median(measured) for num_pages, measured in shares.items()}
    for num_pages, share in medians.items():
        added = share - medians[0]
        print(f"{num_pages:>3} pages: {100 * share:.2f} % of a core, {100 * added:+.2f} % for them; goal {GOAL:.0%}")
    if options.save:
        settings = {"instances": options.instances, "seconds": options.seconds, "rounds": options.rounds}
        save("dashboard", settings, {f"{num_pages} pages": share for num_pages, share in medians.items()})


if __name__ == "__main__":
    main()
