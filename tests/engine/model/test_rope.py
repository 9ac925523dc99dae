"""A model with `longrope` answers each sequence as if it were alone, within the trained context and beyond."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvferry.core.errors import UnsupportedModel
from kvferry.core.sampling import SamplingParams
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.engine.model import rope
from support.engines import generate_greedy, run_prompts
from support.families import OPTIONS, TRAINED_CONTEXT, Case, make_model
from support.pairs import pair_of

PHI = [case for case in OPTIONS if case.family in ("phi3", "phimoe") and "longrope" in case.option]
SHORT_RUN = {"phi3 partial longrope, tied (Phi-4-mini)", "phimoe longrope (Phi-3.5-MoE)"}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LENGTHS = [*range(TRAINED_CONTEXT - 13, TRAINED_CONTEXT + 3), 3, 50, 61]
"""Prompts whose answers end before, at and after the border, begin just beyond it, and stay away from it."""


def _marked(case: Case) -> object:
    return pytest.param(case, id=case.name, marks=() if case.name in SHORT_RUN else pytest.mark.full)


@pytest.fixture(scope="module", params=map(_marked, PHI))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phi")
    make_model(request.param, folder)
    return folder


def prompts_of(lengths: list[int]) -> list[list[int]]:
    """They share as much as they can: what is short for one is the beginning of another that is long."""
    trunk = torch.randint(3, 500, (max(lengths),), generator=torch.Generator().manual_seed(2)).tolist()
    return [trunk[:length] for length in lengths]


@pytest.fixture(scope="module")
def generated(model: Path) -> list[list[int]]:
    """What `generate()` answers each of the prompts."""
    return generate_greedy(model, prompts_of(LENGTHS), GREEDY.max_tokens)


def engine_of(model: Path, **settings: Any) -> Engine:
    sizes = {"block_size": 4, "kv_cache_memory": "16MiB", "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return Engine(EngineConfig(model=str(model), dtype="float32", device="cpu", **(sizes | settings)))


@pytest.mark.parametrize(
    "chunk", [8, pytest.param(27, marks=pytest.mark.full), pytest.param(200, marks=pytest.mark.full)]
)
def test_nobodys_prompt_and_no_chunk_changes_an_answer(chunk: int, model: Path, generated: list[list[int]]) -> None:
    prompts = prompts_of(LENGTHS)
    engine = engine_of(model, max_num_batched_tokens=chunk)
    try:
        for _ in range(2):  # the second time from the prefix cache
            assert [answer.tokens for answer in run_prompts(engine, prompts, GREEDY)] == generated
        statistics = engine.statistics().scheduler
        assert statistics.num_prefix_hits > 0
        assert (statistics.num_context_recomputes, statistics.num_preemptions) == (
            2 * 11,
            0,
        )  # those of 22 to 32 tokens begin again once
        engine.check()
    finally:
        engine.close()


@pytest.mark.diagonal
@pytest.mark.parametrize("form", ["sequential", "concurrent"])
@pytest.mark.parametrize("connector", ["P2pConnector", pytest.param("SharedStorageConnector", marks=pytest.mark.full)])
def test_a_hand_off_across_the_border_is_computed_anew(
    connector: str, form: str, model: Path, generated: list[list[int]], tmp_path: Path
) -> None:
    prompts = prompts_of(LENGTHS)
    extra = {"transport": "shm"} if connector == "P2pConnector" else {"shared_storage_path": str(tmp_path)}
    sizes = {"block_size": 4, "max_num_batched_tokens": 24}
    with pair_of(model, connector, extra=extra, prefill=sizes, decode=sizes) as pair:
        for _ in range(2):
            assert [answer.tokens for answer in pair.run(prompts, GREEDY, form)] == generated
        pair.settle()
        assert pair.decode.statistics().external_kv.num_load_failures == {}


def test_the_cosines_of_one_are_those_of_it_alone(model: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    [rotary] = [part for part in module.modules() if type(part).__name__.endswith("RotaryEmbedding")]
    positions = torch.arange(TRAINED_CONTEXT + 4)
    x = torch.zeros(1)
    alone = [rotary(x, positions[None, :length]) for length in (5, TRAINED_CONTEXT + 4)]
    rope.install_rope(module, TRAINED_CONTEXT)
    again = rotary(x, positions[None, :5])
    assert torch.equal(again[0], alone[0][0])
    assert not torch.equal(alone[0][0], alone[1][0][:, :5])


def test_layers_of_different_borders_are_refused() -> None:
    borders = {"full_attention": 64, "sliding_attention": 32}
    settings = SimpleNamespace(
        model_type="odd",
        rope_parameters={
            kind: {"rope_type": "longrope", "original_max_position_embeddings": border}
            for kind, border in borders.items()
        },
    )
    settings.get_text_config = lambda: settings
    with pytest.raises(UnsupportedModel, match="different lengths"):
        rope.trained_context(settings)


def test_what_ends_at_the_models_last_position_is_within_what_was_trained(tmp_path: Path) -> None:
    """Dynamic scaling begins beyond `max_position_embeddings`, which no sequence here goes beyond."""
    case = Case("llama", "dynamic", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
                                     "max_position_embeddings": 40})  # fmt: skip
    make_model(case, tmp_path)
    prompts = prompts_of([30, 3, 28])
    engine = engine_of(tmp_path)
    try:
        found = [answer.tokens for answer in run_prompts(engine, prompts, GREEDY)]
    finally:
        engine.close()
    assert [len(tokens) for tokens in found] == [10, 12, 12]
    expected = generate_greedy(tmp_path, prompts, 12)
    assert [tokens[: len(ours)] for tokens, ours in zip(expected, found, strict=True)] == found
