"""A conversation between two real vLLMs: D keeps what it has for the next turn, and P fetches it from there."""

from __future__ import annotations

from typing import Any

import pytest

from adapters.conftest import PromptMaker, VllmMaker, connector
from support.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(240)]

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def both(start_vllm: VllmMaker) -> tuple[VllmProcess, VllmProcess]:
    """P and D. Neither finds a prefix of its own, so that each turn is fetched as a whole."""
    kv_transfer = connector("KvferryP2pConnector", bidirectional_kv_xfer=True)
    started = [start_vllm(kv_transfer, enable_prefix_caching=False) for _ in range(2)]
    prefill, decode = [process.ready() for process in started]
    return prefill, decode


def turn(
    prefill: VllmProcess, decode: VllmProcess, prompt: list[int], name: str, before: dict[str, Any] | None
) -> tuple[list[int], dict[str, Any]]:
    """The answer, and D's ticket for the next turn; `before` is that of the turn before."""
    params = {**(before or {"do_remote_decode": True}), "transfer_id": name}
    ticket = prefill.run(prompt, 1, params).kv_transfer_params
    assert ticket is not None
    answer = decode.run(prompt, NUM_TOKENS, ticket)
    assert answer.kv_transfer_params is not None
    assert answer.kv_transfer_params["do_remote_decode"]
    return answer.token_ids, answer.kv_transfer_params


def test_blocks_that_were_loaded_and_then_held_are_free_once_they_are_fetched(
    both: tuple[VllmProcess, VllmProcess], prompt_of: PromptMaker
) -> None:
    prefill, decode = both
    prompt, ticket = prompt_of(200), None
    for number in range(3):
        tokens, ticket = turn(prefill, decode, prompt, f"turn-{number}", ticket)
        assert tokens == prefill.run(prompt, NUM_TOKENS).token_ids
        prompt = [*prompt, *tokens, *prompt_of(40)]
    last = prefill.run(prompt, 1, {**ticket, "transfer_id": "last", "keep_for_next_turn": False}).kv_transfer_params
    decode.settled()
    decode.run(prompt, NUM_TOKENS, {**(last or {}), "keep_for_next_turn": False})
    assert prefill.settled().figures["fetches"] == 3
    decode.settled()
