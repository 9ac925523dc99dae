"""The engine on a GPU. Run where there is one: `pytest -m gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from support.engines import GREEDY, SEEDED, random_prompts, require_same, run_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "gpt_oss", "qwen3_moe"])
def test_a_gpu_gives_the_tokens_of_a_cpu(architecture: str, model_maker: Any) -> None:
    answers = []
    for device in ("cpu", "cuda"):
        engine = Engine(
            EngineConfig(
                model=str(model_maker(architecture)),
                dtype="float32",
                device=device,  # type: ignore[arg-type]
                block_size=16,
                kv_cache_memory="64MiB",
                max_num_batched_tokens=48,
                max_num_seqs=16,
            )
        )
        prompts = random_prompts(30, engine.model.vocab_size, longest=90, block_size=16, seed=6)
        answers.append([run_prompts(engine, prompts, sampling) for sampling in (GREEDY, SEEDED)])
        engine.check()
        engine.close()
    for on_cpu, on_gpu in zip(*answers, strict=True):
        require_same(on_cpu, on_gpu, tolerance=1e-3)
