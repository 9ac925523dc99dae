"""The time for which one request stalls all others. Enormous bodies, beside a client that asks for little.

While a large or hostile request is sent and answered, another connection asks for `/version` over and over. Its
slowest answer is how long the server's event loop was held up; its slowest answer without such a request is what the
machine does by itself. The server stands still under the benchmark, so read the figure of `nothing` first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.models.random_model import make_random_model
from served import kvferry

MILLION = 1_000_000
TEXT = "ferry "
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def bodies(max_model_len: int) -> dict[str, tuple[str, bytes]]:
    """Path and body of each request, by what it is."""
    user = {"role": "user", "content": "a"}
    call = {"function": {"name": "f", "arguments": json.dumps(dict.fromkeys(map(str, range(20_000)), 1))}}
    requests: dict[str, tuple[str, Any]] = {
        "a million prompt tokens": (COMPLETIONS, {"prompt": [1] * (MILLION - 1)}),
        "a whole context of tokens": (COMPLETIONS, {"prompt": [7] * (max_model_len - 1)}),
        "128 prompts of 4,000 characters, echoed": (COMPLETIONS, {"prompt": [TEXT * 660] * 128, "echo": True}),
        "15 MB of text": (COMPLETIONS, {"prompt": TEXT * 2_500_000}),
        "1 MB of text, truncated": (COMPLETIONS, {"prompt": TEXT * 170_000, "truncate_prompt_tokens": 5}),
        "2 million escapes": (COMPLETIONS, {"prompt": "é" * 2_500_000}),
        "15,000 messages": (CHAT, {"messages": [user] * 15_000}),
        "tools of 90,000 objects": (CHAT, {"messages": [user], "tools": [{"a": 1}] * 45_000}),
        "arguments of tool calls, 3 MB": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [call] * 10}]}),
        "50,000 unknown fields": (COMPLETIONS, {"prompt": "a"} | {f"unknown {number}": 1 for number in range(50_000)}),
        "a ticket of a million blocks": (COMPLETIONS, {"prompt": "a", "kv_transfer_params": {"x": [1] * 900_000}}),
        "a whole context of tokens as text": ("/detokenize", {"tokens": [70] * max_model_len}),
        "1 MB of text as tokens": ("/tokenize", {"prompt": TEXT * 170_000, "return_token_strs": True}),
    }
    short = {COMPLETIONS: {"max_tokens": 1}, CHAT: {"max_tokens": 1}}
    return {name: (path, json.dumps(body | short.get(path, {})).encode()) for name, (path, body) in requests.items()}


async def measure(url: str, cases: dict[str, tuple[str, bytes]], repeats: int) -> dict[str, dict[str, Any]]:
    """The slowest answer to `/version` during each case, the best of `repeats`, in ms, and the case's own answer."""
    results: dict[str, dict[str, Any]] = {}
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(600)) as client:

        async def nothing() -> int:
            await asyncio.sleep(1)
            return 0

        def post(path: str, body: bytes) -> Callable[[], Awaitable[int]]:
            async def ask() -> int:
                async with client.post(path, data=body, headers={"Content-Type": "application/json"}) as answer:
                    await answer.read()
                    return answer.status

            return ask

        asking = {"nothing": nothing, **{name: post(*case) for name, case in cases.items()}}
        for name, ask in asking.items():
            runs = [await _slowest(client, ask) for _ in range(repeats)]
            best = min(runs, key=lambda run: run["held_ms"])
            results[name] = best
            print(f"{name:42} {best['status']:4} {best['took_ms']:9.0f} ms, held up {best['held_ms']:7.1f} ms")
    return results


async def _slowest(client: aiohttp.ClientSession, ask: Callable[[], Awaitable[int]]) -> dict[str, Any]:
    begun = time.perf_counter()
    reply = asyncio.ensure_future(ask())
    held = 0.0
    while not reply.done():
        start = time.perf_counter()
        async with client.get("/version") as answer:
            await answer.read()
        held = max(held, time.perf_counter() - start)
        await asyncio.sleep(0.001)
    return {"status": reply.result(), "took_ms": (time.perf_counter() - begun) * 1e3, "held_ms": held * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-model-len", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=3)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_random_model(Path(folder) / "model", "llama", max_position_embeddings=settings.max_model_len)
        options = ("--port=0", "--dtype=float32", "--kv-cache-memory=512MiB")
        with kvferry("serve", str(model), *options) as url:
            asyncio.run(measure(url, bodies(settings.max_model_len), settings.repeats))


if __name__ == "__main__":
    main()
