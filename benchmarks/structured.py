"""What structured output costs: tokens a second and the gaps between tokens with and without, beside vLLM.

Two models with random weights: an 88M-parameter Llama with a vocabulary of 8 thousand, and a smaller one with Mistral's
Tekken vocabulary of 130 thousand (its file comes with vLLM). The streams of a batch are constrained by nothing, by
objects of two fields, by objects of thirty fields with patterns, or by one of fifty tools; a schema is compiled before
its streams are counted, and `of_free` is their speed by that of the free ones before them. Then a schema of two
thousand optional fields is compiled while eight free streams go on. Each side is its own server on one core, the client
on the other; sides take turns. Prints medians, writes results/structured.<processor>.json.

    python benchmarks/structured.py --vllm .venv-vllm/bin/python
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.models.random_model import make_random_model
from load import Streamed, stream_completion
from models import make_bench_model
from report import print_machine, save
from tekken_tokenizer import find_tekken, write_tokenizer

MODELS = ("88M, vocabulary 8k", "vocabulary 130k")
BATCHES = (1, 8, 32)
NUM_TOKENS = 96
MANY = {"type": "array", "minItems": 200}
START_S = 300.0


def schemas() -> dict[str, Any]:
    """Schemas whose documents are longer than the answers, by name; None: no constraint."""
    simple = _object({"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}})
    kinds = (
        {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4,8}$"},
        {"type": "string", "enum": ["draft", "active", "archived"]},
        {"type": "integer", "minimum": 0, "maximum": 100000},
        {"type": "array", "items": {"type": "number"}, "maxItems": 4},
        {"type": "string", "pattern": "^[a-z]+@[a-z]+\\.(com|org)$"},
    )
    hard = _object({f"field_{index}": kinds[index % len(kinds)] for index in range(30)})
    tools = [
        _object({"name": {"const": f"tool_{index}"}, "arguments": _object({f"key_{index}": kinds[index % len(kinds)]})})
        for index in range(50)
    ]
    items = {"two fields": simple, "30 fields": hard, "50 tools": {"anyOf": tools}}
    return {"free": None} | {name: {**MANY, "items": item} for name, item in items.items()}


def pathological() -> dict[str, Any]:
    """An object of two thousand optional fields."""
    fields = {f"property_number_{index}": {"type": "string"} for index in range(2000)}
    return {"type": "object", "properties": fields, "additionalProperties": False}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="the Python of an environment with vLLM")
    parser.add_argument("--rounds", type=int, default=2, help="how often every side takes its turn")
    parser.add_argument("--repeat", type=int, default=3, help="runs of a cell in one turn")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sides", nargs="+", choices=["kvferry", "vllm"], default=["kvferry", "vllm"])
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="numbers of streams")
    return parser.parse_args()


def make_model(folder: Path, name: str, vllm: Path) -> str:
    """Write the model; returns its folder."""
    if name == MODELS[0]:
        return make_bench_model(folder)
    size = write_tokenizer(find_tekken(vllm), folder / "tokenizer")
    shape: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    shape |= {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "vocab_size": size}
    return str(make_random_model(folder / "large", "llama", tokenizer=folder / "tokenizer", **shape))


def command_of(side: str, model: str, port: int, vllm: Path) -> list[str]:
    """The server's command line."""
    common = ["--port", str(port), "--served-model-name", "m", "--dtype", "float32", "--max-model-len", "2048"]
    if side == "kvferry":
        return [
            *[str(Path(sys.executable).parent / "kvferry"), "serve", model, "--prefill", "0", *common],
            *["--kv-cache-memory", "512MiB", "--verbose"],
        ]
    return [
        *[str(vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1", *common],
        *["--enforce-eager", "--kv-cache-memory-bytes", str(512 * 2**20), "--block-size", "32"],
    ]


@contextmanager
def served(side: str, model: str, vllm: Path, core: int) -> Iterator[str]:
    """Run one side on one core; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        **{"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command_of(side, model, port, vllm)],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        try:
            _wait_until_up(process, port)
            yield f"http://127.0.0.1:{port}"
        except BaseException:
            log.seek(0)
            print(log.read()[-3000:], file=sys.stderr)
            raise
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=60)


def _wait_until_up(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the server did not listen within {START_S:g} s, or ended")


def prompt_of(index: int) -> list[int]:
    """32 token ids."""
    rng = random.Random(index)
    return [rng.randrange(300, 4000) for _ in range(32)]


async def batch(session: aiohttp.ClientSession, url: str, size: int, num_tokens: int, schema: Any) -> list[Streamed]:
    """Streams that begin together."""
    more = {} if schema is None else {"structured_outputs": {"json": schema}}
    streams = await asyncio.gather(
        *(stream_completion(session, url, "m", prompt_of(index), num_tokens, **more) for index in range(size))
    )
    if errors := {stream.error for stream in streams if stream.error or len(stream.token_times) != num_tokens}:
        raise RuntimeError(f"an answer was cut: {errors}")
    return list(streams)


def figures_of(streams: list[Streamed]) -> dict[str, float]:
    """Tokens a second while all decode, and gaps in ms."""
    begin = max(stream.token_times[0] for stream in streams)
    end = min(stream.token_times[-1] for stream in streams)
    counted = sum(1 for stream in streams for moment in stream.token_times if begin < moment <= end)
    gaps = sorted(gap for stream in streams for gap in stream.gaps)
    return {
        "tokens_per_s": counted / (end - begin),
        "itl_p50_ms": 1e3 * gaps[len(gaps) // 2],
        "itl_p99_ms": 1e3 * gaps[int(len(gaps) * 0.99)],
    }


async def turn(url: str, repeat: int, batches: Sequence[int]) -> dict[str, list[dict[str, float]]]:
    """All cells of one side. Constraints take turns, so that each run has an unconstrained one beside it."""
    cells: dict[str, list[dict[str, float]]] = {}
    timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await batch(session, url, 2, 8, None)
        for name, schema in schemas().items():
            began = time.monotonic()
            await batch(session, url, 1, 2, schema)
            cells.setdefault(f"{name}: first request", []).append({"seconds": time.monotonic() - began})
        for size in batches:
            for _ in range(repeat):
                free = 0.0
                for name, schema in schemas().items():
                    figures = figures_of(await batch(session, url, size, NUM_TOKENS, schema))
                    free = free or figures["tokens_per_s"]
                    figures["of_free"] = figures["tokens_per_s"] / free
                    cells.setdefault(f"{name}, b{size}", []).append(figures)
        for compiles in (False, True):
            streaming = asyncio.create_task(batch(session, url, 8, 320, None))
            await asyncio.sleep(0.5)
            compiling = asyncio.create_task(_compile(session, url)) if compiles else None
            figures = figures_of(await streaming)
            if compiling is not None:
                figures["compiled_s"] = await compiling
            cells.setdefault(f"beside 2,000 fields: {'compiled' if compiles else 'none'}", []).append(figures)
    return cells


async def _compile(session: aiohttp.ClientSession, url: str) -> float:
    """Seconds until an answer with the pathological schema, or its refusal."""
    began = time.monotonic()
    await stream_completion(session, url, "m", prompt_of(99), 1, structured_outputs={"json": pathological()})
    return time.monotonic() - began


def measure(model: str, options: argparse.Namespace, core: int) -> dict[str, dict[str, dict[str, float]]]:
    """Medians by cell, side and figure."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for _ in range(options.rounds):
        for side in options.sides:
            with served(side, model, options.vllm, core) as url:
                for cell, figures in asyncio.run(turn(url, options.repeat, options.batches)).items():
                    runs.setdefault(cell, {}).setdefault(side, []).extend(figures)
            print(f"  {side} done", flush=True)
    return {
        cell: {
            side: {key: statistics.median(run[key] for run in some) for key in some[0]} for side, some in sides.items()
        }
        for cell, sides in runs.items()
    }


def show(results: dict[str, dict[str, dict[str, float]]], sides: list[str]) -> None:
    """A table."""
    for cell, by_side in results.items():
        parts = (
            f"{side}: " + ", ".join(f"{key} {value:.2f}" for key, value in by_side[side].items()) for side in sides
        )
        print(f"  {cell:34s} " + " | ".join(parts))


def main() -> None:
    """All models and sides."""
    options = parse()
    print_machine()
    client, core = sorted(os.sched_getaffinity(0))[0], sorted(os.sched_getaffinity(0))[-1]
    os.sched_setaffinity(0, {client})
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            print(name, flush=True)
            os.sched_setaffinity(0, {client, core})
            model = make_model(Path(folder), name, options.vllm)
            os.sched_setaffinity(0, {client})
            results[name] = measure(model, options, core)
            show(results[name], options.sides)
    if (options.models, options.batches) == (list(MODELS), list(BATCHES)) and len(options.sides) > 1:
        settings = {"rounds": options.rounds, "repeat": options.repeat, "num_tokens": NUM_TOKENS, "threads": 1}
        print(f"wrote {save('structured', settings, results)}")


if __name__ == "__main__":
    main()
