"""Two checkpoints that differ in a few rows of one table: two names, and nothing of the one is found by the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.core.sampling import SamplingParams
from kvferry.core.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.models.checkpoint import checkpoint_name
from kvferry.models.random_model import make_random_model
from support.engines import random_prompts, run_prompts

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
CHANGED_ROWS = slice(40, 60)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Alike but for these rows of the embedding."""
    one, other = (make_random_model(tmp_path_factory.mktemp(name), "llama") for name in ("one", "other"))
    weights = load_file(other / "model.safetensors")
    weights["model.embed_tokens.weight"][CHANGED_ROWS] *= -1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    return one, other


def engine_of(model: Path, store: Path) -> Engine:
    config = EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory="16MiB", block_size=8)
    extra = {"shared_storage_path": str(store)}
    return Engine(config, KVTransferConfig(kv_connector="SharedStorageConnector", kv_connector_extra_config=extra))


def test_the_store_of_one_has_nothing_for_the_other(models: tuple[Path, Path], tmp_path: Path) -> None:
    one, other = models
    alone, answers = {}, {}
    prompts = random_prompts(6, 250, longest=60, block_size=8, seed=4)
    for model in models:
        engine = engine_of(model, tmp_path / f"alone-{model.parent.name}-{model.name}")
        alone[model] = [answer.tokens for answer in run_prompts(engine, prompts, GREEDY)]
        engine.close()
    assert alone[one] != alone[other], "the rows are in none of the prompts"
    hits = []
    for model in (one, other, one):
        engine = engine_of(model, tmp_path / "shared")
        assert engine.model.fingerprint == checkpoint_name(model, dtype="float32")
        answers[model] = [answer.tokens for answer in run_prompts(engine, prompts, GREEDY)]
        hits.append(engine.statistics().external.num_external_hits)
        engine.close()
        assert answers[model] == alone[model]
    assert hits[:2] == [0, 0]
    assert hits[2] > 0


def test_pickled_checkpoints_are_told_apart(models: tuple[Path, Path], tmp_path: Path) -> None:
    names: list[Any] = []
    for index, model in enumerate(models):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "config.json").write_bytes((model / "config.json").read_bytes())
        torch.save(load_file(model / "model.safetensors"), folder / "pytorch_model.bin")
        names.append(checkpoint_name(folder, dtype="float32"))
    assert names[0] != names[1]
