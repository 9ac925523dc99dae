"""Real vLLM servers for tests, each started by a kvferry command on one core, with one thread."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import psutil

from support.processes import KvferryProcess, begun, kvferry, sum_of
from support.waiting import until

MODEL = "kvferry/tiny-python"
VOCABULARY = 4000
START_S = 280.0
SETTLE_S = 60.0
VLLM_ARGUMENTS = (
    *("--dtype", "float32", "--max-model-len", "4096", "--block-size", "32"),
    *("--kv-cache-memory-bytes", str(192 << 20), "--enforce-eager"),
)
TOKENS_PER_ANSWER = 8
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Server:
    """What is to be started. `transfer` None: a plain instance. `arguments` are vLLM's, `flags` kvferry's."""

    role: str
    transfer: dict[str, Any] | None = None
    arguments: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    port: int = 0
    model: str = MODEL


def vllm_environment() -> dict[str, str]:
    """The environment of a command that starts servers here."""
    return {**os.environ, **QUIET, "OMP_NUM_THREADS": "1"}


@contextmanager
def vllm_servers(folder: Path, **wanted: Server) -> Iterator[dict[str, KvferryProcess]]:
    """Start them side by side, each on its share of this process's cores; all are ended with the block."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        waiting: dict[str, Callable[[], KvferryProcess]] = {}
        for index, (name, server) in enumerate(wanted.items()):
            waiting[name] = stack.enter_context(
                _begun(server, folder / f"{name}.log", {*cores[index % len(cores) :: len(wanted)]})
            )
        yield {name: ready() for name, ready in waiting.items()}


class RestartedServer:
    """A server that a test kills, and that comes back at its address."""

    def __init__(self, server: Server, folder: Path, name: str, cores: set[int]) -> None:
        """`folder`: of its logs. Nothing is started."""
        self._server, self._folder, self._name, self._cores = server, folder, name, cores
        self._num_starts = 0
        self._stack = ExitStack()
        self._ready: Callable[[], KvferryProcess]
        self.process: KvferryProcess

    def begin(self) -> None:
        """Start it, without waiting."""
        self._num_starts += 1
        log = self._folder / f"{self._name}-{self._num_starts}.log"
        self._ready = self._stack.enter_context(_begun(self._server, log, self._cores))

    def wait(self) -> None:
        """Until it serves."""
        self.process = self._ready()

    def restart(self) -> None:
        """Kill it, and start it again."""
        kill(self.process)
        self._stack.close()
        self.begin()
        self.wait()

    def stop(self) -> None:
        """End it, if it runs."""
        self._stack.close()


@contextmanager
def _begun(server: Server, log: Path, cores: set[int]) -> Iterator[Callable[[], KvferryProcess]]:
    transfer = [] if server.transfer is None else [f"--kv-transfer-config={json.dumps(server.transfer)}"]
    arguments = [server.role, server.model, "--engine=vllm", "--served-model-name=m", *transfer, *server.flags]
    everything = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # inherited
    try:
        more = (*VLLM_ARGUMENTS, *server.arguments)
        with begun(*arguments, "--", *more, log=log, port=server.port, start_s=START_S, more=QUIET) as ready:
            os.sched_setaffinity(0, everything)
            yield ready
    finally:
        os.sched_setaffinity(0, everything)


@contextmanager
def router_before(
    folder: Path, prefill: KvferryProcess, decode: KvferryProcess, *flags: str
) -> Iterator[KvferryProcess]:
    """A router before one pair."""
    with router_before_all(folder, [prefill], [decode], *flags) as one:
        yield one


@contextmanager
def router_before_all(
    folder: Path, prefills: Sequence[KvferryProcess], decodes: Sequence[KvferryProcess], *flags: str
) -> Iterator[KvferryProcess]:
    """A router before several."""
    urls = [f"--prefill-url={one.url}" for one in prefills] + [f"--decode-url={one.url}" for one in decodes]
    log = folder / f"router-{prefills[0].pid}-{decodes[0].pid}.log"
    with kvferry("router", *urls, *flags, log=log) as one:
        yield one


@dataclass
class Served:
    """`kvferry serve --engine vllm` as a user runs it: one URL, and those behind it."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def behind(self, role: str) -> str:
        """The URL of the instance of a role."""
        found = re.search(rf"\[{role}-0\] ready at (\S+)", self.log.read_text())
        assert found is not None
        return found[1]

    def require_ends(self) -> None:
        """By Ctrl-C, and with all that it has started."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        assert len(started) >= 9  # of each server a guard and three processes of vLLM's, and the router
        os.kill(self.process.pid, signal.SIGINT)
        assert self.process.wait(timeout=60) == 0
        assert psutil.wait_procs(started, timeout=20)[1] == []


