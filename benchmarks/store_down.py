"""The cost of an answer whose hand-off goes through a store that is down, beside one that D computes by itself.

A prefill and a decode instance, a core each, hand off through a store; two routers stand before them: one splits
requests over both, the other gives them to the decode instance alone ("computed"). The two take turns, each prompt is
new, while the store is well, then in trouble, then well again. For each state of the store:

  TTFT, second token   asked until the first and the second token: medians while the store is down, and what the first
                       request took that met it so
  back                 from the store's recovery until a hand-off goes through it again

Needs valkey-server or redis-server (scripts/install_test_servers.sh), and for a full disk the right to mount one.
Prints medians in milliseconds and writes results/store_down.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from load import Streamed, stream_completion
from models import SHAPE, make_bench_model
from report import print_machine, save
from served import kvferry

BACK_S = 60.0
SLOW_S = 1.0
_HITS = re.compile(r"^vllm:external_prefix_cache_hits_total\S* ([0-9.e+]+)$", re.MULTILINE)


@dataclass
class Server:
    """A Valkey or Redis server, reached through a proxy that can delay its answers."""

    folder: Path
    delay_s: float = 0.0
    ports: list[int] = field(default_factory=lambda: [free_port(), free_port()])

    def start(self) -> None:
        """Returns when it listens."""
        binary = shutil.which("valkey-server") or shutil.which("redis-server")
        if binary is None:
            raise SystemExit("needs valkey-server or redis-server; run scripts/install_test_servers.sh")
        options = ["--port", str(self.ports[0]), "--save", "", "--appendonly", "no", "--dir", str(self.folder)]
        self.process = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL)
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.ports[0])):
                return
            time.sleep(0.01)

    def kill(self) -> None:
        """At once."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """It comes back empty."""
        self.kill()
        self.start()

    def set(self, *words: str) -> None:
        """A command of plain words."""
        with socket.create_connection(("127.0.0.1", self.ports[0])) as connection:
            connection.sendall((" ".join(words) + "\r\n").encode())
            assert connection.recv(4096).startswith(b"+OK")

    @asynccontextmanager
    async def proxy(self) -> AsyncIterator[None]:
        """Serve the second port until the end of the block."""

        async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                upstream = await asyncio.open_connection("127.0.0.1", self.ports[0])
                await asyncio.gather(move(reader, upstream[1], 0), move(upstream[0], writer, 1))
                upstream[1].close()
            writer.close()

        async def move(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, late: int) -> None:
            while content := await reader.read(2**18):
                if self.delay_s:
                    await asyncio.sleep(late * self.delay_s)
                writer.write(content)
                await writer.drain()
            writer.close()

        async with await asyncio.start_server(join, "127.0.0.1", self.ports[1]):
            yield


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@dataclass(frozen=True)
class State:
    """A failure of a store, and its recovery."""

    begin: Callable[[], Any]
    end: Callable[[], Any]


def states(server: Server, disk: Path) -> dict[str, dict[str, State]]:
    """By store, and by name."""

    def fill() -> None:
        with suppress(OSError), (disk / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, shutil.disk_usage(disk).free)
        with suppress(OSError), (disk / "rest").open("wb", buffering=0) as rest:
            while True:
                rest.write(bytes(4096))

    def free() -> None:
        for name in ("filler", "rest"):
            (disk / name).unlink(missing_ok=True)

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)

    killed = State(server.kill, server.start)
    hung = State(
        lambda: os.kill(server.process.pid, signal.SIGSTOP), lambda: os.kill(server.process.pid, signal.SIGCONT)
    )
    full = State(lambda: server.set("CONFIG", "SET", "maxmemory", "1"), lambda: server.set("CONFIG SET maxmemory 0"))
    return {
        "valkey": {
            "killed": killed,
            "hung": hung,
            "full": full,
            "read-only": State(lambda: server.set("REPLICAOF 127.0.0.1 1"), lambda: server.set("REPLICAOF NO ONE")),
            f"answers {SLOW_S:g} s late": State(
                lambda: setattr(server, "delay_s", SLOW_S), lambda: setattr(server, "delay_s", 0.0)
            ),
            "restarted empty": State(server.restart, lambda: None),
        },
        "memory and valkey": {"killed": killed, "hung": hung, "full": full},
        "disk": {"full": State(fill, free), "read-only": State(lambda: remount("ro"), lambda: remount("rw"))},
    }


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A disk of its own; None: it cannot be mounted."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "none", folder], check=False).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


class Fleet:
    """The routers of one P and one D: `split` over both, and `computed` by D alone."""

    def __init__(self, stack: ExitStack, model: str, store: Any, cores: list[int], options: argparse.Namespace) -> None:
        transfer = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": store}}
        flags = ["--served-model-name", "bench", "--dtype", options.dtype, "--kv-cache-memory", "512MiB", "--port", "0"]
        flags += ["--kv-transfer-config", json.dumps(transfer)]
        prefill = stack.enter_context(kvferry("prefill", model, *flags, cores=cores[:1]))
        self.decode = stack.enter_context(kvferry("decode", model, *flags, cores=cores[-1:]))
        alone, pair = ["--decode-url", self.decode], ["--prefill-url", prefill, "--disaggregate-from", "0"]
        self.computed = stack.enter_context(kvferry("router", *alone, "--port", "0"))
        self.split = stack.enter_context(kvferry("router", *alone, *pair, "--port", "0"))
        self._rng, self._length = random.Random(5), options.prompt

    async def ask(self, session: aiohttp.ClientSession, url: str) -> Streamed:
        """A new prompt, two tokens."""
        prompt = [self._rng.randrange(5, SHAPE["vocab_size"]) for _ in range(self._length)]
        answer = await stream_completion(session, url, "bench", prompt, 2)
        if answer.error or len(answer.token_times) != 2:
            raise RuntimeError(answer.error or "the answer does not have two tokens")
        return answer

    async def takes_turns(self, session: aiohttp.ClientSession, repeat: int) -> dict[str, float]:
        """Medians of both, ms."""
        seen: dict[str, list[float]] = {}
        for _ in range(repeat):
            for name, url in (("split", self.split), ("computed", self.computed)):
                answer = await self.ask(session, url)
                seen.setdefault(f"{name}_ttft_ms", []).append(answer.ttft * 1e3)
                seen.setdefault(f"{name}_second_ms", []).append((answer.token_times[1] - answer.sent_at) * 1e3)
        return {name: statistics.median(values) for name, values in seen.items()}

    async def num_hits(self, session: aiohttp.ClientSession) -> float:
        """Tokens that D has had from the store."""
        async with session.get(f"{self.decode}/metrics") as response:
            return sum(map(float, _HITS.findall(await response.text())))

    async def back_s(self, session: aiohttp.ClientSession) -> float:
        """Ask until a hand-off goes through the store."""
        begun, before = time.monotonic(), await self.num_hits(session)
        while await self.num_hits(session) == before:
            if time.monotonic() > begun + BACK_S:
                return float("nan")
            await self.ask(session, self.split)
        return time.monotonic() - begun


async def measure(fleet: Fleet, state: State | None, repeat: int) -> dict[str, float]:
    """One state; None: the store is well."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        if state is None:
            await fleet.takes_turns(session, 2)
            return await fleet.takes_turns(session, repeat)
        await fleet.back_s(session)
        await asyncio.to_thread(state.begin)
        try:
            first = await fleet.ask(session, fleet.split)
            figures = await fleet.takes_turns(session, repeat)
        finally:
            await asyncio.to_thread(state.end)
        figures["first_ttft_ms"], figures["first_second_ms"] = (
            first.ttft * 1e3,
            (first.token_times[1] - first.sent_at) * 1e3,
        )
        figures["back_s"] = await fleet.back_s(session)
        return figures


