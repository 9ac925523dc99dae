"""Small KV caches, other layouts, several connectors: one engine that hands off to itself, or to one unlike it."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.conftest import PromptMaker, VllmMaker, connector
from support.vllm_process import VllmFailed, VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(240)]

P2P = "KvferryP2pConnector"
BLOCK_BYTES = 49152


@pytest.fixture(scope="module")
def plain(start_vllm: VllmMaker) -> VllmProcess:
    return start_vllm(None).ready()


def test_preempted_prefill_and_decode(start_vllm: VllmMaker, plain: VllmProcess, prompt_of: PromptMaker) -> None:
    """Answers grow until there is no block left: prefills that were half announced begin again, and so do answers
    whose KV came from elsewhere."""
    tight = start_vllm(
        connector(P2P),
        kv_cache_memory_bytes=48 * BLOCK_BYTES,
        max_num_batched_tokens=64,
        max_model_len=1024,
        enable_prefix_caching=False,
    ).ready()
    long_prompt = prompt_of(500)
    expected = plain.run(long_prompt, 8).token_ids
    growing = [prompt_of(32) for _ in range(6)]
    answers = [plain.run(prompt, 250).token_ids for prompt in growing]
    tickets = [tight.prefill(prompt, f"grow-{index}") for index, prompt in enumerate(growing)]
    tight.ask("freeze")
    names = [tight.add(prompt, 250, ticket) for prompt, ticket in zip(growing, tickets, strict=True)]
    while tight.state().figures["taken"] < len(growing):
        tight.ask("steps", count=1)
    tight.ask("steps", count=122)  # a few tokens more, and each needs another block
    prefill = tight.add(long_prompt, 1, {"do_remote_decode": True, "transfer_id": "long"})
    tight.ask("thaw")
    assert [tight.wait(name).token_ids for name in names] == answers
    ticket = tight.wait(prefill).kv_transfer_params
    assert tight.state().preemptions > 0, "nothing was preempted"
    assert tight.run(long_prompt, 8, ticket).token_ids == expected
    assert tight.settled().figures["taken"] == len(growing) + 1


def test_another_block_size_is_refused(start_vllm: VllmMaker, plain: VllmProcess, prompt_of: PromptMaker) -> None:
    prefill = start_vllm(connector(P2P, "kv_producer"))
    decode = start_vllm(connector(P2P, "kv_consumer"), block_size=64)
    prompt = prompt_of(100)
    ticket = prefill.ready().prefill(prompt, "mismatch")
    assert decode.ready().run(prompt, 8, ticket).token_ids == plain.run(prompt, 8).token_ids
    state = decode.settled()
    assert state.figures["lost_LayoutMismatch"] == 1
    assert any("block_size" in line for line in state.log), state.log
    prefill.settled()


def test_child_of_multi_connector(
    start_vllm: VllmMaker, plain: VllmProcess, prompt_of: PromptMaker, tmp_path: Path
) -> None:
    """vLLM's own MultiConnector with two of ours: one hands off, the other only keeps."""
    store = connector("KvferrySharedStorageConnector", shared_storage_path=str(tmp_path), hand_off=False)
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [connector(P2P), store]},
    }
    process = start_vllm(multi).ready()
    prompt = prompt_of(300)
    expected = plain.run(prompt, 8).token_ids
    ticket = process.prefill(prompt, "multi")
    assert process.run(prompt, 8, ticket).token_ids == expected
    state = process.settled()
    assert state.figures["taken"] == 1
    assert process.run(prompt, 8).token_ids == expected
    metrics = process.ask("metrics")
    assert metrics["vllm:kvferry_p2p_connector_taken"] == 1
    assert metrics["vllm:kvferry_shared_storage_connector_num_loading"] == 0
    assert any(tmp_path.rglob("*")), "the second connector kept nothing"
    assert not process.ask("reset_connector_cache"), "what the second keeps is not forgotten"


@pytest.mark.full
def test_several_ranks(start_vllm: VllmMaker, plain: VllmProcess, prompt_of: PromptMaker) -> None:
    """Each rank fetches from its like: vLLM's pages are only moved whole."""
    process = start_vllm(connector(P2P), tensor_parallel_size=2, enable_prefix_caching=False).ready()
    for num_tokens in (20, 700):
        prompt = prompt_of(num_tokens)
        ticket = process.prefill(prompt, f"ranks-{num_tokens}")
        assert len(ticket["remote_ranks"]) == 2
        assert process.run(prompt, 8, ticket).token_ids == plain.run(prompt, 8).token_ids
        process.settled()
    assert process.ask("metrics")["vllm:kvferry_p2p_connector_taken"] == 4
    left = process.add(prompt_of(300), 8, process.prefill(prompt_of(300), "left-by-ranks"))
    process.ask("abort", name=left)
    process.settled()


def test_two_cannot_both_hand_off(start_vllm: VllmMaker, tmp_path: Path) -> None:
    children = [connector(P2P), connector("KvferrySharedStorageConnector", shared_storage_path=str(tmp_path))]
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    with pytest.raises(VllmFailed, match='"hand_off": false'):
        start_vllm(multi).ready()


def test_unknown_key_is_named(start_vllm: VllmMaker) -> None:
    with pytest.raises(VllmFailed, match="lease_z is not a known key; did you mean 'lease_s'"):
        start_vllm(connector(P2P, lease_z=3)).ready()


def test_unknown_connector_names_the_nearest(start_vllm: VllmMaker) -> None:
    wrong = connector("KvferryP2Connector") | {"kv_connector_module_path": "kvferry.adapters.vllm"}
    with pytest.raises(VllmFailed, match="did you mean 'KvferryP2pConnector'"):
        start_vllm(wrong).ready()
