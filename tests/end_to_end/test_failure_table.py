"""What must happen when something fails, row by row, with real instances: two of each role and a router, one fleet."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from kvferry.cli.fleet import command as commands
from support.members import Member
from support.processes import AUTH_TOKEN, KvferryProcess, kvferry
from support.waiting import until

pytestmark = pytest.mark.processes

PROMPT = list(range(7, 200))
WAIT_S = 60.0


@dataclass
class Fleet:
    """All processes. `expected`: the answer to `PROMPT`."""

    prefill: list[Member]
    decode: list[Member]
    router: KvferryProcess
    expected: list[int]

    def ask(self, salt: str) -> list[int]:
        """`PROMPT` through the router, cached by nobody."""
        found: list[int] = self.router.complete(PROMPT, cache_salt=salt)["choices"][0]["token_ids"]
        return found

    def served(self, kind: str) -> float:
        """How many requests were served so."""
        return self.router.metric("kvferry_router_hand_offs_total", kind=kind)

    def num_alive(self, role: str) -> int:
        """Of this role, as the router sees it."""
        instances = self.router.get("/kvferry/instances").json()["instances"]
        return sum(one["alive"] for one in instances if one["role"] == role)

    def until_all_are_back(self) -> None:
        """And have been asked what they are, and keep nothing."""
        until(lambda: self.num_alive("prefill") == 2 and self.num_alive("decode") == 2, timeout_s=WAIT_S)
        for member in (*self.prefill, *self.decode):
            member.process.require_clean()
        for member in self.prefill:
            until(lambda one=member: one.process.metric("kvferry:num_hand_offs_held") == 0, timeout_s=WAIT_S)  # type: ignore[misc]


@pytest.fixture(scope="module")
def fleet(model_maker: Any, tmp_path_factory: Any) -> Iterator[Fleet]:
    model, folder = model_maker("llama"), tmp_path_factory.mktemp("table")
    with ExitStack() as stack:
        members = [
            Member(role, model, folder, more=("--max-waiting=1", "--max-num-seqs=2") if role == "decode" else ())
            for role in ("prefill", "prefill", "decode", "decode")
        ]
        for member in members:
            stack.callback(member.stop)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(Member.start, members))
        urls = [f"--{member.role}-url=http://127.0.0.1:{member.port}" for member in members]
        limits = ("--health-interval-s=0.2", "--health-timeout-s=1", "--busy-wait-s=60", f"--grace-s={WAIT_S}")
        router = stack.enter_context(kvferry("router", *urls, *limits, log=folder / "router.log", ends_cleanly=False))
        one = Fleet(members[:2], members[2:], router, [])
        one.expected = one.ask("first")
        yield one


def test_one_prefill_dies_then_all_then_they_are_back(fleet: Fleet) -> None:
    fleet.prefill[0].process.kill()
    assert [fleet.ask(f"one dead {number}") for number in range(2)] == [fleet.expected] * 2
    fleet.prefill[1].process.kill()
    assert [fleet.ask(f"all dead {number}") for number in range(2)] == [fleet.expected] * 2
    until(lambda: fleet.num_alive("prefill") == 0, timeout_s=WAIT_S)
    before = fleet.served("whole")
    assert fleet.ask("aggregated") == fleet.expected
    assert fleet.served("whole") == before + 1
    for member in fleet.prefill:
        member.restart()
    fleet.until_all_are_back()
    before = fleet.served("concurrent") + fleet.served("sequential")
    assert fleet.ask("disaggregated again") == fleet.expected
    assert fleet.served("concurrent") + fleet.served("sequential") == before + 1


def test_one_decode_refuses(fleet: Fleet) -> None:
    fleet.decode[0].process.kill()
    assert [fleet.ask(f"no decode-0 {number}") for number in range(3)] == [fleet.expected] * 3
    fleet.decode[0].restart()
    fleet.until_all_are_back()


def test_one_of_each_stands_still(fleet: Fleet) -> None:
    stopped = [fleet.prefill[1].process, fleet.decode[1].process]
    for process in stopped:
        process.kill(signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fleet.ask, (f"stopped {number}" for number in range(4)))) == [fleet.expected] * 4
    for process in stopped:
        process.kill(signal.SIGCONT)
    fleet.until_all_are_back()


def test_more_than_there_is_room_for_waits(fleet: Fleet) -> None:
    """Each decode instance runs two and has one waiting; clients see no 429."""
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(fleet.ask, (f"crowd {number}" for number in range(12))))
    assert found == [fleet.expected] * 12
    assert fleet.num_alive("decode") == 2


def test_what_prefill_refuses_is_the_clients(fleet: Fleet) -> None:
    before = fleet.router.metric("kvferry_router_retries_total")
    response = fleet.router.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 10**6})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert fleet.router.metric("kvferry_router_retries_total") == before
    fleet.until_all_are_back()


def test_an_instance_is_drained_under_load_and_comes_back(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", AUTH_TOKEN)
    where = commands.RouterAddress(router=fleet.router.url)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(fleet.ask, f"drain {number}") for number in range(16)]
        for name in ("decode-1", "prefill-1"):
            assert commands.drain(name, wait_s=WAIT_S, where=where) == 0
        assert [one.result() for one in asked] == [fleet.expected] * 16
    for member in (fleet.prefill[1], fleet.decode[1]):
        assert member.process.num_running() == 0
        assert member.process.metric("kvferry:num_hand_offs_held") == 0
        assert commands.remove(f"http://127.0.0.1:{member.port}", where=where) == 0
    assert fleet.ask("one of each") == fleet.expected
    for member in (fleet.prefill[1], fleet.decode[1]):
        assert commands.add(member.role, f"http://127.0.0.1:{member.port}", where=where) == 0
    fleet.until_all_are_back()
    assert [fleet.ask(f"both again {number}") for number in range(4)] == [fleet.expected] * 4


def test_the_router_ends_with_a_stream_under_way(fleet: Fleet) -> None:
    body = {"prompt": PROMPT, "max_tokens": 600, "ignore_eos": True, "stream": True}
    ended = threading.Event()
    lines: list[str] = []
    with httpx.stream("POST", f"{fleet.router.url}/v1/completions", json=body, timeout=WAIT_S) as response:
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == 20:
                fleet.router.kill(signal.SIGTERM)
                until(lambda: refuses(fleet.router.url), timeout_s=WAIT_S)
                ended.set()
    assert [line for line in lines if '"error"' in line] == []
    assert lines[-2] == "data: [DONE]"
    assert ended.is_set()
    until(lambda: fleet.router.returncode is not None, timeout_s=WAIT_S)
    assert fleet.router.returncode == 0
    for member in (*fleet.prefill, *fleet.decode):
        member.process.require_clean()
    for member in fleet.prefill:
        assert member.process.metric("kvferry:num_hand_offs_held") == 0


def refuses(url: str) -> bool:
    """Whether a new connection is turned away."""
    try:
        return httpx.get(url + "/health", timeout=5).status_code == 503
    except httpx.TransportError:
        return True