@contextmanager
def serve_pair(folder: Path, transfer: dict[str, Any], **environment: str) -> Iterator[Served]:
    """One P and one D, with this connector between them; each prompt is handed off."""
    log = folder / "serve.log"
    flags = ["--engine", "vllm", "--prefill", "1", "--decode", "1", "--port", "0", "--served-model-name", "m"]
    flags += ["--disaggregate-from", "0"]  # the prompts are so short that most would soon stay on decode
    flags += ["--kv-transfer-config", json.dumps(transfer)]
    command = [sys.executable, "-m", "kvferry.cli.main", "serve", MODEL, *flags, "--", *VLLM_ARGUMENTS]
    more = {**vllm_environment(), **environment}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=more) as process,
    ):
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("kvferry is up: "), log.read_text()[-3000:]
            yield Served(process, line.removeprefix("kvferry is up: ").strip(), log)
        finally:
            if process.poll() is None:
                process.terminate()


def kill(server: KvferryProcess) -> None:
    """End a server and all its processes as a machine that fails would."""
    everything = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    for one in everything:
        one.kill()
    psutil.wait_procs(everything, timeout=20)
    server.kill()


@dataclass(frozen=True)
class Reference:
    """Prompts, and what one vLLM server alone answers each with."""

    prompts: list[list[int]]
    tokens: list[list[int]]

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts together."""
        return sum(map(len, self.prompts))


# Asking.


def prompts(count: int, longest: int, seed: int = 1) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens: around the block size, some that begin alike, the rest at random."""
    source = random.Random(seed)
    stem = [source.randrange(5, VOCABULARY) for _ in range(longest)]
    lengths = [1, 2, 31, 32, 33, 63, 64, 65, longest] + [
        min(longest, int(2 ** source.uniform(0, 11.2))) for _ in range(count - 9)
    ]
    return [
        stem[:length] if index % 3 == 0 else [source.randrange(5, VOCABULARY) for _ in range(length)]
        for index, length in enumerate(lengths)
    ]


def answers(url: str, asked: Sequence[Sequence[int]], *, at_once: int = 16, **options: Any) -> list[list[int]]:
    """The greedy tokens that `url` answers each prompt with; every other one streamed."""

    async def one(session: aiohttp.ClientSession, gate: asyncio.Semaphore, index: int) -> list[int]:
        async with gate:
            return await _tokens(session, url, {**body_of(asked[index]), **options, "stream": index % 2 == 1})

    async def everything() -> list[list[int]]:
        gate = asyncio.Semaphore(at_once)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=200)) as session:
            return await asyncio.gather(*(one(session, gate, index) for index in range(len(asked))))

    return asyncio.run(everything())


def body_of(prompt: Sequence[int], **options: Any) -> dict[str, Any]:
    """A request for a few greedy tokens."""
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": TOKENS_PER_ANSWER}
    return {"model": "m", "prompt": list(prompt), **fixed, **options}


async def _tokens(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[int]:
    async with session.post(url + "/v1/completions", json=body) as response:
        assert response.status == 200, (response.status, await response.text())
        if not body["stream"]:
            found: list[int] = (await response.json())["choices"][0]["token_ids"]
            return found
        streamed: list[int] = []
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    streamed += choice["token_ids"] or []
        return streamed


def prefilled(prefill: str, prompt: Sequence[int], transfer_id: str = "t") -> dict[str, Any]:
    """The ticket of a P that was asked to keep its KV for another."""
    keys = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id, **keys}
    body = body_of(prompt, max_tokens=1, kv_transfer_params=params)
    response = httpx.post(prefill + "/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    ticket: dict[str, Any] = response.json()["kv_transfer_params"]
    assert ticket["do_remote_prefill"] is True
    return ticket


# Looking.


def figure(url: str, name: str, **labels: str) -> float:
    """The sum of a metric over its labels, but for those that are named."""
    return sum_of(httpx.get(url + "/metrics", timeout=30).text, name, **labels)


def num_received(decode: KvferryProcess) -> float:
    """Prompt tokens whose KV came from elsewhere, as vLLM counts them."""
    return decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def held(url: str) -> float:
    """The share of the KV cache that is in use. vLLM tells with a step, so it is given one to make."""
    response = httpx.post(url + "/v1/completions", json=body_of([5], max_tokens=1), timeout=60)
    assert response.status_code == 200, response.text
    return figure(url, "vllm:kv_cache_usage_perc")


def require_nothing_kept(*servers: KvferryProcess, timeout_s: float = SETTLE_S) -> None:
    """vLLM's own figures: no request, no block."""
    for server in servers:
        require_idle(server.url, timeout_s, server.log)


def require_idle(url: str, timeout_s: float = SETTLE_S, log: str = "") -> None:
    """As `require_nothing_kept`, of one address."""
    counts = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    until(lambda: sum(figure(url, name) for name in counts) == 0 and held(url) == 0, timeout_s, log)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block must be done by then: what it does has a bound of its own."""
    begun_at = time.monotonic()
    yield
    assert time.monotonic() - begun_at < seconds


def hold_open(url: str, bodies: Sequence[dict[str, Any]]) -> ExitStack:
    """Begin requests; closing what is returned closes their connections, answered or not."""
    stack = ExitStack()
    for body in bodies:
        address = urlsplit(url)
        one = stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=30))
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: kvferry\r\nContent-Length: {len(content)}\r\n"
        one.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    return stack