def show(label: str, figures: dict[str, float]) -> None:
    """One row."""
    first = f"{figures['first_second_ms']:8.0f}  back {figures['back_s']:4.1f} s" if "back_s" in figures else ""
    print(
        f"{label:32s} TTFT {figures['split_ttft_ms']:6.0f} ms, computed {figures['computed_ttft_ms']:6.0f};"
        f"  second token {figures['split_second_ms']:6.0f}, computed {figures['computed_second_ms']:6.0f};"
        f"  first {first}",
        flush=True,
    )


async def run(model: str, options: argparse.Namespace, server: Server, disk: Path | None) -> dict[str, Any]:
    """All stores in all states."""
    results: dict[str, Any] = {}
    url = f"valkey://127.0.0.1:{server.ports[1]}"
    stores: dict[str, Any] = {"valkey": url, "memory and valkey": ["memory:256MiB?name=store-down", url]}
    stores |= {} if disk is None else {"disk": f"file:{disk}"}
    cores = sorted(os.sched_getaffinity(0))[:2]
    async with server.proxy():
        for name, store in stores.items():
            with ExitStack() as stack:
                fleet = await asyncio.to_thread(Fleet, stack, model, store, cores, options)
                wells: dict[str, Awaitable[Any]] = {f"{name}, well": measure(fleet, None, options.repeat)}
                downs = states(server, disk or Path())[name].items()
                rows = wells | {f"{name}, {what}": measure(fleet, figures, options.repeat) for what, figures in downs}
                for label, row in rows.items():
                    results[label] = await row
                    show(label, results[label])
                await asyncio.to_thread(stack.close)
    return results


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--repeat", type=int, default=9, help="requests of each kind in each state")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder, "disk")) as disk:
        model = make_bench_model(Path(folder))
        server = Server(Path(folder))
        server.start()
        try:
            results = asyncio.run(run(model, options, server, disk))
        finally:
            with suppress(ProcessLookupError):
                os.kill(server.process.pid, signal.SIGCONT)
            server.kill()
    print(f"wrote {save('store_down', {'model': SHAPE, **vars(options)}, results)}")


if __name__ == "__main__":
    main()
