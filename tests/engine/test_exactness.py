"""The engine's tokens are transformers' tokens, whatever the batching, chunking, caching and preemption."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import ConfigError, UnsupportedModel
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from support.engines import GREEDY, SEEDED, generate_greedy, random_prompts, require_same, run_prompts

ARCHITECTURES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "gpt_oss",
    "deepseek_v3",
]


@contextmanager
def engine_of(model: Path, **settings: Any) -> Iterator[Engine]:
    defaults = {"dtype": "float32", "device": "cpu", "block_size": 8, "kv_cache_memory": "32MiB", "max_num_seqs": 16}
    engine = Engine(EngineConfig(model=str(model), **{**defaults, **settings}))
    try:
        yield engine
        engine.check()
    finally:
        engine.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_generate(architecture: str, model_maker: Any) -> None:
    model = model_maker(architecture)
    with engine_of(model, max_num_batched_tokens=40) as engine:
        prompts = random_prompts(12, engine.model.vocab_size, longest=100, block_size=8)
        found = run_prompts(engine, prompts, GREEDY)
    expected = generate_greedy(model, prompts, GREEDY.max_tokens)
    assert [answer.tokens for answer in found] == expected


@pytest.mark.parametrize(
    "sampling", [pytest.param(GREEDY, id="greedy", marks=pytest.mark.full), pytest.param(SEEDED, id="seeded")]
)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 37, "block_size": 16},
        {"block_size": 64},
        {"prefix_caching": False},
        {"max_num_seqs": 1},
    ],
    ids=lambda settings: "-".join(f"{key}={value}" for key, value in settings.items()),
)
def test_how_it_is_scheduled_changes_nothing(settings: dict[str, Any], sampling: Any, model_maker: Any) -> None:
    model = model_maker("llama")
    with engine_of(model, max_num_seqs=1, prefix_caching=False) as engine:
        prompts = random_prompts(40, engine.model.vocab_size, longest=90, block_size=8, seed=3)
        expected = run_prompts(engine, prompts, sampling)
    with engine_of(model, **settings) as engine:
        require_same(expected, run_prompts(engine, prompts, sampling))
        require_same(expected, run_prompts(engine, prompts, sampling))  # once more, over a warm prefix cache


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_preemption_changes_nothing(sampling: Any, model_maker: Any) -> None:
    model = model_maker("llama")
    with engine_of(model, max_num_seqs=1) as engine:
        prompts = random_prompts(24, engine.model.vocab_size, longest=60, block_size=8, seed=4)
        expected = run_prompts(engine, prompts, sampling)
        block_bytes = engine.layout.block_bytes
    with engine_of(model, kv_cache_memory=str(14 * block_bytes)) as engine:
        require_same(expected, run_prompts(engine, prompts, sampling))
        assert engine.statistics().scheduler.num_preemptions > 0


def test_prompt_logprobs_are_those_of_the_model(model_maker: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from kvferry.core.sampling import SamplingParams

    model = model_maker("llama")
    prompt = list(range(5, 60))
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=3)
    with engine_of(model, max_num_batched_tokens=16) as engine:
        [answer] = run_prompts(engine, [prompt], sampling)
    assert answer.last is not None
    assert answer.last.prompt_logprobs is not None
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert answer.last.prompt_logprobs[0] is None
    for position in range(1, len(prompt)):
        found = answer.last.prompt_logprobs[position]
        assert found is not None
        assert found.token_id == prompt[position]
        assert abs(found.logprob - float(expected[position - 1, prompt[position]])) < 1e-4
        assert set(found.top) == set(expected[position - 1].topk(3).indices.tolist())


@pytest.mark.parametrize(
    ("architecture", "why"), [("falcon", "attention interface"), ("llama4_text", "chunked_attention")]
)
def test_what_cannot_run_exactly_is_refused(architecture: str, why: str, model_maker: Any) -> None:
    with pytest.raises(UnsupportedModel, match=why), engine_of(model_maker(architecture)):
        pass


def test_a_wrong_attention_is_caught_by_the_self_check(model_maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.engine.model import attention

    real = attention.paged_attention

    def without_window(*arguments: Any, **options: Any) -> Any:
        return real(*arguments, **{**options, "window": None})

    monkeypatch.setattr(attention, "paged_attention", without_window)
    with (
        pytest.raises(UnsupportedModel, match="does not give the same logits"),
        engine_of(model_maker("mistral", sliding_window=6)),
    ):
        pass


def test_a_missing_model_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match="there is no directory '/nowhere/model'"), engine_of(Path("/nowhere/model")):
        pass


def test_a_sharded_checkpoint_loads(model_maker: Any) -> None:
    model = model_maker("llama", max_shard_size="100KB")
    assert len(list(model.glob("*.safetensors"))) > 1
    with engine_of(model) as engine:
        assert run_prompts(engine, [[1, 2, 3]], GREEDY)[0].tokens


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.full)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rounding_is_not_taken_for_a_wrong_attention(architecture: str, dtype: str, model_maker: Any) -> None:
    with engine_of(model_maker(architecture), dtype=dtype) as engine:
        assert len(run_prompts(engine, [[1, 2, 3]], GREEDY)[0].tokens) == GREEDY.max_tokens
