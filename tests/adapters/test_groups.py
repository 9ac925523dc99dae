"""Models that mix full attention and sliding windows, under vLLM's hybrid KV cache manager: several block tables a
request, and no blocks before a window. The tokens are those of one plain vLLM that runs it too."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from adapters.conftest import WINDOW, ModelMaker, PromptMaker, VllmMaker, connector
from support.vllm_process import VllmFailed, VllmProcess, early_ticket

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(300)]

P2P = "KvferryP2pConnector"
BLOCK = 32
EDGES = (WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + BLOCK - 1, WINDOW + BLOCK, WINDOW + BLOCK + 1)
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, *EDGES, *range(WINDOW + 13, WINDOW + 19), 333, 10 * WINDOW)
NUM_TOKENS = 12
CHUNKS = {"max_num_batched_tokens": 64, "max_num_seqs": 32}
BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 32 * 4
"""Two layer positions, K and V, two heads, 32 numbers of 4 bytes."""


@pytest.fixture(scope="module")
def model(make_model: ModelMaker) -> Path:
    return make_model("gemma3")


@dataclass
class Pair:
    prefill: VllmProcess
    decode: VllmProcess

    def settled(self) -> None:
        self.prefill.settled()
        self.decode.settled()


@pytest.fixture(scope="module")
def plain(start_vllm: VllmMaker) -> VllmProcess:
    process = start_vllm(None).ready()
    assert process.ask("num_groups") == 4
    return process


@pytest.fixture(
    scope="module",
    params=["shm, prefix cache", *(pytest.param(name, marks=pytest.mark.full) for name in ("tcp, none", "nixl, none"))],
)
def pair(request: pytest.FixtureRequest, start_vllm: VllmMaker, plain: VllmProcess) -> Pair:
    medium, _, cache = request.param.partition(", ")
    caching = {"enable_prefix_caching": cache != "none"}
    prefill = start_vllm(connector(P2P, "kv_producer", transport=medium), **CHUNKS, **caching)
    decode = start_vllm(connector(P2P, "kv_consumer", transport=medium), **CHUNKS, **caching)
    try:
        started = Pair(prefill.ready(), decode.ready())
    except VllmFailed as error:
        if "MissingDependency" in str(error):
            pytest.skip(f"{medium} cannot run here")
        raise
    assert started.prefill.ask("num_groups") == started.decode.ask("num_groups") == 4
    return started


def taken(process: VllmProcess) -> float:
    """Parts that came complete."""
    return process.state().figures["taken"]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_tokens_are_those_of_plain_vllm(
    pair: Pair, plain: VllmProcess, prompt_of: PromptMaker, num_tokens: int
) -> None:
    prompt = prompt_of(num_tokens)
    expected = plain.run(prompt, NUM_TOKENS).token_ids
    before = taken(pair.decode)
    ticket = pair.prefill.prefill(prompt, f"length-{num_tokens}")
    assert ticket["prefill_result"]["first_token"] == expected[0]
    assert pair.decode.run(prompt, NUM_TOKENS, ticket).token_ids == expected
    assert taken(pair.decode) == before + 4
    pair.settled()


def test_sixteen_at_once(pair: Pair, plain: VllmProcess, prompt_of: PromptMaker) -> None:
    """Answers that go on for more than a window."""
    prompts = [prompt_of(5 + 43 * index) for index in range(16)]
    plain_names = [plain.add(prompt, 100) for prompt in prompts]
    before = taken(pair.decode)
    params = [{"do_remote_decode": True, "transfer_id": f"many-{index}"} for index in range(16)]
    prefills = [pair.prefill.add(prompt, 1, one) for prompt, one in zip(prompts, params, strict=True)]
    tickets = [pair.prefill.wait(name).kv_transfer_params for name in prefills]
    decodes = [pair.decode.add(prompt, 100, ticket) for prompt, ticket in zip(prompts, tickets, strict=True)]
    answers = [pair.decode.wait(name).token_ids for name in decodes]
    assert answers == [plain.wait(name).token_ids for name in plain_names]
    assert taken(pair.decode) == before + 4 * 16
    pair.settled()


def test_d_asks_before_p_has_begun(pair: Pair, plain: VllmProcess, prompt_of: PromptMaker) -> None:
    """With nothing but P's address."""
    prompt = prompt_of(333)
    expected = plain.run(prompt, NUM_TOKENS).token_ids
    early = early_ticket(pair.prefill, pair.decode, "early")
    before = taken(pair.decode)
    answer = pair.decode.add(prompt, NUM_TOKENS, early)
    pair.prefill.prefill(prompt, "early")
    assert pair.decode.wait(answer).token_ids == expected
    assert taken(pair.decode) == before + 4
    pair.settled()


