"""Clients of vLLM servers whose decode servers are killed in the middle of answers: no error, and every answer is that
of one server.

`KVFERRY_CALLS` says how many calls both libraries make together, `KVFERRY_SEED` which server is killed when.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.client_calls import NUM_QUESTIONS
from support.clients import differing_calls, failed_calls, library_calls
from support.killed_decode import Killed
from support.ports import free_port
from support.processes import kvferry
from support.vllm_servers import RestartedServer, Server, router_before_all

NUM_CALLS = int(os.environ.get("KVFERRY_CALLS", "30"))
AT_ONCE = 5
SEED = int(os.environ.get("KVFERRY_SEED", "1"))
TIMEOUT_S = 400 + 4 * NUM_CALLS
pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.processes, pytest.mark.timeout(900 + TIMEOUT_S)]

P2P = {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"lease_s": 8, "timeout_s": 6}}
PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
COMPACT = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
"""A small model would write whitespace without end."""
CALLS = {
    "openai": [
        "chat, schema",
        "chat, schema, streamed",
        "chat, forced call, streamed",
        "chat, choices, streamed",
        "chat, text, streamed",
        "responses, parsed, streamed",
        "responses, forced call, streamed",
    ],
    "anthropic": ["schema, streamed", "forced call, streamed", "text, streamed"],
}
NUM_ROUNDS = max(1, NUM_CALLS // sum(map(len, CALLS.values())))
"""How often each call is made; its questions repeat themselves after `NUM_QUESTIONS`."""


class KilledServers(Killed):
    """A start of vLLM takes most of the machine, so there is a pause after it."""

    pause_s = min(40.0, NUM_CALLS / 6)


@contextmanager
def killed_servers(folder: Path) -> Iterator[Killed]:
    """A prefill server, two decode servers and a router before them."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        servers = []
        for index, role in enumerate(("prefill", "decode", "decode")):
            server = Server(role, P2P, (*PARSERS, *COMPACT), port=free_port())
            servers.append(RestartedServer(server, folder, f"{role}-{index}", {cores[index % len(cores)]}))
            stack.callback(servers[-1].stop)
            servers[-1].begin()
        for started in servers:
            started.wait()
        prefill, *decode = servers
        urls = [server.process for server in decode]
        flags = ("--disaggregate-from=0", "--continuations=12")
        router = stack.enter_context(router_before_all(folder, [prefill.process], urls, *flags))
        yield KilledServers(prefill.process, decode, router, SEED)


def calls(url: str, folder: Path, num_rounds: int) -> dict[str, list[tuple[str, Any]]]:
    """Names and results of the calls of both libraries, which run at once."""

    def run(library: str) -> list[tuple[str, Any]]:
        names = CALLS[library]
        return library_calls(url, library, num_rounds * len(names), AT_ONCE, *names, folder=folder, timeout_s=TIMEOUT_S)

    with ThreadPoolExecutor(len(CALLS)) as pool:
        return dict(zip(CALLS, pool.map(run, CALLS), strict=True))


def test_decode_servers_are_killed(tmp_path: Path) -> None:
    with killed_servers(tmp_path) as killed:
        with kvferry("router", f"--decode-url={killed.decode[0].process.url}", log=tmp_path / "alone.log") as alone:
            expected = calls(alone.url, tmp_path, min(NUM_ROUNDS, NUM_QUESTIONS))
        with killed.killing():
            results = calls(killed.router.url, tmp_path, NUM_ROUNDS)
        assert not [error for pairs in expected.values() for error in failed_calls(dict(pairs))]
        wrong = {library: differing_calls(pairs, dict(expected[library])) for library, pairs in results.items()}
        assert not any(wrong.values()), {library: (len(pairs), pairs[:5]) for library, pairs in wrong.items()}
        assert killed.num_kills > 0
        assert killed.router.metric("kvferry_router_hand_offs_total") > 0
        assert killed.continuations("done") > 0
        assert killed.continuations("failed") == 0
        num_calls = sum(map(len, results.values()))
        print(f"\n{num_calls} calls, {killed.num_kills} kills, {killed.continuations('done'):.0f} continued")
