"""The cost of a router, beside others and beside no router: processor time, added delay, memory.

    python benchmarks/router.py [--rounds 40] [--streams 1 32 64 256] [--tokens 100] [--rate 200]
        [--peers FOLDER/bin] [--nginx PATH] [--python PATH] [--before FOLDER] [--dynamo PYTHON] [--floor]
        [--profile FILE] [--save]

P, D, router and clients are processes of their own, on loopback: the router has one core, all else the others. P, D
and clients are a small program in C (`native/peer.c`, compiled here), so that their time is not what is seen. P answers
with a ticket at once; D answers whole, or with an event for each token, `--rate` a second.

Whole answers come in three ways: in *turns* (one client), *staggered* (64 clients, each a few milliseconds after the
one before) and *at once* (64 in the same moment, as after a pause). For each is told the router's processor time a
request (user and system), and by how much later than without a router the answer is there (median, 99th percentile;
ms). Streams are told of by the processor time of a token, and by how much later the first token and the next ones come.
`--before`: the `src` of another version of kvferry, for one more row. All routers have a turn before any has its next.

Streams have `--rate` tokens a second each, and fewer where that would be more than 25,600 in all. `--save` writes
`results/router.<processor>.json`.

`--peers`: the folder of the programs of an environment with the wheels of vllm-router and sglang-router
(`pip install vllm-router sglang-router`). `--nginx`: the program; it passes requests to D alone.
`--dynamo`: a Python with Dynamo and kvferry (`scripts/install_dynamo.sh`). Then routers are measured before a mocker of
Dynamo's for each role, which take no time to compute: kvferry's with its helper process, and Dynamo's frontend with its
KV router and with round-robin. There is no row without a router, so times are given as they are, with those of the
mockers. Results go to `results/router_dynamo.<processor>.json`.
`--python`: another Python of this version, for one more row, such as one built with `--enable-optimizations`.
`--floor`: what is left when a router in Python does nothing else (`router_floor.py`). `--only NAME` measures one. A
busy machine's figures wander: compare what was measured in one run, and run again.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import kvferry
from dynamo_mockers import Mockers
from kvferry.core.messages.continuation import PROGRESS_HEADER
from kvferry.core.percentile import percentile
from report import save

SOURCE = Path(__file__).parent / "native" / "peer.c"
CLIENTS = 64
WAYS = {"turns": (1, 0), "staggered": (CLIENTS, 4000), "at once": (CLIENTS, 0)}
"""Clients, and microseconds between the beginnings of their requests."""
MAX_TOKENS = 25_600.0
"""A second, in all streams."""
LAPS = 4
"""How often each router has its turn."""
START_S = 60.0

Request = list[float]
"""When the chunks of an answer came: the first after the request was sent, the others after the one before; ms."""


@dataclass
class Case:
    """The figures of a router in one case. Processor time in seconds."""

    requests: list[Request] = field(default_factory=list)
    spent_s: float = 0.0

    @property
    def request_us(self) -> float:
        """Processor time of a request."""
        return self.spent_s / len(self.requests) * 1e6

    @property
    def token_us(self) -> float:
        """Processor time of a token."""
        return self.spent_s / sum(map(len, self.requests)) * 1e6

    @property
    def first(self) -> tuple[float, float]:
        """Until the first chunk."""
        return percentiles([request[0] for request in self.requests])

    @property
    def between(self) -> tuple[float, float]:
        """Between two chunks."""
        return percentiles([gap for request in self.requests for gap in request[1:]])


@dataclass
class Router:
    """A router under way, or none: then clients ask D."""

    name: str
    port: int
    process: subprocess.Popen[bytes] | None = None
    cases: dict[str, Case] = field(default_factory=dict)
    memory_mib: float = 0.0


def percentiles(times: list[float]) -> tuple[float, float]:
    """The median and the 99th."""
    ordered = sorted(times)
    return percentile(ordered, 0.5), percentile(ordered, 0.99)


class Peers:
    """The program that is instances and clients."""

    def __init__(self, folder: Path) -> None:
        self._program = folder / "peer"
        header = f'-DPROGRESS_HEADER="{PROGRESS_HEADER.lower()}"'
        subprocess.run(["gcc", "-O2", header, "-o", self._program, SOURCE], check=True)

    def instance(self, role: str) -> tuple[subprocess.Popen[str], int]:
        """The process, and its port."""
        process = subprocess.Popen([self._program, "instance", role], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    def load(self, port: int, clients: int, rounds: int, spacing_us: float, tokens: int, rate: float) -> list[Request]:
        """The figures of clients. Raises `RuntimeError`."""
        numbers = [str(argument) for argument in (port, clients, rounds, spacing_us, tokens, rate)]
        done = subprocess.run([self._program, "load", *numbers], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        return [[float(field) / 1e3 for field in line.split()] for line in done.stdout.splitlines()]

    def until_ready(self, port: int, timeout_s: float = START_S) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.load(port, 1, 1, 0, 0, 1.0)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return


def lap(peers: Peers, router: Router, options: argparse.Namespace) -> None:
    """One turn of a router: every case."""
    process = None if router.process is None else psutil.Process(router.process.pid)

    def case(name: str, *load: Any) -> None:
        measured, before = router.cases.setdefault(name, Case()), spent(process)
        measured.requests += peers.load(router.port, *load)
        measured.spent_s += spent(process) - before

    for name, (clients, spacing_us) in WAYS.items():
        rounds = options.rounds if clients > 1 else options.rounds * 16
        case(name, clients, max(1, rounds // LAPS), spacing_us, 0, 1.0)
    for number in options.streams:
        rate = min(options.rate, MAX_TOKENS / number)
        rounds = max(1, options.samples // number // LAPS)
        case(f"{number} streams", number, rounds, 1e6 / rate / number, options.tokens, rate)
    if process is not None:
        router.memory_mib = sum(member.memory_info().rss for member in family(process)) / 2**20


def family(process: psutil.Process) -> list[psutil.Process]:
    """It and what it started."""
    return [process, *process.children(recursive=True)]


def spent(process: psutil.Process | None) -> float:
    """Processor seconds so far."""
    if process is None:
        return 0.0
    times = [member.cpu_times() for member in family(process)]
    return float(sum(cpu_time.user + cpu_time.system for cpu_time in times))


OURS = ["-m", "kvferry.cli.main", "router", "--disaggregate-from", "0"]
"""kvferry's router, as users start it."""

