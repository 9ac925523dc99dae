"""Real vLLM servers whose KV caches hold three of the longest requests, and concurrent hand-offs: D reserves blocks
only while there is room, so that nothing waits in a circle, and no hand-off is lost to a deadline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.vllm_servers import (
    Server,
    answers,
    prompts,
    require_nothing_kept,
    router_before_all,
    vllm_servers,
)

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(900)]

METRIC = "vllm:kvferry_p2p_connector"
TOKENS = 40
"""Of an answer: D's cache is full of those as well."""
TIGHT = (
    *("--max-model-len", "1024", "--num-gpu-blocks-override", "97", "--max-num-seqs", "64"),
    "--no-enable-prefix-caching",
)
P2P: dict[str, Any] = {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"timeout_s": 20}}


@pytest.mark.parametrize("num_pairs", [1, 2])
def test_no_hand_off_waits_for_its_deadline(num_pairs: int, tmp_path: Path) -> None:
    """A wait in a circle ends with `timeout_s`, and is counted as lost. The answers are those of D alone."""
    asked = prompts(count=120, longest=900, seed=9)
    wanted = {f"{role}-{n}": Server(role, P2P, TIGHT) for n in range(num_pairs) for role in ("prefill", "decode")}
    with vllm_servers(tmp_path, **wanted) as servers:
        prefills = [one for name, one in servers.items() if name.startswith("prefill")]
        decodes = [one for name, one in servers.items() if name.startswith("decode")]
        alone = answers(decodes[0].url, asked, max_tokens=TOKENS)
        with router_before_all(tmp_path, prefills, decodes, "--hand-off=concurrent") as router:
            assert answers(router.url, asked, at_once=40, max_tokens=TOKENS) == alone
            assert router.metric("kvferry_router_hand_offs_total", kind="concurrent") > len(asked) / 2
        lost = sum(one.metric(METRIC + "_lost_total") for one in decodes)
        taken = sum(one.metric(METRIC + "_taken_total") for one in decodes)
        assert (lost, taken) == (0, len(asked)), [one.log[-3000:] for one in decodes]
        require_nothing_kept(*servers.values())
