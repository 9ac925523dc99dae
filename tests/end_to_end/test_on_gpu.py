"""Prefill and decode instances that share a GPU. Run where there is one: `pytest -m gpu`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from support.processes import cluster, kvferry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ENGINE = ("--device=cuda", "--block-size=16")


def prompts() -> list[list[int]]:
    source = random.Random(5)
    lengths = [1, 15, 16, 17, 33, 500, *(source.randrange(1, 300) for _ in range(18))]
    return [[source.randrange(5, 900) for _ in range(length)] for length in lengths]


def of_one_instance(model: Path, folder: Path) -> list[list[int]]:
    """What a plain instance answers."""
    alone = ("serve", str(model), "--served-model-name=m", "--dtype=float32", "--kv-cache-memory=48MiB", *ENGINE)
    with kvferry(*alone, log=folder / "alone.log") as plain:
        return [plain.complete(prompt)["choices"][0]["token_ids"] for prompt in prompts()]


@pytest.mark.parametrize("transport", ["auto", "nixl"])
@pytest.mark.parametrize("hand_off", ["sequential", "concurrent"])
def test_one_gpu_as_prefill_and_decode(transport: str, hand_off: str, model_maker: Any, tmp_path: Path) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl")
    model = model_maker("llama")
    expected = of_one_instance(model, tmp_path)
    transfer = {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"transport": transport}}
    with cluster(model, tmp_path, transfer=transfer, hand_off=hand_off, engine=ENGINE) as started:
        found = [started.router.complete(prompt)["choices"][0]["token_ids"] for prompt in prompts()]
        assert found == expected
        kind = "cuda_ipc" if transport == "auto" else transport
        assert started.decode[0].metric("kvferry:connector_taken_bytes_total", kind=kind) > 0
        assert started.decode[0].metric("kvferry:kv_load_failures_total") == 0
        started.require_clean()


@pytest.mark.parametrize("hand_off", ["sequential", "concurrent"])
@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_hand_offs_through_a_store(load: str, hand_off: str, model_maker: Any, tmp_path: Path) -> None:
    model = model_maker("llama")
    expected = of_one_instance(model, tmp_path)
    extra = {"shared_storage_path": str(tmp_path / "kv"), "load": load}
    transfer = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
    with cluster(model, tmp_path, transfer=transfer, hand_off=hand_off, engine=ENGINE) as started:
        for _ in range(2):
            found = [started.router.complete(prompt)["choices"][0]["token_ids"] for prompt in prompts()]
            assert found == expected
        assert started.decode[0].metric("kvferry:connector_loads_total") > 0
        assert started.decode[0].metric("kvferry:kv_load_failures_total") == 0
        started.require_clean()
