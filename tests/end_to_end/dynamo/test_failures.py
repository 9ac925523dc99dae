"""Dynamo's workers that are killed and stopped under load, one or all of a role: what clients get meanwhile, how soon,
and that workers which are started again serve. Mockers draw their tokens by chance, so answers are counted here, and
compared in `test_fleet.py`."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from support.dynamo_workers import Deployment, Served, Worker, instances, until_serving
from support.processes import OPERATOR, KvferryProcess
from support.waiting import until

pytestmark = [pytest.mark.dynamo, pytest.mark.processes, pytest.mark.timeout(300)]

LIMITS = ("--health-interval-s=0.3", "--health-timeout-s=2", "--disaggregate-from=0", "--busy-wait-s=2")
NUM_TOKENS = 40
LONGEST_S = 20.0
"""For any request, also one that was sent to a worker which stands still."""
KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP
TABLE = [
    # who, how, what clients may get while they are gone
    ("a prefill", KILLED, {"answer"}),
    ("every prefill", KILLED, {"answer"}),  # decode workers compute
    ("a decode", KILLED, {"answer"}),
    ("every decode", KILLED, {"answer", "error event", "502", "503"}),
    ("a prefill", STOPPED, {"answer"}),
    ("every prefill", STOPPED, {"answer"}),
    ("a decode", STOPPED, {"answer"}),
    ("every decode", STOPPED, {"answer", "error event", "502", "503", "504"}),
]
QUICK = {("every prefill", KILLED), ("every decode", KILLED)}
CASES = [
    pytest.param(*row, marks=[] if row[:2] in QUICK else [pytest.mark.full], id=f"{row[0]} {row[1].name}")
    for row in TABLE
]


@dataclass
class Clients:
    """Clients that send requests without a pause until the end of the block, every second one a stream."""

    url: str
    outcomes: list[tuple[float, str, float]] = field(default_factory=list)
    """For each request: when it was answered, with what, and after how many seconds."""

    def __enter__(self) -> Clients:
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(6)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        count = 0
        while not self._ending.is_set():
            count += 1
            began = time.monotonic()
            outcome = request(self.url, number * 1000 + count, streams=count % 2 == 0)
            self.outcomes.append((time.monotonic(), outcome, time.monotonic() - began))
            if outcome != "answer":
                self._ending.wait(0.1)

    def wait_for(self, outcome: str, number: int, timeout_s: float = 60.0) -> None:
        """Wait until so many more requests have ended in this way."""
        enough = self.count(outcome) + number
        deadline = time.monotonic() + timeout_s
        while self.count(outcome) < enough:
            assert time.monotonic() < deadline, f"{outcome}: {self.outcomes[-20:]}"
            self._ending.wait(0.05)

    def count(self, outcome: str) -> int:
        """Number of requests that ended in this way."""
        return sum(found == outcome for _, found, _ in list(self.outcomes))


def request(url: str, number: int, *, streams: bool) -> str:
    """`answer` for all tokens, `error event`, a status, or what was wrong with an answer."""
    prompt = [10 + (number * 31 + index) % 900 for index in range(150)]
    body = {"model": "m", "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": streams}
    usage = {"stream_options": {"include_usage": True}} if streams else {}
    try:
        response = httpx.post(url + "/v1/completions", json={**body, **usage}, timeout=60)
    except httpx.HTTPError as error:
        return f"no answer: {error!r}"
    if response.status_code != 200:
        message = response.json()["error"]["message"]
        return str(response.status_code) if message else f"{response.status_code} without a message"
    if '"error"' in response.text:
        return "error event"
    is_whole = f'"completion_tokens":{NUM_TOKENS}' in response.text
    is_ended = not streams or response.text.rstrip().endswith("data: [DONE]")
    return "answer" if is_whole and is_ended else f"cut: {response.text[-300:]}"


@pytest.fixture(scope="module")
def mockers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    deployment = Deployment(tmp_path_factory.mktemp("mockers"))
    try:
        with deployment.found_here():
            for role in ("prefill", "prefill", "decode", "decode"):
                deployment.mocker(role)
            with deployment.router(*LIMITS) as router:
                until_serving(router, 2, 2)
                yield Served(deployment, router)
    finally:
        deployment.end()


@pytest.mark.parametrize(("who", "how", "allowed"), CASES)
def test_workers_under_load(mockers: Served, who: str, how: signal.Signals, allowed: set[str]) -> None:
    number, role = who.split()
    deployment, router = mockers.deployment, mockers.router
    running: list[Worker] = [worker for worker in deployment.workers if worker.process.poll() is None]
    victims = [worker for worker in running if f"'--disaggregation-mode', '{role}'" in str(worker.process.args)]
    victims = victims if number == "every" else victims[:1]
    with Clients(router.url) as clients:
        clients.wait_for("answer", 6)
        struck = time.monotonic()
        try:
            for worker in victims:
                worker.strike(how)
            if allowed == {"answer"}:
                clients.wait_for("answer", 30)
            else:
                clients.wait_for("503", 6)
        finally:
            for worker in victims:
                worker.strike(signal.SIGKILL)
        gone_until = time.monotonic()
        for _ in victims:
            deployment.mocker(role)
        until_serving(router, 2, 2, timeout_s=90)
        clients.wait_for("answer", 12)
    meanwhile = [each for each in clients.outcomes if each[0] > struck and each[0] - each[2] < gone_until]
    names = {outcome for _, outcome, _ in meanwhile}
    slowest = max(seconds for _, _, seconds in meanwhile)
    counts = {name: sum(found == name for _, found, _ in meanwhile) for name in names}
    print(f"{who} {how.name}: {len(meanwhile)} requests, {counts}, {slowest:.1f} s")
    assert names <= allowed
    assert slowest < LONGEST_S


def test_a_decode_worker_is_drained_under_load(mockers: Served) -> None:
    """The last of this module: the worker does not come back."""
    router = mockers.router
    [name, *_] = [each["name"] for each in instances(router, "decode")]
    with Clients(router.url) as clients:
        clients.wait_for("answer", 6)
        drain = httpx.post(f"{router.url}/kvferry/instances/drain", json={"instance": name}, auth=OPERATOR, timeout=30)
        assert drain.status_code == 200
        until(lambda: state_of(router, name) == "drained", 30, lambda: router.log)
        clients.wait_for("answer", 12)
    assert {outcome for _, outcome, _ in clients.outcomes} == {"answer"}


def state_of(router: KvferryProcess, name: str) -> str:
    """The state of an instance."""
    found = router.get("/kvferry/instances").json()["instances"]
    [state] = [each["state"] for each in found if each["name"] == name]
    return str(state)
