"""In bfloat16, what users run, a hand-off changes no bit: every medium, cached prefixes on both sides, two ranks.

Both sides compute alike here: the same kernels, and as many ranks. Ranks of other numbers add partial sums in another
order, so between them bfloat16 keeps no bits, and float32 is what hand-offs of other shape are compared in.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.messages.hand_off import Consume, Produce, parse_hand_off
from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.engine.ops.native import library
from kvferry.testing.stepping import IdleWait
from support.engines import GREEDY, SEEDED, Answer, random_prompts, run_prompts, run_requests
from support.libraries import require_library
from support.pairs import pair_of

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler here: rows depend on their batch")

NUM_PROMPTS = 12
MEDIA: dict[str, tuple[str, dict[str, Any]]] = {
    "shm": ("P2pConnector", {"transport": "shm"}),
    "tcp": ("P2pConnector", {"transport": "tcp"}),
    "gloo": ("P2pConnector", {"transport": "gloo"}),
    "valkey": ("KVStoreConnector", {}),
    "nixl": ("NixlConnector", {}),
    "mooncake": ("MooncakeConnector", {}),
    "shared-storage": ("SharedStorageConnector", {}),
    "shared-storage-layerwise": ("SharedStorageConnector", {"load": "layerwise"}),
}


@pytest.fixture(scope="module")
def alone(model_maker: Any) -> dict[str, Any]:
    """What one engine answers, a prompt at a time; by architecture, once asked for."""
    found: dict[str, Any] = {}

    def answers(architecture: str) -> tuple[Path, list[list[int]], dict[str, list[Answer]]]:
        if architecture not in found:
            model = model_maker(architecture)
            settings = {"dtype": "bfloat16", "device": "cpu", "kv_cache_memory": "32MiB", "block_size": 8}
            engine = Engine(EngineConfig(model=str(model), max_num_seqs=1, prefix_caching=False, **settings))
            prompts = random_prompts(NUM_PROMPTS, engine.model.vocab_size, longest=80, block_size=8, seed=12)
            expected = {"greedy": run_prompts(engine, prompts, GREEDY), "seeded": run_prompts(engine, prompts, SEEDED)}
            engine.close()
            found[architecture] = (model, prompts, expected)
        return found[architecture]

    return {"of": answers}


def require_equal(expected: Sequence[Answer], found: Sequence[Answer]) -> None:
    """The same tokens and, to the bit, the same log-probabilities."""
    wrong = [
        number for number, (one, other) in enumerate(zip(expected, found, strict=True)) if one.tokens != other.tokens
    ]
    assert not wrong, f"{len(wrong)} of {len(found)} answers differ"
    assert [answer.logprobs for answer in found] == [answer.logprobs for answer in expected]


@pytest.mark.diagonal
@pytest.mark.parametrize("form", ["sequential", "concurrent"])
@pytest.mark.parametrize("medium", MEDIA)
def test_a_hand_off_changes_no_bit(
    medium: str, form: str, alone: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    require_hand_off_exact("llama", medium, form, alone, request, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["gemma3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("medium", ["shm", "tcp", "shared-storage-layerwise"])
def test_nor_does_it_in_other_families(
    medium: str, architecture: str, alone: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    require_hand_off_exact(architecture, medium, "concurrent", alone, request, tmp_path)


def require_hand_off_exact(
    architecture: str,
    medium: str,
    form: str,
    alone: dict[str, Any],
    request: pytest.FixtureRequest,
    folder: Path,
) -> None:
    connector, extra = MEDIA[medium]
    if medium in ("gloo", "nixl", "mooncake"):
        require_library(medium)
    if medium == "valkey":
        extra = {**extra, "store": request.getfixturevalue("valkey_url")}
    if connector == "SharedStorageConnector":
        extra = {**extra, "shared_storage_path": str(folder)}
    model, prompts, expected = alone["of"](architecture)
    prefill = {"block_size": 8, "max_num_batched_tokens": 24, "dtype": "bfloat16"}
    decode = {"block_size": 8, "dtype": "bfloat16"}
    with pair_of(model, connector, extra=extra, prefill=prefill, decode=decode) as pair:
        require_equal(expected["greedy"], pair.run(prompts, GREEDY, form))
        # Once more, over cached prefixes on both sides.
        require_equal(expected["seeded"], pair.run(prompts, SEEDED, form))
        pair.settle()
        statistics = pair.decode.statistics().external_kv
        assert statistics.num_load_failures == {}
        assert statistics.num_external_hits > 0
        assert pair.prefill.statistics().scheduler.num_prefix_hits > 0
        assert pair.decode.statistics().scheduler.num_prefix_hits > 0


@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.full)])
def test_nor_does_one_between_instances_of_two_ranks(transport: str, model_maker: Any) -> None:
    """One instance is both, since a process is a rank of one instance only; without a prefix cache it fetches all."""
    engine = Engine(
        EngineConfig(
            model=str(model_maker("llama")),
            dtype="bfloat16",
            device="cpu",
            block_size=8,
            kv_cache_memory="16MiB",
            max_num_batched_tokens=24,
            max_num_seqs=16,
            prefix_caching=False,
            tensor_parallel_size=2,
        ),
        KVTransferConfig(
            kv_connector="P2pConnector", kv_role="kv_both", kv_connector_extra_config={"transport": transport}
        ),
        auth_token="test",
    )
    try:
        num_prompts = NUM_PROMPTS // 2  # two ranks take ten times as long for a token
        prompts = random_prompts(num_prompts, engine.model.vocab_size, longest=80, block_size=8, seed=12)
        for sampling in (GREEDY, SEEDED):
            expected = [run_prompts(engine, [prompt], sampling)[0] for prompt in prompts]
            require_equal(expected, handed_over(engine, prompts, sampling))
        statistics = engine.statistics().external_kv
        assert statistics.num_load_failures == {}
        assert statistics.num_external_hits == 2 * sum(map(len, prompts))
    finally:
        engine.close()


def handed_over(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Answer]:
    """Each prompt prefilled for another instance, which is this one, all at once."""

    def asked(name: str, prompt: Sequence[int], hand_off: Produce | Consume) -> Request:
        return Request(request_id=name, prompt_token_ids=list(prompt), sampling=sampling, hand_off=hand_off)

    made = run_requests(
        engine, [asked(f"p{number}", prompt, Produce(f"t{number}")) for number, prompt in enumerate(prompts)]
    )
    decodes = []
    for number, prompt in enumerate(prompts):
        last = made[f"p{number}"].last
        assert last is not None
        hand_off = parse_hand_off(last.kv_transfer_params, f"d{number}")
        assert isinstance(hand_off, Consume)
        decodes.append(asked(f"d{number}", prompt, hand_off))
    found = run_requests(engine, decodes)
    rest = IdleWait(engine)
    while engine.scheduler.external_kv.statistics().num_held:
        engine.step()
        rest()
    engine.check()
    return [found[f"d{number}"] for number in range(len(prompts))]
