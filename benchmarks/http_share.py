"""The share of an engine's throughput that its HTTP server costs: kvferry beside vLLM (`--vllm`), a tiny model.

Many prompts at once, a fixed number of tokens each: once given to the engine in a process of its own, which returns
token ids (in-process), and once streamed by its server, one event a token. Either has one core; the client, which only
counts the events, has another. Sides take turns. Told are tokens per second, the processor time for each token of all
processes of a side, and the share of each that HTTP costs: medians of the shares of each turn.

    python benchmarks/http_share.py --vllm .venv-vllm/bin/python

Prints a table; writes results/http_share.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from kvferry.models.catalog import resolve
from report import print_machine, save
from served import running
from start import free_port

CHILD = Path(__file__).with_name("http_share_side.py")
LIMIT_S = 180.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class Turn:
    """One turn of one side. `num_events` is 0 in-process."""

    tokens_per_s: float
    cpu_us: float
    num_events: int


@dataclass(frozen=True)
class Server:
    """A server that is up: the port, and its first process."""

    port: int
    pid: int


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="the Python of an environment with vLLM; left out when not given")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="of the side, and of the client")
    parser.add_argument("--only", choices=("kvferry", "vLLM"), help="this engine, and nothing is written")
    return parser.parse_args()


# The sides.


@contextmanager
def in_process(python: Path, engine: str, model: str, options: argparse.Namespace) -> Iterator[Any]:
    """An engine that answers a line with a line."""
    settings = json.dumps({"model": model, "streams": options.streams, "tokens": options.tokens})
    command = ["taskset", "-c", str(options.cores[0]), str(python), str(CHILD), engine, settings]
    pipe = subprocess.PIPE
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _next_answer(process, log)
            yield lambda: _in_process_turn(process, log, options.streams * options.tokens)
        finally:
            process.stdin.close()
            process.wait(timeout=30)


def _next_answer(process: subprocess.Popen[str], log: Any) -> dict[str, float]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            reply: dict[str, float] = json.loads(line)
            return reply
    log.seek(0)
    raise RuntimeError(f"the engine in-process ended:\n{log.read()[-2000:]}")


def _in_process_turn(process: subprocess.Popen[str], log: Any, num_tokens: int) -> Turn:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    reply = _next_answer(process, log)
    return Turn(num_tokens / reply["seconds"], reply["cpu_s"] / num_tokens * 1e6, 0)


@contextmanager
def kvferry_server(model: str, core: int) -> Iterator[Server]:
    """`kvferry serve`."""
    flags = ["--served-model-name", "m", "--dtype", "float32", "--kv-cache-memory", "128MiB", "--port", "0"]
    with running("serve", model, *flags, cores=[core]) as url:
        yield Server(httpx.URL(url.url).port or 0, url.pid)


@contextmanager
def vllm_server(python: Path, model: str, core: int) -> Iterator[Server]:
    """vLLM's OpenAI server."""
    port = free_port()
    command = ["taskset", "-c", str(core), str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "4096", "--enforce-eager", "--kv-cache-memory-bytes", str(128 * 2**20)]
    command += ["--block-size", "32", "--disable-uvicorn-access-log"]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT}) as process,
    ):
        try:
            _until_healthy(process, port, log)
            yield Server(port, process.pid)
        finally:
            process.terminate()
            process.wait(timeout=60)