NGINX = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
  uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
  upstream d {{ server {decode}; keepalive 256; }}
  server {{ listen 127.0.0.1:{port}; location / {{
    proxy_pass http://d; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }} }}
}}
"""


def commands(options: argparse.Namespace, prefill: str, decode: str, folder: Path) -> dict[str, list[str]]:
    """The command of each router; PORT stands for its port."""
    profiled = ["-m", "cProfile", "-o", options.profile] if options.profile else []
    ours = [sys.executable, *profiled, *OURS, "--port", "PORT", "--prefill-url", prefill, "--decode-url", decode]
    argv_by_name = {"kvferry": ours, "kvferry, sequential": [*ours, "--hand-off", "sequential"]}
    if options.before:
        argv_by_name["kvferry, before"] = ["env", f"PYTHONPATH={options.before}", *ours]
    if options.python:
        packages = f"{Path(kvferry.__file__).parents[1]}{os.pathsep}{sysconfig.get_path('purelib')}"
        argv_by_name["kvferry, other Python"] = ["env", f"PYTHONPATH={packages}", options.python, *ours[1:]]
    if options.floor:
        floor = str(Path(__file__).with_name("router_floor.py"))
        argv_by_name["uvloop and httptools alone"] = [sys.executable, floor, prefill, decode, "PORT"]
    if options.peers:
        shared = ["--prefill", prefill, "--decode", decode, "--host", "127.0.0.1", "--port", "PORT"]
        quiet = ["--policy", "round_robin", "--prometheus-port", "PORT1", "--prometheus-host", "127.0.0.1"]
        argv_by_name["vllm-router"] = [f"{options.peers}/vllm-router", "--vllm-pd-disaggregation", *shared, *quiet]
        argv_by_name["sglang-router"] = [
            f"{options.peers}/sglang-router",
            "launch",
            "--pd-disaggregation",
            *shared,
            *quiet,
        ]
    if options.nginx:
        argv_by_name["nginx, D alone"] = [
            options.nginx,
            "-e",
            str(folder / "start.log"),
            "-c",
            str(folder / "nginx.conf"),
        ]
    return {name: command for name, command in argv_by_name.items() if not options.only or options.only == name}


def before_mockers(settings: argparse.Namespace, stack: ExitStack, folder: Path, core: int) -> None:
    """Measure kvferry's router and Dynamo's frontend before the same mockers of Dynamo's."""
    peers, mockers = Peers(folder), Mockers(settings.dynamo, folder, end)
    stack.callback(mockers.end)
    for mode in ("prefill", "decode"):
        ports = ("--bootstrap-ports", str(free_port())) if mode == "prefill" else ()
        mockers.start(mode, "--speedup-ratio", "0", *ports)
    urls = ("--prefill-url", "dynamo://dynamo/prefill", "--decode-url", "dynamo://dynamo/backend")
    commands = {
        "kvferry": mockers.router("PORT", *urls),
        "Dynamo's frontend, kv": mockers.frontend("PORT", "kv"),
        "Dynamo's frontend, round-robin": mockers.frontend("PORT", "round-robin"),
    }
    os.environ.update(mockers.environment)
    routers = []
    for name, command in commands.items():
        router = started(name, command, "", folder, core)
        assert router.process is not None
        stack.callback(end, router.process)
        peers.until_ready(router.port, 120.0)
        routers.append(router)
    for number in range(LAPS):
        for router in routers:
            print(f"lap {number + 1} of {LAPS}: {router.name}", file=sys.stderr)
            lap(peers, router, settings)
    names = [*WAYS, *(f"{number} streams" for number in settings.streams)]
    some = ", ".join(map(str, settings.streams))
    print(f"| | µs a request: {', '.join(WAYS)} | first chunk, ms: {', '.join(WAYS)} | µs a token: {some} | MiB |")
    print("|---|---|---|---|---|")
    for router in routers:
        cases = [router.cases[name] for name in names]
        whole, streams = cases[: len(WAYS)], cases[len(WAYS) :]
        cells = [
            " / ".join(f"{case.request_us:.0f}" for case in whole),
            " / ".join(f"{case.first[0]:.2f} (99th: {case.first[1]:.1f})" for case in whole),
            " / ".join(f"{case.token_us:.1f}" for case in streams),
            f"{router.memory_mib:.0f}",
        ]
        print(f"| {router.name} | {' | '.join(cells)} |")
    if settings.save:
        values = {name: getattr(settings, name) for name in ("rounds", "streams", "samples", "tokens")}
        results = {router.name: about(router) for router in routers}
        print(save("router_dynamo", {**values, **mockers.versions()}, results))


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def started(name: str, command: list[str], decode: str, folder: Path, core: int) -> Router:
    """A router on its core."""
    port, other = free_port(), free_port()
    decode = decode.removeprefix("http://")
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, decode=decode, port=port))
    command = [argument.replace("PORT1", str(other)).replace("PORT", str(port)) for argument in command]
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # inherited
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    os.sched_setaffinity(0, own)
    return Router(name, port, process)


