"""The share of prompts found in the caches of Dynamo's mockers, with kvferry's router and with Dynamo's frontend.

    python benchmarks/routing_dynamo.py PYTHON [--sessions 250] [--workers 4] [--blocks 1500] [--clients 16] [--save]

`PYTHON`: of an environment with Dynamo and kvferry (`scripts/install_dynamo.sh`). The sessions are those of
`routing.py --generated`, with blocks of 32 tokens instead of 512, sent in order to new mockers for each router,
`--clients` at a time, as fast as they are answered. A mocker has `--blocks` blocks of cache and answers ten
times as fast as the engine that it imitates. The *hit ratio* is the share of prompt tokens that the mockers report as
cached (`usage.prompt_tokens_details`), in tokens of full blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from dynamo_mockers import Mockers, until_served
from report import save
from router import end, free_port
from routing import Arrival, generate

BLOCK = 32
NUM_ANSWER = 8
MAX_BLOCKS = 60
"""Of a prompt: the model has a context of 2,048 tokens."""
VOCABULARY = range(5, 4000)


def prompt_of(arrival: Arrival) -> list[int]:
    """The tokens of its blocks; the last block is not full, as in the trace. Prompts end where the context does."""
    blocks = arrival.blocks[:MAX_BLOCKS]
    tokens = [token for block in blocks for token in random.Random(block).choices(VOCABULARY, k=BLOCK)]
    return tokens[: len(tokens) - 1 - arrival.num_tokens % (BLOCK - 1)]


async def send(url: str, prompts: list[list[int]], clients: int) -> tuple[float, list[float]]:
    """The hit ratio, and seconds of each request. Raises `aiohttp.ClientError`."""
    cached, durations, queue = 0, list[float](), iter(prompts)

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal cached
        for prompt in queue:
            body = {"model": "m", "prompt": prompt, "max_tokens": NUM_ANSWER, "ignore_eos": True}
            began = time.monotonic()
            async with session.post(f"{url}/v1/completions", json=body) as response:
                response.raise_for_status()
                usage = (await response.json())["usage"]
            durations.append(time.monotonic() - began)
            cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return cached / sum(len(prompt) // BLOCK * BLOCK for prompt in prompts), durations


def measure(settings: argparse.Namespace, name: str, prompts: list[list[int]]) -> dict[str, float]:
    """One router, before new mockers. `name`: `kvferry POLICY`, or `Dynamo MODE`."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mockers = Mockers(settings.python, folder, end)
        stack.callback(mockers.end)
        for _ in range(settings.workers):
            sizes = ("--num-gpu-blocks-override", str(settings.blocks), "--block-size", str(BLOCK))
            mockers.start("agg", "--speedup-ratio", "10", *sizes)
        port, (stack_name, mode) = str(free_port()), name.split()
        if stack_name == "kvferry":
            command = mockers.router(port, "--decode-url", "dynamo://dynamo/backend", "--policy", mode)
        else:
            command = mockers.frontend(port, mode)
        mockers.serve(command, "router")
        url = f"http://127.0.0.1:{port}"
        until_served(url)
        time.sleep(settings.settle_s)  # until all workers have been found
        hit_ratio, durations = asyncio.run(send(url, prompts, settings.clients))
        settings.versions = mockers.versions()
    ordered = sorted(durations)
    return {
        "hit_ratio": round(hit_ratio, 4),
        "median_ms": round(statistics.median(ordered) * 1e3, 1),
        "p99_ms": round(ordered[len(ordered) * 99 // 100] * 1e3, 1),
    }


def main() -> None:
    """Measure each router, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("python")
    parser.add_argument("--sessions", type=int, default=250)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=1500, help="of a mocker's cache")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--settle-s", type=float, default=5.0)
    parser.add_argument("--routers", nargs="+", default=ROUTERS)
    parser.add_argument("--save", action="store_true")
    settings = parser.parse_args()
    prompts = [prompt_of(arrival) for arrival in generate(settings.sessions)]
    different = {block for arrival in generate(settings.sessions) for block in arrival.blocks}
    print(f"{len(prompts)} requests, {sum(map(len, prompts))} tokens, {len(different)} different blocks\n")
    print("| router | hit ratio | median, ms | 99th, ms |\n|---|---|---|---|")
    results: dict[str, Any] = {}
    for name in settings.routers:
        results[name] = figures = measure(settings, name, prompts)
        print(f"| {name} | {' | '.join(map(str, figures.values()))} |", flush=True)
    if settings.save:
        values = {key: getattr(settings, key) for key in ("sessions", "workers", "blocks", "clients")}
        shape = {"requests": len(prompts), "different_blocks": len(different)}
        print(f"\n{save('routing_dynamo', {**values, **shape, **settings.versions}, results)}")


ROUTERS = ["kvferry cost", "kvferry prefix", "kvferry round_robin", "Dynamo kv", "Dynamo round-robin"]

if __name__ == "__main__":
    main()
