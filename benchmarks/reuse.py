"""How soon is the first token there when the KV of a long document comes from a store?

A document of 4,000 tokens with a new question behind it each time, one engine on one core without a prefix cache:

  computed   nothing is kept
  media      memory, file with a warm and with a cold page cache, a Valkey or Redis server, a Mooncake Store, LMCache
  vLLM       (--vllm) the same model: computed, with vLLM's own connectors, and with kvferry's in it

Sides take turns. Then, for each medium, the GB/s of putting and getting the document's blocks through the store, and
what the medium itself gives for as many bytes in pieces of that size: plain writes and reads of files, memory copied,
the server's own benchmark program, Mooncake's own client.

Prints tables, writes results/reuse.json.

    python benchmarks/reuse.py --vllm .venv-vllm/bin/python
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from kvferry.core.errors import KvferryError
from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams
from kvferry.core.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.store.base import Block, KVStore, Read
from kvferry.store.table import BUILTIN, find_store
from models import SHAPE, make_bench_model
from report import print_machine, save

QUESTION_TOKENS = 12
BATCH = 32
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
CHILD = Path(__file__).with_name("reuse_vllm.py")
WAIT_S = 60.0
CHILD_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000, help="length of the document")
    parser.add_argument("--repeat", type=int, default=5, help="questions for each medium")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--media", nargs="+", help="only these")
    parser.add_argument("--vllm", type=Path, help="the Python of an environment with vLLM and kvferry")
    parser.add_argument(
        "--layers", type=int, default=SHAPE["num_hidden_layers"], help="of the model; fewer to try it out"
    )
    return parser.parse_args()


# The media.


def free_port() -> int:
    """A port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextmanager
def server(*command: str, port: int, log: Path) -> Iterator[None]:
    """A program, once it listens."""
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            deadline = time.monotonic() + WAIT_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"{command[0]} does not serve:\n{log.read_text()[-2000:]}") from None
                    time.sleep(0.05)
            yield
        finally:
            process.terminate()


def open_media(folder: Path, stack: ExitStack) -> dict[str, str]:
    """URL by name, with the servers that they need."""
    media = {"memory": "memory:512MiB?name=reuse", "file": f"file:{folder}/kv"}
    valkey = shutil.which("valkey-server") or shutil.which("redis-server")
    if valkey:
        port = free_port()
        fixed = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
        stack.enter_context(server(valkey, "--port", str(port), *fixed, port=port, log=folder / "valkey.log"))
        media["valkey"] = f"valkey://127.0.0.1:{port}"
    master = Path(sys.executable).with_name("mooncake_master")
    if master.exists():
        port, metrics = free_port(), free_port()
        flags = [
            f"--rpc_port={port}",
            "--rpc_address=127.0.0.1",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={metrics}",
        ]
        stack.enter_context(server(str(master), *flags, port=port, log=folder / "mooncake.log"))
        media["mooncake"] = f"mooncake://127.0.0.1:{port}?segment_bytes=512MiB&buffer_bytes=256MiB"
    if "lmcache" in BUILTIN:
        media["lmcache"] = "lmcache:"
    return media


def drop_page_cache(folder: Path) -> None:
    """Of all files below it, once they are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


# The first token.


def engine_of(model: str, options: argparse.Namespace, url: str | None) -> Engine:
    """One engine, with a store or without."""
    config = EngineConfig(
        model=model,
        dtype=options.dtype,
        device="cpu",
        kv_cache_memory="512MiB",
        block_size=options.block_size,
        prefix_caching=False,
        max_num_batched_tokens=2048,
    )
    if url is None:
        return Engine(config)
    extra = {"store": url, "prefetch": False}
    return Engine(config, KVTransferConfig(kv_connector="KVStoreConnector", kv_connector_extra_config=extra))


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds to it, and the token."""
    engine.add(Request(request_id=f"{time.monotonic_ns()}", prompt_token_ids=prompt, sampling=ONE_TOKEN))
    began = time.perf_counter()
    while True:
        for output in engine.step():
            if output.finish_reason is not None:
                if output.error is not None:
                    raise output.error
                return time.perf_counter() - began, output.token_ids[0]
        if engine.idle:
            time.sleep(0.0002)


def settle(engine: Engine) -> None:
    """Wait until all that is to be kept is."""
    deadline = time.monotonic() + WAIT_S
    while engine.statistics().connector.get("writer_waiting_bytes", 0) > 0:
        if time.monotonic() > deadline:
            raise RuntimeError("the store does not take the blocks")
        engine.step()
        time.sleep(0.01)