def _until_healthy(process: subprocess.Popen[bytes], port: int, log: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    with httpx.Client(timeout=5) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if client.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
    log.seek(0)
    raise RuntimeError(f"the server does not serve:\n{log.read()[-2000:]}")


# A turn over HTTP.


def http_turn(server: Server, options: argparse.Namespace) -> Turn:
    """All streams at once, to their ends."""
    num_tokens = options.streams * options.tokens
    before_s, began = cpu_s(server.pid), time.perf_counter()
    num_events = asyncio.run(_streams(server.port, options))
    seconds, spent_s = time.perf_counter() - began, cpu_s(server.pid) - before_s
    return Turn(num_tokens / seconds, spent_s / num_tokens * 1e6, num_events)


def cpu_s(pid: int) -> float:
    """Of a process and all those below it."""
    process = psutil.Process(pid)
    times = [child.cpu_times() for child in (process, *process.children(recursive=True))]
    return float(sum(cpu_time.user + cpu_time.system for cpu_time in times))


async def _streams(port: int, options: argparse.Namespace) -> int:
    counts = await asyncio.gather(*(_stream(port, number, options.tokens) for number in range(options.streams)))
    return sum(counts)


async def _stream(port: int, number: int, num_tokens: int) -> int:
    """The number of events of one stream, without the closing one. Raises `RuntimeError` if it breaks off."""
    prompt = prompts(number + 1)[number]
    body = {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    data = json.dumps(body | {"temperature": 0.0}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    count, tail, ended = 0, b"", False
    while chunk := await reader.read(65536):
        count += (tail + chunk).count(b"data: {")
        ended = ended or b"data: [DONE]" in tail + chunk
        tail = chunk[-6:]
    writer.close()
    if not ended:
        raise RuntimeError("a stream broke off")
    return count


def prompts(number: int) -> list[list[int]]:
    """As many prompts of 16 tokens."""
    return [[5 + (index * 7 + which) % 200 for which in range(16)] for index in range(number)]


# All of it.


def measure(model: str, options: argparse.Namespace) -> dict[str, dict[str, list[Turn]]]:
    """Turns by engine and way. The first round is left out."""
    core = options.cores[0]
    turns: dict[str, dict[str, list[Turn]]] = {}
    with ExitStack() as stack:
        ways: dict[str, tuple[Any, Server]] = {}
        if options.only != "vLLM":
            alone = stack.enter_context(in_process(Path(sys.executable), "kvferry", model, options))
            ways["kvferry"] = alone, stack.enter_context(kvferry_server(model, core))
        if options.vllm is not None and options.only != "kvferry":
            alone = stack.enter_context(in_process(options.vllm, "vLLM", model, options))
            ways["vLLM"] = alone, stack.enter_context(vllm_server(options.vllm, model, core))
        os.sched_setaffinity(0, {options.cores[1]})
        for number in range(options.rounds + 1):
            for engine, (alone, server) in ways.items():
                pair = {"in-process": alone(), "HTTP": http_turn(server, options)}
                print(f"{engine}: {pair}", flush=True)
                for way, turn in pair.items() if number else ():
                    turns.setdefault(engine, {}).setdefault(way, []).append(turn)
    return turns


def summary(ways: dict[str, list[Turn]], num_tokens: int) -> dict[str, Any]:
    """Medians of one engine."""
    pairs = list(zip(ways["in-process"], ways["HTTP"], strict=True))
    figures: dict[str, Any] = {
        way: {name: statistics.median(getattr(turn, name) for turn in some) for name in ("tokens_per_s", "cpu_us")}
        for way, some in ways.items()
    }
    figures["events_per_token"] = statistics.median(turn.num_events for turn in ways["HTTP"]) / num_tokens
    figures["share_of_throughput"] = statistics.median(
        1 - http.tokens_per_s / alone.tokens_per_s for alone, http in pairs
    )
    figures["share_of_cpu"] = statistics.median(1 - alone.cpu_us / http.cpu_us for alone, http in pairs)
    return figures


def main() -> None:
    """Measure, print, save."""
    options = parse()
    print_machine()
    turns = measure(str(resolve("kvferry/tiny-python")), options)
    results = {engine: summary(ways, options.streams * options.tokens) for engine, ways in turns.items()}
    for engine, turns in results.items():
        alone, http = turns["in-process"], turns["HTTP"]
        print(
            f"{engine:8s} in-process {alone['tokens_per_s']:7.0f} tokens/s, {alone['cpu_us']:6.1f} us each; HTTP"
            f" {http['tokens_per_s']:7.0f}, {http['cpu_us']:6.1f}; costs {turns['share_of_throughput']:.1%} of"
            f" throughput, {turns['share_of_cpu']:.1%} of CPU time; {turns['events_per_token']:.2f} events a token"
        )
    if options.only is None:
        settings = {name: getattr(options, name) for name in ("streams", "tokens", "rounds", "cores")}
        print(f"wrote {save('http_share', settings | {'model': 'kvferry/tiny-python', 'dtype': 'float32'}, results)}")


if __name__ == "__main__":
    main()
