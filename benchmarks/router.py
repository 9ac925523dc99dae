"""What a router costs, beside others and beside no router: processor time, added delay, memory.

    python benchmarks/router.py [--requests 2000] [--streams 1 32 64] [--tokens 200] [--rate 200]
        [--peers FOLDER/bin] [--nginx PATH] [--python PATH] [--floor] [--profile FILE] [--save]

P, D, router and clients are processes of their own, on loopback: the router has one core, all else the others. P and D
compute nothing: P answers with a ticket at once; D answers whole, or with an event for each token, `--rate` a second.
Told of each router are the processor time (user and system) for each request over 32 connections and for each streamed
token, requests a second, the memory at the end, and by how much the first token and the time between two come later
than without a router (median, 99th percentile; ms), at each number of streams.

Streams have `--rate` tokens a second each, and fewer where that would be more than 12,800 in all, which the instances
and clients here could not do. `--save` writes `results/router.<processor>.json`.

`--peers`: the folder of the programs of an environment with the wheels of vllm-router and sglang-router
(`pip install vllm-router sglang-router`). `--nginx`: the program; it passes requests to D alone.
`--python`: another Python of this version, for one more row, such as one built with `--enable-optimizations`.
`--floor`: what is left when a router in Python does nothing else (`router_floor.py`). `--only NAME` measures one. A
busy machine's figures wander: compare what was measured in one run, and run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import uvloop

import kvferry
from kvferry.core.continuation import PROGRESS_HEADER
from kvferry.core.errors import KvferryError
from kvferry.http.client import HttpClient
from kvferry.http.config import HttpConfig
from kvferry.http.keys import Access
from kvferry.http.origin import Origin
from kvferry.http.request import HttpRequest
from kvferry.http.response import JSON, Response
from kvferry.http.routes import Route, Routes
from kvferry.http.server import HttpServer
from report import save

ANSWER_S = 60.0
HEADERS = [JSON]
EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m",'
    b'"choices":[{"index":0,"text":" word"}]}\n\n'
)
MARKED = b': {"tokens":[12345]}\n' + EVENT
FIRST_MARK = b': {"seed":1234567890123,"created":1790000000,"num_cached_tokens":0}\n'
LAST_MARK = b': {"tokens":[2],"last":true}\n'
CONNECTIONS = 32
MOST_TOKENS = 12_800.0
"""A second, in all streams."""
MOST_ROUNDS = 16
START_S = 60.0


class Mock:
    """An instance that computes nothing."""

    def __init__(self, role: str) -> None:
        self._role = role

    def routes(self) -> Routes:
        """What a router asks of an instance."""
        return Routes(
            [
                Route("GET", "/health", self.health, Access.OPEN),
                Route("GET", "/kvferry/instance", self.instance, Access.PROBE),
                Route("POST", "/kvferry/release", self.health, Access.RELEASE),
                Route("GET", "/v1/models", self.models),
                Route("POST", "/v1/completions", self.prefill if self._role == "prefill" else self.decode),
            ]
        )

    async def health(self, request: HttpRequest, response: Response) -> None:
        """Always well."""
        await request.body.read()
        response.send_json(b'{"released":true}')

    async def models(self, request: HttpRequest, response: Response) -> None:
        """As OpenAI's."""
        response.send_json(b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"kvferry"}]}')

    async def instance(self, request: HttpRequest, response: Response) -> None:
        """As kvferry's own describe themselves."""
        facts = {
            "role": self._role, "engine_id": f"engine-{self._role}", "kv_host": "127.0.0.1", "kv_port": 4711,
            "kv_ranks": None, "kv_seal": "sealed", "connector": "P2pConnector", "layout": "f00d", "model_names": ["m"],
        }  # fmt: skip
        response.send_json(json.dumps(facts).encode())

    async def prefill(self, request: HttpRequest, response: Response) -> None:
        """The ticket, at once."""
        body = json.loads(await request.body.read())
        asked = body.get("kv_transfer_params") or {}
        ticket = {
            "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": asked.get("transfer_id"),
            "remote_engine_id": "engine-prefill", "remote_block_ids": [[1, 2, 3]],
            "prefill_result": {"first_token": 7, "seed": body.get("seed", 0)},
        }  # fmt: skip
        response.send_json(json.dumps({"choices": [{"text": "x"}], "kv_transfer_params": ticket}).encode())

    async def decode(self, request: HttpRequest, response: Response) -> None:
        """Whole, or token by token."""
        body = json.loads(await request.body.read())
        if not body.get("stream"):
            response.send_json(
                b'{"choices":[{"index":0,"text":"done","finish_reason":"stop"}],"usage":{"total_tokens":3}}'
            )
            return
        marked = request.header(PROGRESS_HEADER) is not None
        if marked:
            response.add_header(PROGRESS_HEADER.lower().encode(), b"1")
        response.start(200, [(b"content-type", b"text/event-stream")])
        loop = asyncio.get_running_loop()
        begun, rate = loop.time(), float(body["prompt"].partition(" ")[0])
        event = MARKED if marked else EVENT
        response.write(FIRST_MARK + EVENT if marked else EVENT)
        for number in range(1, body["max_tokens"]):
            await asyncio.sleep(max(0.0, begun + number / rate - loop.time()))
            response.write(event)
        response.end((LAST_MARK if marked else b"") + EVENT + b"data: [DONE]\n\n")


