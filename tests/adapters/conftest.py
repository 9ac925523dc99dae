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


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that vLLM's CPU attention takes."""
    from kvferry.models.random_model import make_random_model

    folder = tmp_path_factory.mktemp("vllm-model")
    return make_random_model(folder, "llama", head_dim=32, max_position_embeddings=4096)


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
