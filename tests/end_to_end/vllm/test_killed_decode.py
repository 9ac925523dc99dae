"""Clients of vLLM servers of which a decode server dies in the middle of their answers: no error, and every answer is
that of one server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.processes import kvferry, until
from support.vllm_servers import Server, kill, router_before_all, vllm_servers

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.processes, pytest.mark.timeout(900)]

ROLES = {"prefill": "prefill", "first": "decode", "second": "decode"}
PROGRAM = Path(__file__).parents[2] / "support/client_calls.py"
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
TIMEOUT_S = 400


def calls(url: str, folder: Path, while_running: Callable[[], None] = lambda: None) -> dict[str, dict[str, Any]]:
    """The results of each library's calls by their names, of both libraries at once. Each is called with three
    questions."""
    running = {}
    for library, names in CALLS.items():
        command = [sys.executable, str(PROGRAM), url, library, str(3 * len(names)), "5", *names]
        running[library] = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    while_running()
    printed = {library: process.communicate(timeout=TIMEOUT_S)[0] for library, process in running.items()}
    return {library: dict(json.loads(text.splitlines()[-1])) for library, text in printed.items()}


def test_a_decode_server_dies(tmp_path: Path) -> None:
    arguments = (*PARSERS, *COMPACT)
    wanted = {name: Server(role, P2P, arguments) for name, role in ROLES.items()}
    with vllm_servers(tmp_path, **wanted) as servers:
        prefill, *decode = servers.values()
        with router_before_all(tmp_path, [prefill], decode, "--disaggregate-from=0") as router:
            with kvferry("router", f"--decode-url={decode[0].url}", log=tmp_path / "alone.log") as alone:
                expected = calls(alone.url, tmp_path)

            def kill_one() -> None:
                until(lambda: decode[1].metric("vllm:num_requests_running") > 1, timeout_s=60)
                kill(decode[1])

            results = calls(router.url, tmp_path, kill_one)
            for library, by_name in expected.items():
                errors = [name for name, result in by_name.items() if "Error: " in str(result)[:60]]
                assert not errors, (errors, by_name[errors[0]])
                assert results[library] == by_name
            assert router.metric("kvferry_router_hand_offs_total") > 0
            assert router.metric("kvferry_router_continuations_total", outcome="done") > 0
            assert router.metric("kvferry_router_continuations_total", outcome="failed") == 0
