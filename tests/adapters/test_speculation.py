"""Speculative decoding with a draft model: its KV is handed off too, so that D guesses as well as P would."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.conftest import PromptMaker, VllmMaker, connector
from support.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(240)]

P2P = "KvferryP2pConnector"
NUM_GUESSES = 3
NUM_TOKENS = 41


def drafts(model: Path) -> dict[str, dict[str, object]]:
    """The model is its own draft model, so that every guess is right, if it is made from the right KV."""
    return {"speculative_config": {"method": "draft_model", "model": str(model), "num_speculative_tokens": NUM_GUESSES}}


@pytest.fixture(scope="module")
def plain(start_vllm: VllmMaker) -> VllmProcess:
    return start_vllm(None).ready()


def test_the_draft_models_kv_comes_too(
    start_vllm: VllmMaker, plain: VllmProcess, model: Path, prompt_of: PromptMaker, tmp_path: Path
) -> None:
    """From P, and from a store."""
    store = connector("KvferrySharedStorageConnector", shared_storage_path=str(tmp_path), hand_off=False)
    multi = connector("MultiConnector", connectors=[connector(P2P), store])
    one, two = (start_vllm(multi, **drafts(model)) for _ in range(2))
    one.ready(), two.ready()
    for index, num_tokens in enumerate((1, 31, 32, 33, 300)):
        prompt = prompt_of(num_tokens)
        expected = plain.run(prompt, NUM_TOKENS).token_ids
        ticket = one.prefill(prompt, f"drafted-{index}")
        assert two.run(prompt, NUM_TOKENS, ticket).token_ids == expected
    assert two.settled().figures["taken"] == 5
    kept = prompt_of(200)
    one.run(kept, 1)
    one.settled()
    assert two.run(kept, NUM_TOKENS).token_ids == plain.run(kept, NUM_TOKENS).token_ids
    assert two.settled().figures["loads"] > 0
    # Almost: where a request ends, the last guesses are cut off.
    assert acceptance(two) > 0.9


def acceptance(process: VllmProcess) -> float:
    """The share of guesses that were right."""
    found = process.ask("speculation")
    return float(found["vllm:spec_decode_num_accepted_tokens"] / found["vllm:spec_decode_num_draft_tokens"])


def test_a_draft_model_on_one_side_only_is_refused(
    start_vllm: VllmMaker, plain: VllmProcess, model: Path, prompt_of: PromptMaker
) -> None:
    """The other's blocks lack its KV; D computes the prompt."""
    prefill, decode = (
        start_vllm(connector(P2P, "kv_producer")),
        start_vllm(connector(P2P, "kv_consumer"), **drafts(model)),
    )
    prompt = prompt_of(100)
    ticket = prefill.ready().prefill(prompt, "mismatch")
    assert decode.ready().run(prompt, NUM_TOKENS, ticket).token_ids == plain.run(prompt, NUM_TOKENS).token_ids
    assert decode.settled().figures["lost_LayoutMismatch"] == 1
    prefill.settled()