async def serve(role: str) -> None:
    """Be a mock instance until killed."""
    server = HttpServer(Mock(role).routes(), HttpConfig(port=0))
    await server.run(lambda _, port: print(port, flush=True))


def started(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A process, and the first line that it says."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline()


async def ask(client: HttpClient, router: Origin, body: dict[str, Any]) -> list[float]:
    """One request to its end; when its pieces came, in seconds from its beginning."""
    data, begun, came = json.dumps(body).encode(), time.perf_counter(), []
    answer = client.start(router, "POST", "/v1/completions", HEADERS, data)
    try:
        async with asyncio.timeout(ANSWER_S):
            await answer.begun()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {await answer.read(1000)!r}")
        async for _ in answer.pieces():
            came.append(time.perf_counter() - begun)
        return came
    finally:
        answer.close()


@dataclass
class Result:
    """Of one router. Times in microseconds of processor time; delays in ms, by number of streams."""

    name: str
    request_us: float = 0.0
    token_us: float = 0.0
    per_second: float = 0.0
    memory_mib: float = 0.0
    first: dict[int, tuple[float, float]] = field(default_factory=dict)
    between: dict[int, tuple[float, float]] = field(default_factory=dict)


async def measure(name: str, router: Origin, process: psutil.Process | None, said: argparse.Namespace) -> Result:
    """Requests, then streams; what each costs."""
    result = Result(name)
    async with HttpClient() as client:
        await until_ready(client, router)
        left = said.requests

        async def one() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await ask(client, router, {"model": "m", "prompt": "a " * 200, "max_tokens": 8})

        before, begun = spent(process), time.perf_counter()
        await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
        result.request_us = (spent(process) - before) / said.requests * 1e6
        result.per_second = said.requests / (time.perf_counter() - begun)
        for number in said.streams:
            await measure_streams(client, router, process, said, number, result)
        if process is not None:
            result.memory_mib = sum(one.memory_info().rss for one in family(process)) / 2**20
    return result


async def measure_streams(
    client: HttpClient,
    router: Origin,
    process: psutil.Process | None,
    said: argparse.Namespace,
    number: int,
    to: Result,
) -> None:
    """So many streams at once, begun one after the other within the time of a token."""
    rate = min(said.rate, MOST_TOKENS / number)
    body = {"model": "m", "prompt": f"{rate:g} " + "a " * 200, "max_tokens": said.tokens, "stream": True}

    async def one(place: int) -> list[float]:
        await asyncio.sleep(place / number / rate)
        return await ask(client, router, body)

    before, found = spent(process), []
    for _ in range(max(1, min(MOST_ROUNDS, said.samples // number))):
        found += await asyncio.gather(*(one(place) for place in range(number)))
    if number == max(said.streams):
        to.token_us = (spent(process) - before) / (len(found) * said.tokens) * 1e6
    to.first[number] = percentiles([times[0] for times in found])
    to.between[number] = percentiles([after - before for times in found for before, after in pairwise(times)])


def percentiles(seconds: list[float]) -> tuple[float, float]:
    """The median and the 99th, in ms."""
    ordered = sorted(seconds)
    return statistics.median(ordered) * 1e3, ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3


async def until_ready(client: HttpClient, router: Origin) -> None:
    """Wait until it serves."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            await ask(client, router, {"model": "m", "prompt": "a", "max_tokens": 8})
        except (KvferryError, RuntimeError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)
        else:
            return


def family(process: psutil.Process) -> list[psutil.Process]:
    """It and what it started."""
    return [process, *process.children(recursive=True)]


def spent(process: psutil.Process | None) -> float:
    """Processor seconds so far."""
    if process is None:
        return 0.0
    times = [one.cpu_times() for one in family(process)]
    return float(sum(one.user + one.system for one in times))


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


def commands(said: argparse.Namespace, prefill: str, decode: str, folder: Path) -> dict[str, list[str]]:
    """How each router is started; PORT stands for its port."""
    profiled = ["-m", "cProfile", "-o", said.profile] if said.profile else []
    ours = [sys.executable, *profiled, *OURS, "--port", "PORT", "--prefill-url", prefill, "--decode-url", decode]
    found = {"kvferry": ours, "kvferry, sequential": [*ours, "--hand-off", "sequential"]}
    if said.python:
        packages = f"{Path(kvferry.__file__).parents[1]}{os.pathsep}{sysconfig.get_path('purelib')}"
        found["kvferry, other Python"] = ["env", f"PYTHONPATH={packages}", said.python, *ours[1:]]
    if said.floor:
        floor = str(Path(__file__).with_name("router_floor.py"))
        found["uvloop and httptools alone"] = [sys.executable, floor, prefill, decode, "PORT"]
    if said.peers:
        shared = ["--prefill", prefill, "--decode", decode, "--host", "127.0.0.1", "--port", "PORT"]
        quiet = ["--policy", "round_robin", "--prometheus-port", "PORT1", "--prometheus-host", "127.0.0.1"]
        found["vllm-router"] = [f"{said.peers}/vllm-router", "--vllm-pd-disaggregation", *shared, *quiet]
        found["sglang-router"] = [f"{said.peers}/sglang-router", "launch", "--pd-disaggregation", *shared, *quiet]
    if said.nginx:
        found["nginx, D alone"] = [said.nginx, "-e", str(folder / "start.log"), "-c", str(folder / "nginx.conf")]
    return {name: command for name, command in found.items() if not said.only or said.only == name}


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measured(name: str, command: list[str], decode: str, folder: Path, said: argparse.Namespace, core: int) -> Result:
    """Start a router on its core, measure, end it."""
    port, other = free_port(), free_port()
    decode = decode.removeprefix("http://")
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, decode=decode, port=port))
    command = [one.replace("PORT1", str(other)).replace("PORT", str(port)) for one in command]
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # inherited
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    os.sched_setaffinity(0, own)
    try:
        origin = Origin.parse(f"http://127.0.0.1:{port}")
        return uvloop.run(measure(name, origin, psutil.Process(process.pid), said))
    finally:
        end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """As a person would, then for good."""
    everything = family(psutil.Process(process.pid)) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for one in everything:
        if one.is_running():
            one.kill()


def table(direct: Result, results: list[Result], streams: list[int]) -> str:
    """In Markdown."""
    lines = [
        "| | µs/request | requests/s | µs/token | first token later by, ms, at "
        + " / ".join(map(str, streams))
        + " streams (99th) | between two tokens | MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in results:
        first, between = (
            " / ".join(f"{its[at][0] - base[at][0]:.1f} (+{its[at][1] - base[at][1]:.1f})" for at in streams)
            for its, base in ((one.first, direct.first), (one.between, direct.between))
        )
        lines.append(
            f"| {one.name} | {one.request_us:.0f} | {one.per_second:.0f} | {one.token_us:.1f} | {first} | {between}"
            f" | {one.memory_mib:.0f} |"
        )
    at = " / ".join(f"{direct.first[number][0]:.1f} (+{direct.first[number][1]:.1f})" for number in streams)
    return "\n".join([*lines, "", f"Without a router the first token comes after {at} ms."])


def main() -> None:
    """Start all, measure, end all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--be", help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 64, 256])
    parser.add_argument("--samples", type=int, default=64, help="streams measured at least, of each number")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--peers", help="folder with vllm-router and sglang-router")
    parser.add_argument("--floor", action="store_true", help="measure the three exchanges alone, too (router_floor.py)")
    parser.add_argument("--nginx", help="the program")
    parser.add_argument("--python", help="another Python of the same version, for one more row")
    parser.add_argument("--save", action="store_true", help="keep the results")
    parser.add_argument("--only", help="the name of one router")
    parser.add_argument("--profile", help="write cProfile's statistics of kvferry's router there")
    said = parser.parse_args()
    if said.be:
        uvloop.run(serve(said.be))
        return
    core, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, others or [core])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {}
        for role in ("prefill", "decode"):
            process, line = started(__file__, "--be", role)
            stack.callback(end, process)
            urls[role] = f"http://127.0.0.1:{line.strip()}"
        direct = uvloop.run(measure("no router", Origin.parse(urls["decode"]), None, said))
        every = commands(said, urls["prefill"], urls["decode"], folder)
        results = []
        for name, command in every.items():
            try:
                results.append(measured(name, command, urls["decode"], folder, said, core))
            except (KvferryError, RuntimeError) as error:
                print(f"{name}: {error}\n{(folder / f'{name}.log').read_text()[-2000:]}", file=sys.stderr)
        print(table(direct, results, said.streams))
        if said.save:
            kept = {name: getattr(said, name) for name in ("requests", "streams", "samples", "tokens", "rate")}
            save("router", kept, {one.name: asdict(one) for one in (direct, *results)})


if __name__ == "__main__":
    main()
