"""vLLM servers that register at a router, and whose KV events lead requests to where their prefix is."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.ports import free_port
from support.processes import KvferryProcess, kvferry
from support.vllm_servers import VOCABULARY, Server, body_of, kill, vllm_servers
from support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(900)]

BLOCK = 32
LEASE_S = 4


@dataclass
class Started:
    """Two servers behind a router that named none."""

    router: KvferryProcess
    servers: dict[str, KvferryProcess]


def events_flag(folder: Path, name: str) -> str:
    """Unix sockets, as vLLM would have TCP ports open to everyone."""
    told = {"endpoint": f"ipc://{folder}/{name}", "replay_endpoint": f"ipc://{folder}/{name}-again"}
    return json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", **told})


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("e")
    router_port, ports = free_port(), {"one": free_port(), "two": free_port()}
    servers = {
        name: Server(
            "decode",
            arguments=("--kv-events-config", events_flag(folder, name)),
            flags=(f"--register=http://127.0.0.1:{router_port}",),
            port=port,
        )
        for name, port in ports.items()
    }
    with ExitStack() as stack:
        running = stack.enter_context(vllm_servers(folder, **servers))
        for number in range(3):  # before anybody listens
            ask(running["two"], prompt(number))
        follow = [
            f"--instance-kv-events=http://127.0.0.1:{port}=ipc://{folder}/{name},ipc://{folder}/{name}-again"
            for name, port in ports.items()
        ]
        flags = ("--registration", f"--registration-lease-s={LEASE_S}", "--policy=prefix", "--health-interval-s=0.5")
        router = stack.enter_context(
            kvferry("router", *flags, *follow, log=folder / "router.log", port=router_port, ends_cleanly=False)
        )
        until(lambda: len(instances(router)) == 2, 120, router.log)
        yield Started(router, running)


def instances(router: KvferryProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(router.get("/kvferry/instances").text)["instances"]
    return found


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(5, VOCABULARY) for _ in range(8 * BLOCK)]


def ask(server: KvferryProcess, tokens: list[int]) -> dict[str, Any]:
    response = server.post("/v1/completions", body_of(tokens))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def known(router: KvferryProcess, tokens: list[int]) -> tuple[list[int], int]:
    """How many tokens of a prompt, which the router has sent nowhere yet, it thought that servers have; and how many
    the one that it chose had."""
    answer = ask(router, [*tokens, 7])
    (decision,) = json.loads(router.get("/kvferry/decisions?limit=1").text)["decisions"]
    had = answer["usage"]["prompt_tokens_details"]
    return list(decision["cached_tokens"].values()), 0 if had is None else had["cached_tokens"]


WHOLE = ([8 * BLOCK], 8 * BLOCK)


def heard(router: KvferryProcess) -> float:
    """Events so far: each prompt that a server computes brings one at least."""
    return router.metric("kvferry_router_kv_events_total")


def test_what_was_told_before_the_router_listened_is_told_again(started: Started) -> None:
    until(lambda: heard(started.router) >= 3, 60, started.router.log)
    assert [known(started.router, prompt(number)) for number in range(3)] == [WHOLE] * 3


def test_what_is_told_meanwhile_is_known(started: Started) -> None:
    for number, name in ((10, "one"), (11, "two")):
        before = heard(started.router)
        ask(started.servers[name], prompt(number))
        until(lambda before=before: heard(started.router) > before, 60, started.router.log)
        assert known(started.router, prompt(number)) == WHOLE


def test_who_dies_is_forgotten_with_what_it_had(started: Started) -> None:
    ask(started.servers["two"], prompt(30))
    kill(started.servers["two"])
    until(lambda: len(instances(started.router)) == 1, 60, started.router.log)
    assert known(started.router, prompt(30)) == ([], 0)
