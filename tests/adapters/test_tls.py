"""KV between vLLM servers under TLS, and a server that lacks it."""

from __future__ import annotations

import pytest

from adapters.conftest import PromptMaker, VllmMaker, connector
from support.certificates import member_options

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(240)]


def test_hand_off_under_tls(start_vllm: VllmMaker, prompt_of: PromptMaker) -> None:
    """A consumer without TLS gets nothing, says why, and computes by itself."""
    tls = {"transport": "tcp", **member_options()}
    prefill = start_vllm(connector("KvferryP2pConnector", "kv_producer", lease_s=2, **tls))
    decode = start_vllm(connector("KvferryP2pConnector", "kv_consumer", **tls))
    bare = start_vllm(connector("KvferryP2pConnector", "kv_consumer", transport="tcp"))
    vllms = [vllm.ready() for vllm in (prefill, decode, bare)]
    for number, length in enumerate((33, 200, 777)):
        prompt = prompt_of(length)
        expected = bare.run(prompt, 8).token_ids
        ticket = prefill.prefill(prompt, f"tls-{number}")
        assert decode.run(prompt, 8, ticket).token_ids == expected
    assert decode.settled().figures["taken"] == 3
    ticket = prefill.prefill(prompt, "bare")
    assert bare.run(prompt, 8, ticket).token_ids == expected
    states = [vllm.settled() for vllm in vllms]
    assert states[-1].figures["taken"] == 0
    assert any("the listener wants TLS" in line for line in states[-1].log)
