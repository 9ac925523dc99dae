"""The cost of HTTP in an engine server: processor time for each streamed token, with an engine that computes nothing.

    python benchmarks/http_cost.py [--streams 32] [--tokens 500] [--profile]

Its engine makes one token for each running request in each step, as fast as the server takes them. The client is a
process of its own and reads bytes without looking at them. Told is the processor time of the event loop's thread alone,
for each token, so that a busy machine blurs the figure less than elapsed time would.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import pstats
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import uvloop
from transformers import AutoTokenizer

from kvferry.core.request import EngineOutput, Request
from kvferry.engine.launch import AsyncEngine
from kvferry.engine.server.app import build_app
from kvferry.engine.server.config import ServerConfig
from kvferry.models.catalog import resolve

BODY = {"prompt": "def add(a, b):", "stream": True, "ignore_eos": True}


class IdleEngine:
    """Steps without computing: every running request gets the next token of a text."""

    def __init__(self, tokenizer: Any) -> None:
        self.max_model_len = 65536
        self.model = SimpleNamespace(
            vocab_size=len(tokenizer), tokenizer=tokenizer, eos_token_ids=frozenset[int](), default_sampling={}
        )
        self.transfer, self.addresses, self.idle = None, (), False
        self._text = tokenizer("def add(a, b):\n    return a + b\n" * 20)["input_ids"]
        self._running: dict[str, tuple[Request, int]] = {}

    def add(self, request: Request) -> None:
        """As `Engine.add`."""
        self._running[request.request_id] = (request, 0)

    def abort(self, request_id: str) -> None:
        """As `Engine.abort`."""
        self._running.pop(request_id, None)

    def on_transfer(self, wake: Any) -> None:
        """Nothing is transferred."""

    @property
    def has_work(self) -> bool:
        """As `Engine.has_work`."""
        return bool(self._running)

    def step(self) -> list[EngineOutput]:
        """A token for each."""
        if self._running:
            time.sleep(0.0005)
        outputs = []
        for name, (request, number) in list(self._running.items()):
            last = number + 1 >= request.sampling.max_tokens
            token = self._text[number % len(self._text)]
            outputs.append(EngineOutput(request_id=name, token_ids=[token], finish_reason="length" if last else None))
            if last:
                del self._running[name]
            else:
                self._running[name] = (request, number + 1)
        return outputs

    def close(self) -> None:
        """Nothing is held."""


async def read_streams(port: int, number: int, path: str, body: dict[str, Any]) -> int:
    """Ask for `number` streams at once, read them to their ends; the bytes that came."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + data)
        count, tail = 0, b""
        while not tail.endswith(b"0\r\n\r\n"):
            chunk = await reader.read(65536)
            if not chunk:
                raise RuntimeError("the server broke off")
            count, tail = count + len(chunk), (tail + chunk)[-16:]
        writer.close()
        return count

    return sum(await asyncio.gather(*(one() for _ in range(number))))


def client(port: int, streams: int, path: str, body: dict[str, Any], turn: Connection) -> None:
    """The client's process: a round each time it is told to."""
    while turn.recv():
        turn.send(uvloop.run(read_streams(port, streams, path, body)))


async def measure(path: str, streams: int, tokens: int, rounds: int, profile: bool) -> Sequence[float]:
    """Microseconds of the event loop's thread for each token, by round; the first round is left out."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("kvferry/tiny-python"))
    engine_client = AsyncEngine(IdleEngine(tokenizer), ["model"])  # type: ignore[arg-type]
    server = build_app(engine_client, ServerConfig(port=0, shutdown_grace_s=0.0)).server()
    engine_client.start()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(server.run(lambda _, real: port.set_result(real)))
    ours, theirs = multiprocessing.Pipe()
    body = {**BODY, "max_tokens": tokens}
    if "chat" in path:
        body = {"messages": [{"role": "user", "content": "hi"}], **body}
        del body["prompt"]
    reader = multiprocessing.get_context("spawn").Process(target=client, args=(await port, streams, path, body, theirs))
    reader.start()
    costs = []
    profiler = cProfile.Profile()
    for number in range(rounds + 1):
        if profile and number == 1:
            profiler.enable()
        begun = time.thread_time()
        ours.send(True)
        await asyncio.to_thread(ours.recv)
        costs.append((time.thread_time() - begun) / (streams * tokens) * 1e6)
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    ours.send(False)
    server.stop()
    await serving
    await engine_client.close()
    reader.join()
    return costs[1:]


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--path", default="/v1/completions")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    costs = uvloop.run(measure(options.path, options.streams, options.tokens, options.rounds, options.profile))
    print(f"{options.path} {options.streams} streams: {statistics.median(costs):.1f} us/token (min {min(costs):.1f})")


if __name__ == "__main__":
    main()
