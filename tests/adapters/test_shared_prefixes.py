"""Many at once that share prefixes: blocks that vLLM counts as cached are still computed, by another request of the
same step. What is handed off is what was computed, and never what lay there before.

`KVFERRY_SHARED_ANSWERS` says how many answers each test asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from adapters.conftest import VllmMaker, connector
from support.shared_prefixes import num_answers, waves
from support.vllm_process import VllmProcess, early_ticket

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(1800)]

P2P = "KvferryP2pConnector"
NUM_TOKENS = 6
LONGEST = 2400
MANY = {"max_num_batched_tokens": 8192, "max_num_seqs": 32}


@dataclass
class Started:
    """A producer, a consumer, and a vLLM without a connector; `num` prompts have been handed off."""

    prefill: VllmProcess
    decode: VllmProcess
    plain: VllmProcess
    address: dict[str, Any]
    num: int = 0

    def name(self) -> str:
        self.num += 1
        return f"shared-{self.num}"


@pytest.fixture(scope="module")
def started(start_vllm: VllmMaker) -> Started:
    prefill = start_vllm(connector(P2P, "kv_producer"), **MANY)
    decode = start_vllm(connector(P2P, "kv_consumer"), **MANY)
    plain = start_vllm(None, **MANY)
    address = early_ticket(prefill.ready(), decode.ready(), "address")
    return Started(prefill, decode, plain.ready(), address)


def test_concurrent(started: Started) -> None:
    wrong = []
    for wave in waves(num_answers(120), LONGEST, seed=1):
        tickets = [started.address | {"transfer_id": started.name()} for _ in wave]
        decodes = [started.decode.add(prompt, NUM_TOKENS, ticket) for prompt, ticket in zip(wave, tickets, strict=True)]
        params = [{"do_remote_decode": True, "transfer_id": ticket["transfer_id"]} for ticket in tickets]
        started.prefill.ask("freeze")
        prefills = [started.prefill.add(prompt, 1, one) for prompt, one in zip(wave, params, strict=True)]
        started.prefill.ask("thaw")
        for name in prefills:
            started.prefill.wait(name)
        wrong += differing(started, wave, decodes)
    assert not wrong


def differing(started: Started, wave: Sequence[Sequence[int]], decodes: Sequence[str]) -> list[str]:
    plain = [started.plain.add(prompt, NUM_TOKENS) for prompt in wave]
    found = [started.decode.wait(name).token_ids for name in decodes]
    expected = [started.plain.wait(name).token_ids for name in plain]
    return [f"{a} {b}" for a, b in zip(found, expected, strict=True) if a != b]
