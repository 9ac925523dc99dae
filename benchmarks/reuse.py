"""The time to first token when the KV of a long document comes from a store.

A document of 4,000 tokens with a new question behind it each time, one engine on one core without a prefix cache:

  computed   nothing is kept
  media      memory, file with a warm and with a cold page cache, a Valkey or Redis server, a Mooncake Store, LMCache
  vLLM       (--vllm) the same model: computed, with vLLM's own connectors, and with kvferry's in it (reuse_vllm.py)

Sides take turns. Then, for each medium, the GB/s of putting and getting the document's blocks through the store, and
what the medium itself gives for as many bytes in pieces of that size: plain writes and reads of files, memory copied,
the server's own benchmark program, Mooncake's own client, LMCache's protocol over a plain socket.

Prints tables; writes results/reuse.json, where a part that is measured alone (`--only`) replaces that part.

    python benchmarks/reuse.py --vllm .venv-vllm/bin/python
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from kvferry.core.errors import KvferryError
from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from models import SHAPE, make_bench_model
from report import earlier, print_machine, save
from reuse_rates import measure_rates, variants
from reuse_vllm import measure_vllm, sides

QUESTION_TOKENS = 12
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
WAIT_S = 120.0


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000, help="length of the document")
    parser.add_argument("--repeat", type=int, default=5, help="questions for each medium")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--media", nargs="+", help="only these")
    parser.add_argument("--only", choices=("first_token", "rates", "vllm"), nargs="+", help="only these parts")
    parser.add_argument("--sides", nargs="+", help="of vLLM: only those whose names contain one of these")
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


def open_media(folder: Path, stack: ExitStack, names: Sequence[str] | None) -> dict[str, str]:
    """URL by name, with the servers that they need."""
    media = {"memory": "memory:512MiB?name=reuse", "file": f"file:{folder}/kv"}
    valkey = shutil.which("valkey-server") or shutil.which("redis-server")
    if valkey and (names is None or "valkey" in names):
        port = free_port()
        fixed = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
        stack.enter_context(server(valkey, "--port", str(port), *fixed, port=port, log=folder / "valkey.log"))
        media["valkey"] = f"valkey://127.0.0.1:{port}"
    master = Path(sys.executable).with_name("mooncake_master")
    if master.exists() and (names is None or "mooncake" in names):
        port, metrics = free_port(), free_port()
        flags = [
            f"--rpc_port={port}",
            "--rpc_address=127.0.0.1",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={metrics}",
        ]
        stack.enter_context(server(str(master), *flags, port=port, log=folder / "mooncake.log"))
        media["mooncake"] = f"mooncake://127.0.0.1:{port}?segment_bytes=512MiB&buffer_bytes=256MiB"
    if importlib.util.find_spec("lmcache") is not None and (names is None or "lmcache" in names):
        port = free_port()
        command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)]
        stack.enter_context(server(*command, port=port, log=folder / "lmcache.log"))
        media["lmcache"] = f"lmcache://127.0.0.1:{port}?max_bytes=512MiB"
    return {name: url for name, url in media.items() if names is None or name in names}


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
    rng = random.Random(1)
    document = [rng.randrange(SHAPE["vocab_size"]) for _ in range(options.tokens)]
    samples: dict[str, list[float]] = {}
    with ExitStack() as stack:
        plain = stack.enter_context(closing(engine_of(model, options, None)))
        engines = {name: stack.enter_context(closing(engine_of(model, options, url))) for name, url in media.items()}
        for engine in engines.values():
            first_token(engine, [*document, 1])
            settle(engine)
        for _ in range(options.repeat):
            question = [rng.randrange(SHAPE["vocab_size"]) for _ in range(QUESTION_TOKENS)]
            prompt = [*document, *question]
            seconds, expected = first_token(plain, prompt)
            samples.setdefault("computed", []).append(seconds)
            for name, engine in engines.items():
                for label, before in variants(name, folder / "kv"):
                    before()
                    seconds, token = first_token(engine, prompt)
                    if token != expected:
                        raise RuntimeError(f"{name} gave token {token}, and {expected} was computed")
                    samples.setdefault(label, []).append(seconds)
        for name, engine in engines.items():
            if not engine.statistics().external_kv.num_external_hits >= options.repeat * (
                options.tokens - 2 * options.block_size
            ):
                raise RuntimeError(f"{name}: the KV did not come from the store")
    return {name: summary(values, samples["computed"]) for name, values in samples.items()}


def summary(values: Sequence[float], computed: Sequence[float]) -> dict[str, float]:
    """Medians, and the median of the ratios of each turn."""
    ratios = [value / other for value, other in zip(values, computed, strict=False)]
    return {"ttft_s": statistics.median(values), "of_computed": statistics.median(ratios)}


# vLLM.


def vllm_part(model: str, options: argparse.Namespace, folder: Path, media: dict[str, str]) -> dict[str, Any]:
    """The results of `measure_vllm` for the chosen sides."""
    same = {name: getattr(options, name) for name in ("tokens", "dtype", "block_size")}
    settings = {**same, "model": model, "question": QUESTION_TOKENS, "vocab": SHAPE["vocab_size"]}
    all_sides = sides(folder, media)
    names = {
        name: transfer
        for name, transfer in all_sides.items()
        if options.sides is None or any(part in name for part in options.sides)
    }
    return measure_vllm(options.vllm, settings, names, folder, options.repeat)


# All of it.


def keep(part: str, options: argparse.Namespace, layout: Any, measured: dict[str, Any], *, renew: bool = True) -> Path:
    """Save a part; the others stay as they are. `renew` False: what is there of it stays too."""
    before = earlier("reuse", {})
    results = {**before, part: measured if renew else {**before.get(part, {}), **measured}}
    names = ("tokens", "repeat", "block_size", "dtype", "layers")
    settings = {name: getattr(options, name) for name in names} | {"block_bytes": layout.block_bytes}
    return save("reuse", settings, results)


def show(results: dict[str, Any]) -> None:
    """As tables."""
    print(f"\n{'KV from':<34}{'TTFT, ms':>10}{'of computed':>13}")
    for name, figures in {**results.get("first_token", {}), **results.get("vllm", {})}.items():
        if "ttft_s" in figures:
            print(f"{name:<34}{figures['ttft_s'] * 1e3:>10.1f}{figures.get('of_computed', 1.0):>13.3f}")
        else:
            print(f"{name:<34} {figures}")
    print(f"\n{'GB/s':<14}{'put':>8}{'get':>8}{'medium put':>12}{'get':>8}{'put of medium':>15}{'get':>8}")
    for name, rates in results.get("rates", {}).items():
        figures = [rates[side].get(what) for side in ("store", "medium") for what in ("put_GBps", "get_GBps")]
        figures += [rates["store_of_medium"].get(what) for what in ("put", "get")]
        print(f"{name:<14}" + "".join(f"{'' if value is None else f'{value:.2f}':>10}" for value in figures))


def main() -> None:
    """Measure, print, save."""
    options = parse()
    print_machine()
    names = options.only or ["first_token", "rates", "vllm"]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model = make_bench_model(folder, num_hidden_layers=options.layers, max_position_embeddings=options.tokens + 256)
        opened = open_media(folder, stack, options.media) if set(names) != {"vllm"} or options.media else {}
        with closing(engine_of(model, options, None)) as engine:
            layout = engine.layout
        results: dict[str, Any] = {}
        if "first_token" in names:
            results["first_token"] = measure_first_tokens(model, opened, options, folder)
            keep("first_token", options, layout, results["first_token"])
        if "rates" in names:
            results["rates"] = {}
            for name, url in opened.items():
                results["rates"] |= measure_rates({name: url}, layout, options.tokens // options.block_size, folder)
                keep("rates", options, layout, results["rates"], renew=False)
        if "vllm" in names and options.vllm is not None:
            results["vllm"] = vllm_part(model, options, folder, opened)
            keep("vllm", options, layout, results["vllm"], renew=False)
    show(results)


if __name__ == "__main__":
    try:
        main()
    except KvferryError as failure:
        raise SystemExit(f"reuse.py: {failure}") from failure
