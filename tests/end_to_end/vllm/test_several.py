"""The MultiConnector of docs/stores.md between real vLLM servers: a hand-off with a host tier behind it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from support.processes import KvferryProcess
from support.vllm_servers import (
    Reference,
    Server,
    answers,
    held,
    num_received,
    require_nothing_kept,
    router_before,
    vllm_servers,
)
from support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(900)]

DOCS = Path(__file__).parents[3] / "docs" / "stores.md"
METRIC = "vllm:kvferry_multi_connector"


def documented() -> dict[str, Any]:
    """The `--kv-transfer-config` of the command that has one, with less memory."""
    blocks = re.findall(r"```bash\n(kvferry serve MODEL .*?)```", DOCS.read_text(), re.DOTALL)
    [command] = [block for block in blocks if "MultiConnector" in block]
    words = shlex.split(command.replace("\\\n", " "))
    found: dict[str, Any] = json.loads(words[words.index("--kv-transfer-config") + 1].replace("2GiB", "64MiB"))
    return found


def num_stored(server: KvferryProcess) -> float:
    """Blocks in the host tier. vLLM tells a connector's figures with a step, so it is given one to make."""
    held(server.url)
    return server.metric(f"{METRIC}_1_stored_blocks_total")


def test_a_hand_off_with_a_host_tier(tmp_path: Path, reference: Reference) -> None:
    transfer = documented()
    pair = {"prefill": Server("prefill", transfer), "decode": Server("decode", transfer)}
    with vllm_servers(tmp_path, **pair) as servers:
        prefill, decode = servers["prefill"], servers["decode"]
        with router_before(tmp_path, prefill, decode) as router:
            assert answers(router.url, reference.prompts) == reference.tokens
        for server in (prefill, decode):
            until(lambda: num_stored(server) > 0, timeout_s=60, context=server.log)  # noqa: B023
        assert num_received(decode) > 0
        require_nothing_kept(prefill, decode)
