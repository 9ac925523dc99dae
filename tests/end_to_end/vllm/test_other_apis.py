"""Messages and Responses in front of real vLLM servers: translated chats over both legs, equal to vLLM's chats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support import anthropic_suite, responses_suite
from support.processes import KvferryProcess
from support.vllm_servers import Server, require_nothing_kept, router_before, vllm_servers

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(900)]

P2P = {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"lease_s": 8, "timeout_s": 6}}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvferryProcess]:
    folder = tmp_path_factory.mktemp("apis")
    with vllm_servers(folder, prefill=Server("prefill", P2P), decode=Server("decode", P2P)) as servers:
        with router_before(folder, servers["prefill"], servers["decode"], "--disaggregate-from=0") as started:
            yield started
        require_nothing_kept(*servers.values())


@pytest.mark.parametrize("check", anthropic_suite.OF_OTHER_ENGINES, ids=lambda check: check.__name__)
def test_messages(check: Any, router: KvferryProcess) -> None:
    from anthropic import Anthropic
    from openai import OpenAI

    before = router.metric("kvferry_router_hand_offs_total", kind="sequential")
    openai = OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=60)
    check(Anthropic(base_url=router.url, api_key="none", max_retries=0, timeout=60), openai, "m")
    assert router.metric("kvferry_router_hand_offs_total", kind="sequential") > before


@pytest.mark.parametrize("check", responses_suite.OF_OTHER_ENGINES, ids=lambda check: check.__name__)
def test_responses(check: Any, router: KvferryProcess) -> None:
    from openai import OpenAI

    check(OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=60), "m")
