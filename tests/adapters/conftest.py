"""vLLM processes, shared by the tests of a module: each takes some seconds to start."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.vllm_process import VllmProcess

VllmMaker = Callable[..., VllmProcess]
PromptMaker = Callable[[int], list[int]]


WINDOW = 80
"""Two and a half of the tests' blocks of 32 tokens."""
SLIDING, FULL = "sliding_attention", "full_attention"
LAYERS = {
    "gemma3": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING],
    "gemma2": [SLIDING, FULL, SLIDING, FULL],
    "gpt_oss": [SLIDING, FULL, SLIDING, FULL],
}
"""Of models with sliding windows. Those of the first are four KV cache groups, one of which lacks a layer."""

LATENT = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "q_lora_rank": None, "first_k_dense_replace": 3},
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "head_dim": 64},
}
"""Of a DeepSeek-V2 without experts, with the one size of latent KV that vLLM's kernel for CPUs takes."""

ModelMaker = Callable[[str], Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """`make_model(architecture)`: a tiny random model that vLLM's CPU attention takes."""
    from kvferry.models.random_model import make_random_model

    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            folder = tmp_path_factory.mktemp(f"vllm-{architecture}")
            sizes: dict[str, Any] = {"head_dim": 32, "max_position_embeddings": 4096}
            if architecture.startswith("deepseek"):
                sizes |= LATENT
            if layers := LAYERS.get(architecture):
                sizes |= {"sliding_window": WINDOW, "num_hidden_layers": len(layers), "layer_types": layers}
            made[architecture] = make_random_model(folder, architecture, **sizes)
        return made[architecture]

    return make


@pytest.fixture(scope="module")
def model(make_model: ModelMaker) -> Path:
    """What the vLLMs of a module run, unless it says otherwise."""
    return make_model("llama")


@pytest.fixture(scope="module")
def start_vllm(model: Path) -> Iterator[VllmMaker]:
    """`start_vllm(kv_transfer, **engine_args)`: one more, which the caller waits for with `ready`."""
    with ExitStack() as stack:

        def start(kv_transfer: dict[str, Any] | None = None, **engine_args: Any) -> VllmProcess:
            process = VllmProcess(model, kv_transfer, **engine_args)
            stack.callback(process.close)
            return process

        yield start


@pytest.fixture
def prompt_of(request: pytest.FixtureRequest) -> PromptMaker:
    """`prompt_of(n)`: n random tokens, another prompt with each call, the same in each run of the test."""
    source = random.Random(request.node.name)
    return lambda num_tokens: [source.randrange(3, 4000) for _ in range(num_tokens)]


def connector(name: str, role: str = "kv_both", policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    """`--kv-transfer-config` of one of kvferry's connectors."""
    return {
        "kv_connector": name,
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }
