"""Real kvferry processes for tests: each command on its own, told apart, killed at will."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from kvferry.core.keys import CHALLENGE_PATH, Purpose, Signer
from kvferry.fleet.processes.ready import InstanceReady, start_messages
from kvferry.fleet.processes.start_time import started_at
from support.waiting import until
from support.warm import Child, Program, run_command

START_S = 120.0
RUN = """
import sys
from kvferry.cli.main import main
sys.stdin = open({stdin!r})
sys.exit(main({arguments!r}))
"""
AUTH_TOKEN = "the token of tests"


class Signed(httpx.Auth):
    """Signs requests for one purpose, as kvferry's own processes do."""

    requires_request_body = requires_response_body = True

    def __init__(self, purpose: Purpose, secret: str = AUTH_TOKEN) -> None:
        self._purpose, self._secret = purpose, secret

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        nonce = "of a test"
        challenge = request.url.copy_with(path=CHALLENGE_PATH, query=f"nonce={nonce.replace(' ', '+')}".encode())
        answer = yield httpx.Request("GET", challenge)
        session = Signer(self._secret, nonce, answer.content)
        target = request.url.raw_path.decode()
        request.headers["Authorization"] = session.sign(self._purpose, request.method, target, request.content)
        yield request


OPERATOR = Signed("operate")


class KvferryProcess:
    """One running `kvferry` command that serves at `url`."""

    def __init__(self, process: Child, log: Path, url: str) -> None:
        self._process, self._log, self.url = process, log, url

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; SIGKILL is waited for."""
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(timeout=10)

    def stop(self) -> int:
        """End it as a person would; the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait(timeout=60)

    @property
    def log(self) -> str:
        """What it wrote so far."""
        return self._log.read_text(errors="replace")

    def get(self, path: str) -> httpx.Response:
        """GET a path."""
        return httpx.get(self.url + path, timeout=30)

    def post(self, path: str, body: dict[str, Any], timeout: float = 60) -> httpx.Response:
        """POST JSON to a path."""
        return httpx.post(self.url + path, json=body, timeout=timeout)

    def complete(self, prompt: Any, **options: Any) -> dict[str, Any]:
        """A greedy completion of 12 tokens, whole."""
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        response = self.post("/v1/completions", {**body, **options})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def require_clean(self, timeout_s: float = 15.0) -> None:
        """Wait until `/kvferry/check` finds nothing kept and nothing runs; fail when it does not come to that."""
        until(lambda: self.get("/kvferry/check").status_code == 200 and self.num_running() == 0, timeout_s, self.log)

    def num_running(self) -> int:
        """Sequences that run, wait or load."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return int(sum(self.metric(name) for name in names))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over its labels, but for those that are named."""
        return sum_of(self.get("/metrics").text, name, **labels)


