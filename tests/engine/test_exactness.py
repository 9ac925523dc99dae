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
from kvferry.engine.ops.native import library
from support.engines import (
    ARCHITECTURES,
    GREEDY,
    SEEDED,
    Answer,
    generate_greedy,
    random_prompts,
    require_same,
    run_prompts,
)

SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED}
Alone = tuple[list[list[int]], dict[str, list[Answer]]]


@contextmanager
def engine_of(model: Path, **settings: Any) -> Iterator[Engine]:
    defaults = {"dtype": "float32", "device": "cpu", "block_size": 8, "kv_cache_memory": "32MiB", "max_num_seqs": 16}
    engine = Engine(EngineConfig(model=str(model), **{**defaults, **settings}))
    try:
        yield engine
        engine.check()
    finally:
        engine.close()


def require_batch_invariant(engine: Engine) -> None:
    """It has found that no row depends on those beside it, as is promised where there are kernels."""
    assert library() is None or engine.model.batch_dependence == ""


@pytest.fixture(scope="module")
def alone(model_maker: Any) -> Alone:
    """Prompts, and what each is answered by itself, without a prefix cache, by sampling."""
    with engine_of(model_maker("llama"), max_num_seqs=1, prefix_caching=False) as engine:
        prompts = random_prompts(24, engine.model.vocab_size, longest=90, block_size=8, seed=3)
        return prompts, {name: run_prompts(engine, prompts, sampling) for name, sampling in SAMPLINGS.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_generate(architecture: str, model_maker: Any) -> None:
    model = model_maker(architecture)
    with engine_of(model, max_num_batched_tokens=40) as engine:
        prompts = random_prompts(8, engine.model.vocab_size, longest=100, block_size=8)
        found = run_prompts(engine, prompts, GREEDY)
        require_batch_invariant(engine)
    expected = generate_greedy(model, prompts, GREEDY.max_tokens)
    assert [answer.tokens for answer in found] == expected


@pytest.mark.parametrize("sampling", [pytest.param("greedy", marks=pytest.mark.full), "seeded"])
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
def test_how_it_is_scheduled_changes_nothing(
    settings: dict[str, Any], sampling: str, alone: Alone, model_maker: Any
) -> None:
    prompts, answers = alone
    with engine_of(model_maker("llama"), **settings) as engine:
        for _ in range(2):  # the second time over a warm prefix cache
            require_same(answers[sampling], run_prompts(engine, prompts, SAMPLINGS[sampling]))


@pytest.mark.parametrize(
    ("sampling", "eviction"), [(GREEDY, "lru"), (SEEDED, "lru"), (SEEDED, "reuse")], ids=["greedy", "seeded", "reuse"]
)
def test_preemption_changes_nothing(sampling: Any, eviction: str, model_maker: Any) -> None:
    model = model_maker("llama")
    with engine_of(model, max_num_seqs=1) as engine:
        prompts = random_prompts(24, engine.model.vocab_size, longest=60, block_size=8, seed=4)
        expected = run_prompts(engine, prompts, sampling)
        block_bytes = engine.layout.block_bytes
    with engine_of(model, kv_cache_memory=str(14 * block_bytes), prefix_cache_eviction=eviction) as engine:
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
    ("architecture", "reason"), [("falcon", "attention interface"), ("llama4_text", "chunked_attention")]
)
def test_what_cannot_run_exactly_is_refused(architecture: str, reason: str, model_maker: Any) -> None:
    with pytest.raises(UnsupportedModel, match=reason), engine_of(model_maker(architecture)):
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
        if dtype == "bfloat16":
            require_batch_invariant(engine)
