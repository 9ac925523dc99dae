"""Also in bfloat16 an answer does not depend on its batch: alone, batched, chunked, preempted, handed off.

That the engine finds so of every family is looked at where one of each is started: in `test_exactness.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.sampling import SamplingParams
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.engine.ops.native import library
from support.engines import SEEDED, Answer, random_prompts, run_prompts
from support.pairs import pair_of
from support.warm import Program

needs_native = pytest.mark.skipif(library() is None, reason="no compiler here")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "in chunks of 16": {"max_num_batched_tokens": 16},
    "in chunks of 37": {"max_num_batched_tokens": 37, "prefix_caching": False},
    "few at a time": {"max_num_seqs": 3},
    "preempted": {"kv_cache_memory": 14},
}


@contextmanager
def engine_of(model: Path, **settings: Any) -> Iterator[Engine]:
    defaults = {"dtype": "bfloat16", "device": "cpu", "block_size": 8, "kv_cache_memory": "32MiB", "max_num_seqs": 16}
    engine = Engine(EngineConfig(model=str(model), **{**defaults, **settings}))
    try:
        yield engine
        engine.check()
    finally:
        engine.close()


def one_at_a_time(
    model: Path, count: int, sampling: SamplingParams, **settings: Any
) -> tuple[list[list[int]], list[Answer], int]:
    """Prompts, what each is answered alone, and the bytes of a block."""
    with engine_of(model, max_num_seqs=1, prefix_caching=False, **settings) as engine:
        prompts = random_prompts(count, engine.model.vocab_size, longest=80, block_size=8, seed=6)
        return prompts, run_prompts(engine, prompts, sampling), engine.layout.block_bytes


def require_equal(expected: list[Answer], found: list[Answer]) -> None:
    """The same tokens and, to the bit, the same log-probabilities."""
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert other.tokens == one.tokens, f"prompt {number}"
        assert other.logprobs == one.logprobs, f"prompt {number}"


@needs_native
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_company_changes_no_bit_of_a_mixture(sampling: SamplingParams, model_maker: Any) -> None:
    model = model_maker("qwen3_moe")
    prompts, expected, _ = one_at_a_time(model, 8, sampling)
    with engine_of(model, max_num_batched_tokens=37) as engine:
        require_equal(expected, run_prompts(engine, prompts, sampling))


def test_a_kernel_that_heeds_the_batch_is_caught(model_maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.engine.model import attention

    real = attention.paged_attention

    def rounded_in_company(query: Any, cache: Any, batch: Any, **options: Any) -> Any:
        return real(query, cache, batch, **options) * (1 if batch.num_sequences == 1 else 1.0078125)

    monkeypatch.setattr(attention, "paged_attention", rounded_in_company)
    with engine_of(model_maker("llama")) as engine:
        assert engine.model.batch_dependence


@needs_native
@pytest.mark.full
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt_oss", "gemma3", "phi3", "deepseek_v3"])
def test_company_changes_no_bit(architecture: str, sampling: SamplingParams, model_maker: Any) -> None:
    model = model_maker(architecture)
    prompts, expected, block_bytes = one_at_a_time(model, 24, sampling)
    for way, settings in WAYS.items():
        if "kv_cache_memory" in settings:
            settings = {"kv_cache_memory": str(settings["kv_cache_memory"] * block_bytes)}
        with engine_of(model, **settings) as engine:
            require_equal(expected, run_prompts(engine, prompts, sampling))
            require_equal(expected, run_prompts(engine, prompts, sampling))  # once more, over a warm prefix cache
            assert way != "preempted" or engine.statistics().scheduler.num_preemptions > 0


@needs_native
@pytest.mark.full
@pytest.mark.parametrize("form", ["sequential", "concurrent"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_neither_does_a_hand_off(architecture: str, form: str, model_maker: Any) -> None:
    model = model_maker(architecture)
    prompts, expected, _ = one_at_a_time(model, 60, GREEDY)
    prefill = {"block_size": 8, "max_num_batched_tokens": 24, "dtype": "bfloat16"}
    with pair_of(
        model, "P2pConnector", extra={}, prefill=prefill, decode={"block_size": 8, "dtype": "bfloat16"}
    ) as pair:
        require_equal(expected, pair.run(prompts, GREEDY, form))
        pair.settle()


WITHOUT_KERNELS = """
from pathlib import Path
from engine.model.test_batch_invariance import GREEDY, engine_of, one_at_a_time, require_equal
from support.engines import run_prompts
model = Path({model!r})
prompts, expected, _ = one_at_a_time(model, {num_prompts}, GREEDY, batch_invariant=True)
for settings in ({{}}, {{"max_num_batched_tokens": 16}}):
    with engine_of(model, batch_invariant=True, **settings) as engine:
        assert "PyTorch computes" in engine.model.batch_dependence
        require_equal(expected, run_prompts(engine, prompts, GREEDY))
print("the same")
"""


@pytest.mark.parametrize("num_prompts", [4, pytest.param(10, marks=pytest.mark.full)])
@pytest.mark.parametrize("architecture", [pytest.param("llama", marks=pytest.mark.full), "qwen3_moe"])
def test_without_kernels_the_flag_sees_to_it(
    architecture: str, num_prompts: int, model_maker: Any, tmp_path: Path
) -> None:
    code = WITHOUT_KERNELS.format(model=str(model_maker(architecture)), num_prompts=num_prompts)
    done = Program(code, tmp_path, KVFERRY_NATIVE="0").end(timeout=600)
    assert done.stdout.strip().endswith("the same"), done.stderr[-3000:]


KERNELS = """
from pathlib import Path
from engine.model.test_batch_invariance import engine_of
with engine_of(Path({model!r})) as engine:
    print(engine.layout.kernels)
"""


@needs_native
def test_a_layout_names_the_kernels_where_their_rounding_shows(model_maker: Any, tmp_path: Path) -> None:
    """P and D, or two machines with one store, do not mix what rounds otherwise; equal kernels have one name."""
    model = model_maker("llama")
    with engine_of(model) as engine:
        name = engine.layout.kernels
    code = KERNELS.format(model=str(model))
    names = [Program(code, tmp_path, KVFERRY_NATIVE=native).end().stdout.strip() for native in ("1", "0")]
    assert names[0] == name
    assert name.startswith("kvferry ")
    assert names[1].startswith("torch ")
    for settings in ({"dtype": "float32"}, {"mix_kernels": True}):
        with engine_of(model, **settings) as engine:
            assert engine.layout.kernels == ""