def sum_of(metrics: str, name: str, **labels: str) -> float:
    """The sum of a metric over its labels, but for those that are named, in Prometheus' text."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    found = (line for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return sum(float(line.rsplit(" ", 1)[1]) for line in found if all(one in line for one in wanted))


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended. What has lost its parent may stay, ended, for as long as
    these tests run: some of them make their process the one that inherits children, as a fleet does."""
    try:
        started_at(pid)
    except OSError:
        return False
    return True


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """`kvferry ARGUMENTS` to its end."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "stdin")
        said.write_text(stdin)
        code = RUN.format(stdin=str(said), arguments=list(arguments))
        return Program(code, Path(folder), KVFERRY_AUTH_TOKEN=AUTH_TOKEN).end()


@contextmanager
def kvferry(*arguments: str, log: Path, ends_cleanly: bool = True, port: int = 0) -> Iterator[KvferryProcess]:
    """Run `kvferry ARGUMENTS --port PORT` until the end of the block."""
    with begun(*arguments, log=log, ends_cleanly=ends_cleanly, port=port) as ready:
        yield ready()


@contextmanager
def begun(
    *arguments: str,
    log: Path,
    ends_cleanly: bool = True,
    port: int = 0,
    start_s: float = START_S,
    more: Mapping[str, str] | None = None,
) -> Iterator[Callable[[], KvferryProcess]]:
    """As `kvferry`, without waiting: it serves when what is yielded returns, so that several start side by side.
    `more` is added to its environment."""
    ready_read, ready_write = os.pipe()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KVFERRY_AUTH_TOKEN": AUTH_TOKEN}
    environment |= {"KVFERRY_DISAGGREGATE_FROM": "0", **(more or {})}  # Short prompts are handed off too.
    process = _start((arguments[0], f"--port={port}", *arguments[1:]), environment, log, ready_write)
    os.close(ready_write)
    running: list[KvferryProcess] = []

    def ready() -> KvferryProcess:
        running.append(KvferryProcess(process, log, _wait_ready(ready_read, process, log, start_s)))
        return running[0]

    try:
        yield ready
        if ends_cleanly and running:
            assert running[0].stop() == 0, running[0].log
    finally:
        os.close(ready_read)
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)


def _start(arguments: tuple[str, ...], environment: dict[str, str], log: Path, ready_write: int) -> Child:
    if "--" not in arguments:
        return run_command(arguments, environment, log, ready_write)
    command = [sys.executable, "-m", "kvferry.cli.main", arguments[0], f"--ready-fd={ready_write}", *arguments[1:]]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment, pass_fds=(ready_write,))


def _wait_ready(descriptor: int, process: Child, log: Path, start_s: float) -> str:
    deadline, messages = time.monotonic() + start_s, start_messages()
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while time.monotonic() < deadline and selector.select(deadline - time.monotonic()):
            chunk = os.read(descriptor, 65536)
            for message in messages.feed(chunk):
                if isinstance(message, InstanceReady):
                    return message.url
            if not chunk:
                break
    process.kill()
    raise AssertionError(f"{log.stem} did not begin to serve:\n{log.read_text(errors='replace')[-3000:]}")


class Cluster:
    """Prefill and decode instances and a router, each a process of its own."""

    def __init__(self, prefill: list[KvferryProcess], decode: list[KvferryProcess], router: KvferryProcess) -> None:
        self.prefill, self.decode, self.router = prefill, decode, router

    def require_clean(self, timeout_s: float = 15.0) -> None:
        """Nothing is kept on any instance."""
        for instance in (*self.prefill, *self.decode):
            instance.require_clean(timeout_s)


@contextmanager
def cluster(
    model: Path,
    folder: Path,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    transfer: dict[str, Any] | None = None,
    hand_off: str = "auto",
    engine: tuple[str, ...] = (),
    router: tuple[str, ...] = (),
    ends_cleanly: bool = True,
) -> Iterator[Cluster]:
    """Start x prefill and y decode instances of `model` and a router; float32, small caches."""
    config = json.dumps(transfer or {"kv_connector": "P2pConnector"})
    common = (
        str(model),
        "--served-model-name=m",
        "--dtype=float32",
        "--kv-cache-memory=48MiB",
        f"--kv-transfer-config={config}",
        *engine,
    )
    with ExitStack() as stack:

        def instances(role: str, count: int) -> list[Callable[[], KvferryProcess]]:
            return [
                stack.enter_context(
                    begun(role, *common, log=folder / f"{role}-{number}.log", ends_cleanly=ends_cleanly)
                )
                for number in range(count)
            ]

        starting = instances("prefill", num_prefill), instances("decode", num_decode)
        prefill, decode = ([ready() for ready in role] for role in starting)
        urls = [f"--prefill-url={one.url}" for one in prefill] + [f"--decode-url={one.url}" for one in decode]
        front = stack.enter_context(
            kvferry(
                "router",
                *urls,
                f"--hand-off={hand_off}",
                *router,
                log=folder / "router.log",
                ends_cleanly=ends_cleanly,
            )
        )
        yield Cluster(prefill, decode, front)
