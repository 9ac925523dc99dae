"""vLLM's MultiConnector of its own NixlConnector and a cache of kvferry's, in either order."""

from __future__ import annotations

import importlib.util
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

METRIC = "vllm:kvferry_offloading_connector"
NIXL: dict[str, Any] = {"kv_connector": "NixlConnector"}
HOST: dict[str, Any] = {
    "kv_connector": "KvferryOffloadingConnector",
    "kv_connector_extra_config": {"cpu_bytes_to_use": "64MiB", "eviction_policy": "s3fifo"},
}


def several(*children: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(children)}}


def loads(server: KvferryProcess) -> float:
    """Loads from the host tier. vLLM tells a connector's figures with a step, so it is given one to make."""
    held(server.url)
    return server.metric(METRIC + "_loads_total")


def test_either_order_starts_and_answers_exactly(tmp_path: Path, reference: Reference) -> None:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed; scripts/install_vllm_cpu.sh says how")
    # Without a prefix cache of vLLM's, what is asked again comes from the host tier, or else from P.
    pair = {
        "prefill": Server("prefill", several(NIXL, HOST), ("--no-enable-prefix-caching",)),
        "decode": Server("decode", several(HOST, NIXL), ("--no-enable-prefix-caching",)),
    }
    with vllm_servers(tmp_path, **pair) as servers:
        prefill, decode = servers["prefill"], servers["decode"]
        with router_before(tmp_path, prefill, decode) as router:
            assert answers(router.url, reference.prompts[:40]) == reference.tokens[:40]
            assert decode.metric("vllm:nixl_bytes_transferred_sum") > 0
            before = num_received(decode), loads(decode)
            assert answers(router.url, reference.prompts[:20]) == reference.tokens[:20]
        for server in (prefill, decode):
            until(lambda: loads(server) > 0, timeout_s=60, context=server.log)  # noqa: B023
        assert num_received(decode) > before[0]
        require_nothing_kept(prefill, decode)