def test_prompts_that_begin_alike(pair: Pair, plain: VllmProcess, prompt_of: PromptMaker) -> None:
    """What they share is in the prefix caches, or, of a window, only where a prompt ended."""
    common = prompt_of(400)
    source = random.Random("tails")
    for index, shared in enumerate((400, 400, 300, 120, 399, 400, 96)):
        prompt = common[:shared] + [source.randrange(3, 4000) for _ in range(index * 37)]
        expected = plain.run(prompt, NUM_TOKENS).token_ids
        ticket = pair.prefill.prefill(prompt, f"alike-{index}")
        assert pair.decode.run(prompt, NUM_TOKENS, ticket).token_ids == expected
        pair.settled()


def test_a_prefill_that_goes_on(pair: Pair, plain: VllmProcess, prompt_of: PromptMaker) -> None:
    """P's own answer is longer than a window, so it has given back all that D needs of the windows."""
    prompt = prompt_of(300)
    expected = plain.run(prompt, 200).token_ids
    answer = pair.prefill.run(prompt, 200, {"do_remote_decode": True, "transfer_id": "goes-on"})
    assert answer.token_ids == expected
    assert pair.decode.run(prompt, 200, answer.kv_transfer_params).token_ids == expected
    pair.settled()


def test_the_beginning_of_a_prompt(pair: Pair, plain: VllmProcess, prompt_of: PromptMaker) -> None:
    """The ticket is of fewer tokens than D's prompt has: windows are where the ticket's tokens end."""
    for index, num_tokens in enumerate((33, 150, WINDOW + BLOCK, 399)):
        prompt = prompt_of(400)
        before = taken(pair.decode)
        ticket = pair.prefill.prefill(prompt[:num_tokens], f"beginning-{index}")
        expected = plain.run(prompt, NUM_TOKENS).token_ids
        assert pair.decode.run(prompt, NUM_TOKENS, ticket).token_ids == expected
        assert taken(pair.decode) == before + 4
        pair.settled()


def test_another_request_has_the_transfer_id(pair: Pair, plain: VllmProcess, prompt_of: PromptMaker) -> None:
    """Whatever of a hand-off cannot be made is not handed off, and what was is given back."""
    from kvferry.adapters.vllm.sections import _transfer_id_of

    prompt = prompt_of(200)
    pair.prefill.ask("freeze")
    first = pair.prefill.add(prompt, 1, {"do_remote_decode": True, "transfer_id": _transfer_id_of("t", 1)})
    second = pair.prefill.add(prompt, 1, {"do_remote_decode": True, "transfer_id": "t"})
    pair.prefill.ask("thaw")
    ticket = pair.prefill.wait(first).kv_transfer_params
    assert pair.prefill.wait(second).kv_transfer_params is None
    expected = plain.run(prompt, NUM_TOKENS).token_ids
    assert pair.decode.run(prompt, NUM_TOKENS, ticket).token_ids == expected
    lost = {"do_remote_prefill": True, "transfer_id": "t"} | {
        key: value for key, value in (ticket or {}).items() if key in ("remote_host", "remote_port", "remote_engine_id")
    }
    pair.decode.ask("refuse", params=lost)
    pair.settled()


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.full)])
def test_preempted_prefill_and_decode(
    start_vllm: VllmMaker, plain: VllmProcess, prompt_of: PromptMaker, *, caching: bool
) -> None:
    """Answers grow until there is no block left, on an engine that hands off to itself."""
    tight = start_vllm(
        connector(P2P),
        kv_cache_memory_bytes=90 * BLOCK_BYTES,
        max_num_batched_tokens=64,
        max_model_len=1024,
        enable_prefix_caching=caching,
    ).ready()
    long_prompt = prompt_of(500)
    expected = plain.run(long_prompt, 8).token_ids
    growing = [prompt_of(40) for _ in range(6)]
    answers = [plain.run(prompt, 300).token_ids for prompt in growing]
    tickets = [tight.prefill(prompt, f"grow-{index}") for index, prompt in enumerate(growing)]
    tight.ask("freeze")
    names = [tight.add(prompt, 300, ticket) for prompt, ticket in zip(growing, tickets, strict=True)]
    while taken(tight) < 4 * len(growing):
        tight.ask("steps", count=1)
    tight.ask("steps", count=150)
    prefill = tight.add(long_prompt, 1, {"do_remote_decode": True, "transfer_id": "long"})
    tight.ask("thaw")
    assert [tight.wait(name).token_ids for name in names] == answers
    ticket = tight.wait(prefill).kv_transfer_params
    assert tight.state().preemptions > 0, "nothing was preempted"
    assert tight.run(long_prompt, 8, ticket).token_ids == expected
    assert tight.settled().figures["taken"] == 4 * (len(growing) + 1)