def end(process: subprocess.Popen[Any]) -> None:
    """As a person would, then for good."""
    everything = family(psutil.Process(process.pid)) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for member in everything:
        if member.is_running():
            member.kill()


def table(routers: list[Router], streams: list[int]) -> str:
    """In Markdown."""
    names = [*WAYS, *(f"{number} streams" for number in streams)]
    direct, *others = routers

    def later(router: Router, name: str, what: str) -> str:
        value, base = getattr(router.cases[name], what), getattr(direct.cases[name], what)
        return f"{value[0] - base[0]:.2f} (+{value[1] - base[1]:.1f})"

    ways = list(WAYS)
    lines = [f"| | µs a request: {', '.join(ways)} | later, ms: {', '.join(ways)} | MiB |", "|---|---|---|---|"]
    for router in others:
        costs = " / ".join(f"{router.cases[name].request_us:.0f}" for name in ways)
        delays = " / ".join(later(router, name, "first") for name in ways)
        lines.append(f"| {router.name} | {costs} | {delays} | {router.memory_mib:.0f} |")
    some = " / ".join(map(str, streams))
    lines += ["", f"| streams: {some} | µs a token | first token later, ms | between two tokens |", "|---|---|---|---|"]
    for router in others:
        cells = [
            " / ".join(f"{router.cases[name].token_us:.1f}" for name in names[len(ways) :]),
            *(" / ".join(later(router, name, what) for name in names[len(ways) :]) for what in ("first", "between")),
        ]
        lines.append(f"| {router.name} | {' | '.join(cells)} |")
    at = ", ".join(f"{name} {case.first[0]:.2f} (99th: {case.first[1]:.2f})" for name, case in direct.cases.items())
    return "\n".join([*lines, "", f"Without a router the first chunk comes after, ms: {at}."])


