"""The name of a checkpoint in vLLM: that of kvferry's own engine, and another for any other weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.conftest import PromptMaker, connector
from kvferry.models.checkpoint import checkpoint_name
from kvferry.models.random_model import make_random_model
from support.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", params=["safetensors", "bin"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two that differ in some rows of the embedding, or whose pickled weights have nothing in common."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp(f"named-{request.param}")
    one = make_random_model(folder / "one", "llama", head_dim=32, max_position_embeddings=4096)
    other = folder / "other"
    shutil.copytree(one, other)
    weights = load_file(one / "model.safetensors")
    if request.param == "safetensors":
        weights["model.embed_tokens.weight"][3000:] *= -1
        save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
        return one, other
    for path, factor in ((one, 1.0), (other, -1.0)):
        torch.save({name: tensor * factor for name, tensor in weights.items()}, path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()
    return one, other


@contextmanager
def started(model: Path, store: Path) -> Iterator[VllmProcess]:
    process = VllmProcess(model, connector("KvferrySharedStorageConnector", shared_storage_path=str(store)))
    try:
        yield process.ready()
    finally:
        process.close()


def test_the_store_of_one_has_nothing_for_the_other(
    models: tuple[Path, Path], prompt_of: PromptMaker, tmp_path: Path
) -> None:
    prompts = [prompt_of(length) for length in (40, 200, 333)]
    loads, names = [], []
    for model in models:
        with started(model, tmp_path) as process:
            for prompt in prompts:
                process.run(prompt, 4)
            names.append(process.ask("fingerprint"))
            loads.append(process.settled().figures["loads"])
            process.ask("reset_prefix_cache")
            for prompt in prompts:
                process.run(prompt, 4)
            assert process.settled().figures["loads"] > loads[-1], "nothing was stored"
    assert names == [checkpoint_name(model, dtype="float32") for model in models]
    assert names[0] != names[1]
    assert loads == [0, 0]


def test_what_vllm_was_told_beside_the_checkpoint_counts(models: tuple[Path, Path]) -> None:
    """By numbers alone."""
    from kvferry.adapters.vllm.fingerprint import model_fingerprint

    def name_of(max_model_len: int = 100, rope: dict[str, Any] | None = None, tp: int = 1, **changed: Any) -> str:
        fields = {"quantization": None, "hf_overrides": {}, "cache_dtype": "auto", "load_format": "auto"} | changed
        model = SimpleNamespace(
            model=str(models[0]),
            dtype="torch.float32",
            revision=None,
            quantization=fields["quantization"],
            hf_overrides=fields["hf_overrides"],
            hf_text_config=SimpleNamespace(rope_parameters=rope),
            max_model_len=max_model_len,
        )
        return model_fingerprint(
            SimpleNamespace(
                model_config=model,
                cache_config=SimpleNamespace(cache_dtype=fields["cache_dtype"]),
                load_config=SimpleNamespace(load_format=fields["load_format"]),
                parallel_config=SimpleNamespace(tensor_parallel_size=tp),
            )
        )

    plain = name_of()
    assert plain == name_of(max_model_len=200) == name_of(tp=2) == checkpoint_name(models[0], dtype="float32")
    longrope = {"full_attention": {"rope_type": "longrope"}}
    others = [
        name_of(quantization="fp8"),
        name_of(cache_dtype="fp8"),
        name_of(hf_overrides={"rope_theta": 5}),
        name_of(hf_overrides=name_of),
        name_of(load_format="dummy"),
        name_of(load_format="dummy", tp=2),
        name_of(rope=longrope),
        name_of(200, rope=longrope),
    ]
    assert len({plain, *others}) == len(others) + 1