def test_with_and_without_groups_refuse_each_other(
    start_vllm: VllmMaker, plain: VllmProcess, prompt_of: PromptMaker
) -> None:
    prefill = start_vllm(connector(P2P, "kv_producer"))
    decode = start_vllm(connector(P2P, "kv_consumer"), disable_hybrid_kv_cache_manager=True)
    prompt = prompt_of(200)
    ticket = prefill.ready().prefill(prompt, "mismatch")
    assert decode.ready().ask("num_groups") == 1
    assert decode.run(prompt, NUM_TOKENS, ticket).token_ids == plain.run(prompt, NUM_TOKENS).token_ids
    state = decode.settled()
    assert state.figures["lost_LayoutMismatch"] == 1
    assert any("4 groups" in line for line in state.log), state.log
    prefill.settled()


@pytest.mark.full
def test_several_ranks(start_vllm: VllmMaker, plain: VllmProcess, prompt_of: PromptMaker) -> None:
    process = start_vllm(connector(P2P), tensor_parallel_size=2, enable_prefix_caching=False).ready()
    for num_tokens in (20, 500):
        prompt = prompt_of(num_tokens)
        ticket = process.prefill(prompt, f"ranks-{num_tokens}")
        assert process.run(prompt, NUM_TOKENS, ticket).token_ids == plain.run(prompt, NUM_TOKENS).token_ids
        process.settled()


def test_a_store_has_one_group(
    start_vllm: VllmMaker, plain: VllmProcess, prompt_of: PromptMaker, tmp_path: Path
) -> None:
    """Blocks before a window are not there to be kept, so vLLM is told to keep all."""
    process = start_vllm(connector("KvferrySharedStorageConnector", shared_storage_path=str(tmp_path))).ready()
    assert process.ask("num_groups") == 1
    prompt = prompt_of(300)
    assert process.run(prompt, NUM_TOKENS).token_ids == plain.run(prompt, NUM_TOKENS).token_ids
    process.settled()


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_other_families(make_model: ModelMaker, prompt_of: PromptMaker, architecture: str) -> None:
    folder = make_model(architecture)
    plain, process = VllmProcess(folder), VllmProcess(folder, connector(P2P), **CHUNKS)
    try:
        try:
            plain.ready()
        except VllmFailed as error:
            pytest.skip(f"this vLLM does not run it: {str(error).splitlines()[-1]}")
        assert process.ready().ask("num_groups") == 2
        for num_tokens in (40, WINDOW + BLOCK - 1, 333):
            prompt = prompt_of(num_tokens)
            ticket = process.prefill(prompt, f"family-{num_tokens}")
            assert process.run(prompt, 50, ticket).token_ids == plain.run(prompt, 50).token_ids
        assert process.settled().figures["taken"] == 6
    finally:
        plain.close()
        process.close()