def measure_first_tokens(
    model: str, media: dict[str, str], options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Seconds of each medium, sides taking turns. Every token is compared with the computed one."""
    draws = random.Random(1)
    document = [draws.randrange(SHAPE["vocab_size"]) for _ in range(options.tokens)]
    samples: dict[str, list[float]] = {}
    with ExitStack() as stack:
        plain = stack.enter_context(closing(engine_of(model, options, None)))
        engines = {name: stack.enter_context(closing(engine_of(model, options, url))) for name, url in media.items()}
        for engine in engines.values():
            first_token(engine, [*document, 1])
            settle(engine)
        for _ in range(options.repeat):
            question = [draws.randrange(SHAPE["vocab_size"]) for _ in range(QUESTION_TOKENS)]
            prompt = [*document, *question]
            seconds, expected = first_token(plain, prompt)
            samples.setdefault("computed", []).append(seconds)
            for name, engine in engines.items():
                for label, before in _variants(name, folder):
                    before()
                    seconds, token = first_token(engine, prompt)
                    if token != expected:
                        raise RuntimeError(f"{name} gave token {token}, and {expected} was computed")
                    samples.setdefault(label, []).append(seconds)
        for name, engine in engines.items():
            if not engine.statistics().external.num_external_hits >= options.repeat * (
                options.tokens - 2 * options.block_size
            ):
                raise RuntimeError(f"{name}: the KV did not come from the store")
    return {name: summary(values, samples["computed"]) for name, values in samples.items()}


def _variants(name: str, folder: Path) -> list[tuple[str, Callable[[], object]]]:
    if name != "file":
        return [(name, lambda: None)]
    return [("file, warm", lambda: None), ("file, cold", lambda: drop_page_cache(folder / "kv"))]


def summary(values: Sequence[float], computed: Sequence[float]) -> dict[str, float]:
    """Medians, and the median of the ratios of each turn."""
    ratios = [value / other for value, other in zip(values, computed, strict=False)]
    return {"ttft_s": statistics.median(values), "of_computed": statistics.median(ratios)}


# Bytes in a second.


async def measure_store(url: str, layout: Any, num_blocks: int, before_get: Callable[[], object]) -> dict[str, float]:
    """GB/s of putting and getting as many blocks as the document has."""
    store: KVStore = find_store(url).make(layout)
    await store.open()
    try:
        sizes = [layout.span_bytes(layer) for layer in range(layout.num_layers)]
        content = random.Random(2).randbytes(layout.block_bytes)
        names = [os.urandom(32) for _ in range(num_blocks)]
        parts, start = [], 0
        for size in sizes:
            parts.append(memoryview(content)[start : start + size])
            start += size
        began = time.perf_counter()
        for first in range(0, num_blocks, BATCH):
            await store.put([Block(name, parts) for name in names[first : first + BATCH]])
        put_s = time.perf_counter() - began
        reads = [Read(name, [memoryview(bytearray(size)) for size in sizes]) for name in names]
        before_get()
        began = time.perf_counter()
        for first in range(0, num_blocks, BATCH):
            if not all(await store.get(reads[first : first + BATCH])):
                raise RuntimeError(f"{url}: a block is gone")
        get_s = time.perf_counter() - began
        await store.delete(names)
    finally:
        await store.close()
    total = num_blocks * layout.block_bytes / 1e9
    return {"put_GBps": total / put_s, "get_GBps": total / get_s}


def file_limit(folder: Path, size: int, number: int, *, cold: bool) -> dict[str, float]:
    """Plain files of that size, written and read."""
    folder.mkdir(exist_ok=True)
    content, into = os.urandom(size), bytearray(size)
    began = time.perf_counter()
    for index in range(number):
        (folder / str(index)).write_bytes(content)
    put_s = time.perf_counter() - began
    if cold:
        drop_page_cache(folder)
    began = time.perf_counter()
    for index in range(number):
        with (folder / str(index)).open("rb", buffering=0) as file:
            file.readinto(into)
    get_s = time.perf_counter() - began
    shutil.rmtree(folder)
    return _rates(size * number, put_s, get_s)


def memory_limit(size: int, number: int) -> dict[str, float]:
    """Memory copied to places that are touched already, and back."""
    source, arena = memoryview(os.urandom(size)), memoryview(bytearray(b"1" * (size * number)))
    back = memoryview(bytearray(size))
    began = time.perf_counter()
    for index in range(number):
        arena[index * size : (index + 1) * size] = source
    put_s = time.perf_counter() - began
    began = time.perf_counter()
    for index in range(number):
        back[:] = arena[index * size : (index + 1) * size]
    return _rates(size * number, put_s, time.perf_counter() - began)


def valkey_limit(url: str, size: int, number: int) -> dict[str, float]:
    """The server's own program: values of that size, one connection, pipelined."""
    program = shutil.which("valkey-benchmark") or shutil.which("redis-benchmark")
    if program is None:
        return {}
    port = url.rpartition(":")[2]
    command = [program, "-p", port, "-d", str(size), "-n", str(number), "-c", "1", "-P", "4", "-t", "set,get", "--csv"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r'"(SET|GET)","([0-9.]+)"', said))
    return {"put_GBps": float(found["SET"]) * size / 1e9, "get_GBps": float(found["GET"]) * size / 1e9}


