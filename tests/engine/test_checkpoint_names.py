"""Two checkpoints that differ in a few rows of one table, or in their configuration alone, have two names: nothing of
the one is found by the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.models.random_model import make_random_model
from support.engines import random_prompts, run_prompts

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
CHANGED_ROWS = slice(40, 60)


@pytest.fixture(scope="module", params=["weights", "configuration"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Alike but for these rows of the embedding, or for the base of their rotary embedding."""
    one, other = (make_random_model(tmp_path_factory.mktemp(name), "llama") for name in ("one", "other"))
    if request.param == "configuration":
        config = json.loads((other / "config.json").read_bytes())
        config["rope_parameters"]["rope_theta"] = 10.0
        (other / "config.json").write_text(json.dumps(config))
        return one, other
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
    assert alone[one] != alone[other], "they do not differ"
    hits, names = [], []
    for model in (one, other, one):
        engine = engine_of(model, tmp_path / "shared")
        names.append(engine.model.fingerprint)
        answers[model] = [answer.tokens for answer in run_prompts(engine, prompts, GREEDY)]
        hits.append(engine.statistics().external_kv.num_external_hits)
        engine.close()
        assert answers[model] == alone[model]
    assert hits[:2] == [0, 0]
    assert hits[2] > 0
    assert names[0] == names[2] != names[1]
