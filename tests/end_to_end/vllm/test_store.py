"""A store that one vLLM server fills is used by another, and by one that comes later."""

from __future__ import annotations

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

METRIC = "vllm:kvferry_shared_storage_connector"


def storage(folder: Path) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder / "kv")}
    return {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}


def waiting_to_be_written(server: KvferryProcess) -> float:
    """Bytes on their way to the files. vLLM tells a connector's figures with a step, so it is given one to make."""
    held(server.url)
    return server.metric(METRIC + "_writer_waiting_bytes")


def test_a_store_between_servers_and_over_a_restart(tmp_path: Path, reference: Reference) -> None:
    transfer = storage(tmp_path)
    pair = {"prefill": Server("prefill", transfer), "decode": Server("decode", transfer)}
    with vllm_servers(tmp_path, **pair) as servers:
        prefill, decode = servers["prefill"], servers["decode"]
        with router_before(tmp_path, prefill, decode) as router:
            assert answers(router.url, reference.prompts) == reference.tokens
        assert num_received(decode) > reference.num_prompt_tokens / 3
        until(lambda: waiting_to_be_written(prefill) == 0, timeout_s=60, context=prefill.log)
        require_nothing_kept(prefill, decode)
    with vllm_servers(tmp_path, later=Server("decode", transfer)) as servers:
        later = servers["later"]
        assert answers(later.url, reference.prompts) == reference.tokens
        assert num_received(later) > reference.num_prompt_tokens / 3
        require_nothing_kept(later)