def mooncake_limit(url: str, size: int, number: int) -> dict[str, float]:
    """Its own client, one value a call, without a copy of ours."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    address = url.removeprefix("mooncake://").partition("?")[0]
    if client.setup("127.0.0.1", "P2PHANDSHAKE", 512 << 20, 256 << 20, "tcp", "", address):
        return {}
    try:
        content = os.urandom(size)
        began = time.perf_counter()
        for index in range(number):
            if client.put(f"limit{index}", content):
                return {}
        put_s = time.perf_counter() - began
        began = time.perf_counter()
        for index in range(number):
            client.get(f"limit{index}")
        get_s = time.perf_counter() - began
        for index in range(number):
            client.remove(f"limit{index}", True)
    finally:
        client.close()
    return _rates(size * number, put_s, get_s)


def _rates(num_bytes: int, put_s: float, get_s: float) -> dict[str, float]:
    return {"put_GBps": num_bytes / 1e9 / put_s, "get_GBps": num_bytes / 1e9 / get_s}


def measure_rates(media: dict[str, str], layout: Any, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Each medium through the store, and by itself."""
    number, size = options.tokens // options.block_size, layout.block_bytes
    found: dict[str, Any] = {}
    for name, url in media.items():
        for label, before in _variants(name, folder):
            limit: dict[str, float] = {}
            if name == "file":
                limit = file_limit(folder / "plain", size, number, cold=label.endswith("cold"))
            elif name == "memory":
                limit = memory_limit(size, number)
            elif name == "valkey":
                limit = valkey_limit(url, size, number)
            elif name == "mooncake":
                limit = mooncake_limit(url, size, number)
            found[label] = {"store": asyncio.run(measure_store(url, layout, number, before)), "medium": limit}
    return found


# vLLM.


def measure_vllm(model: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Each side in a process of its own; one that does not run says why."""
    if options.vllm is None:
        return {}
    files = {"shared_storage_path": str(folder / "example")}
    kvferry = {"kv_connector": "KvferryKVStoreConnector", "kv_role": "kv_both"}
    sides: dict[str, dict[str, Any] | None] = {
        "vLLM, computed": None,
        "vLLM, ExampleConnector (files)": {
            "kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": files,
        },
        "vLLM, OffloadingConnector": {
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 512 << 20, "num_cpu_blocks": 200},
        },
        "vLLM, LMCacheConnectorV1": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        "vLLM, kvferry's, memory": {**kvferry, "kv_connector_extra_config": {"store": "memory:512MiB?name=reuse_vllm"}},
        "vLLM, kvferry's, file": {**kvferry, "kv_connector_extra_config": {"store": f"file:{folder}/vllm"}},
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, transfer in sides.items():
        found[name] = _vllm_side(model, options, transfer)
        print(f"{name}: {found[name]}", flush=True)
    computed = found["vLLM, computed"].get("ttft_s")
    for one in found.values():
        if computed and "ttft_s" in one:
            one["of_computed"] = one["ttft_s"] / computed
    return found


def _vllm_side(model: str, options: argparse.Namespace, transfer: dict[str, Any] | None) -> dict[str, Any]:
    same = {name: getattr(options, name) for name in ("tokens", "repeat", "dtype", "block_size")}
    asked = {**same, "model": model, "transfer": transfer, "question": QUESTION_TOKENS, "vocab": SHAPE["vocab_size"]}
    environment = {**os.environ, **CHILD_ENVIRONMENT}
    command = [str(options.vllm), str(CHILD), json.dumps(asked)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return {"does not run": "no end within 300 s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines()[-1:]
        return {"does not run": " ".join(said[-1:])[:300]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def show(first: dict[str, Any], rates: dict[str, Any]) -> None:
    """As tables."""
    print(f"\n{'KV from':<34}{'TTFT, ms':>10}{'of computed':>13}")
    for name, one in first.items():
        if "ttft_s" in one:
            print(f"{name:<34}{one['ttft_s'] * 1e3:>10.1f}{one.get('of_computed', 1.0):>13.3f}")
        else:
            print(f"{name:<34} {one}")
    print(f"\n{'GB/s':<14}{'put':>8}{'get':>8}{'medium put':>12}{'get':>8}")
    for name, one in rates.items():
        store, medium = one["store"], one["medium"]
        figures = [store["put_GBps"], store["get_GBps"], medium.get("put_GBps"), medium.get("get_GBps")]
        print(f"{name:<14}" + "".join(f"{'' if value is None else f'{value:.2f}':>9}" for value in figures))


def main() -> None:
    """Measure, print, save."""
    options = parse()
    print_machine()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model = make_bench_model(folder, num_hidden_layers=options.layers, max_position_embeddings=options.tokens + 256)
        media = {
            name: url
            for name, url in open_media(folder, stack).items()
            if options.media is None or name in options.media
        }
        with closing(engine_of(model, options, None)) as engine:
            layout = engine.layout
        first = measure_first_tokens(model, media, options, folder)
        rates = measure_rates(media, layout, options, folder)
        first |= measure_vllm(model, options, folder)
    show(first, rates)
    settings = {name: str(value) for name, value in vars(options).items() if name != "vllm"}
    settings["block_bytes"] = str(layout.block_bytes)
    print(f"\nwritten to {save('reuse', settings, {'first_token': first, 'rates': rates})}")


if __name__ == "__main__":
    try:
        main()
    except KvferryError as failure:
        raise SystemExit(f"reuse.py: {failure}") from failure