def main() -> None:
    """Start all, measure, end all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="of 64 requests, in each of the three ways")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 64, 256])
    parser.add_argument("--samples", type=int, default=256, help="streams measured at least, of each number")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--peers", help="folder with vllm-router and sglang-router")
    parser.add_argument("--floor", action="store_true", help="measure the three exchanges alone, too (router_floor.py)")
    parser.add_argument("--nginx", help="the program")
    parser.add_argument("--python", help="another Python of the same version, for one more row")
    parser.add_argument("--before", help="the src of another version of kvferry, for one more row")
    parser.add_argument("--dynamo", help="a Python with Dynamo and kvferry: measure before Dynamo's mockers")
    parser.add_argument("--save", action="store_true", help="keep the results")
    parser.add_argument("--only", help="the name of one router")
    parser.add_argument("--profile", help="write cProfile's statistics of kvferry's router there")
    options = parser.parse_args()
    core, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, others or [core])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.dynamo:
            before_mockers(options, stack, folder, core)
            return
        peers, ports = Peers(folder), {}
        for role in ("prefill", "decode"):
            process, ports[role] = peers.instance(role)
            stack.callback(end, process)
        urls = {role: f"http://127.0.0.1:{port}" for role, port in ports.items()}
        routers = [Router("no router", ports["decode"])]
        for name, command in commands(options, urls["prefill"], urls["decode"], folder).items():
            router = started(name, command, urls["decode"], folder, core)
            assert router.process is not None
            stack.callback(end, router.process)
            try:
                peers.until_ready(router.port)
            except RuntimeError as error:
                print(f"{name}: {error}\n{(folder / f'{name}.log').read_text()[-2000:]}", file=sys.stderr)
            else:
                routers.append(router)
        for number in range(LAPS):
            for router in routers:
                print(f"lap {number + 1} of {LAPS}: {router.name}", file=sys.stderr)
                lap(peers, router, options)
        print(table(routers, options.streams))
        if options.save:
            settings = {name: getattr(options, name) for name in ("rounds", "streams", "samples", "tokens", "rate")}
            print(save("router", settings, {router.name: about(router) for router in routers}))


def about(router: Router) -> dict[str, Any]:
    """The figures that are saved."""
    cases = {
        name: {
            "request_us": round(case.request_us, 1),
            "token_us": round(case.token_us, 2),
            "first_ms": [round(value, 3) for value in case.first],
            "between_ms": [round(value, 3) for value in case.between] if len(case.requests[0]) > 1 else None,
        }
        for name, case in router.cases.items()
    }
    return {"memory_mib": round(router.memory_mib, 1), "cases": cases}


if __name__ == "__main__":
    main()
