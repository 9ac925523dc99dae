"""Time from the command to the first token, and CPU time until the process has ended.

Each side is started with its own command, asked for one token as soon as its port answers, and ended; the page cache is
warm for all (one uncounted start each). Sides take turns, so that a slow spell of the machine hits all.
CPU time is that of all its processes. Prints medians, writes results/start.json.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from kvferry.models.catalog import resolve
from models import make_bench_model
from report import earlier, print_machine, save

LIMIT_S = 300.0
MODELS = ("tiny-python", "88M random Llama")


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="the Python of an environment with vLLM; left out when not given")
    parser.add_argument("--runs", type=int, default=3, help="counted starts of each side")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="only these; the others stay")
    return parser.parse_args()


def commands(model: str, port: int, vllm: Path | None) -> dict[str, list[str]]:
    """The sides, by name."""
    kvferry = [str(Path(sys.executable).parent / "kvferry"), "serve", model, "--port", str(port)]
    common = ["--served-model-name", "m", "--dtype", "float32", "--kv-cache-memory", "128MiB"]
    sides = {
        "kvferry serve": [*kvferry, *common],  # 1P+1D, where there are two cores
        "kvferry serve --prefill 0": [*kvferry, *common, "--prefill", "0"],
    }
    if vllm is not None:
        sides["vllm serve"] = [
            *[str(vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "m"],
            *["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "4096"],
            *["--enforce-eager", "--kv-cache-memory-bytes", str(128 * 2**20), "--block-size", "32"],
        ]
    return sides


def cpu_s() -> float:
    """Of all processes that have ended and were waited for."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def start_once(client: httpx.Client, command: list[str], port: int) -> float:
    """Seconds from the command to its first token."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "0"
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    try:
        while time.perf_counter() - began < LIMIT_S:
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}; run it by hand to see why")
            if answers(client, port):
                return time.perf_counter() - began
            time.sleep(0.02)
        raise RuntimeError(f"{command[0]} gave no token within {LIMIT_S:g} s")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def answers(client: httpx.Client, port: int) -> bool:
    """True if a request for one token succeeds. The client is not made again: that would cost more than the request."""
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 1}
    try:
        return client.post(f"http://127.0.0.1:{port}/v1/completions", json=body).status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of one model, by side."""
    times: dict[str, list[float]] = {}
    spent: dict[str, list[float]] = {}
    client = httpx.Client(timeout=60, headers={"Connection": "close"})
    for run in range(options.runs + 1):
        port = free_port()
        for name, command in commands(model, port, options.vllm).items():
            before_s = cpu_s()
            seconds = start_once(client, command, port)
            if run:
                times.setdefault(name, []).append(seconds)
                spent.setdefault(name, []).append(cpu_s() - before_s)
    medians = {
        name: {
            "median_s": statistics.median(runs),
            "runs_s": runs,
            "median_cpu_s": statistics.median(spent[name]),
            "runs_cpu_s": spent[name],
        }
        for name, runs in times.items()
    }
    for name, figures in medians.items():
        print(f"  {name:24s} {figures['median_s']:6.2f} s, CPU {figures['median_cpu_s']:6.2f} s", flush=True)
    return medians


def main() -> None:
    """The models, all sides."""
    options = parse()
    print_machine()
    results = earlier("start", {})
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            print(name)
            model = resolve("kvferry/tiny-python") if name == "tiny-python" else make_bench_model(Path(folder))
            results[name] = measure(str(model), options)
    print(f"wrote {save('start', {'runs': options.runs, 'dtype': 'float32'}, results)}")


if __name__ == "__main__":
    main()
