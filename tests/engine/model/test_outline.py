"""What a model keeps of each token is known before its weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from kvferry.core.errors import ConfigError
from kvferry.engine.config import EngineConfig
from kvferry.engine.model.checkpoint import kv_layers, require_cache_fits
from kvferry.engine.model.loader import load_model
from support.families import Case, make_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "case",
    [Case("llama"), Case("gemma3_text"), Case("deepseek_v3"), Case("gpt_oss"), Case("qwen3_moe")],
    ids=lambda case: case.name,
)
def test_it_is_what_the_loaded_model_keeps(case: Case, tmp_path: Path) -> None:
    make_model(case, tmp_path)
    found = kv_layers(AutoConfig.from_pretrained(tmp_path), trust_remote_code=False)
    loaded = load_model(EngineConfig(model=str(tmp_path), dtype="float32", device="cpu")).layers
    assert [(one.num_kv_heads, one.key_dim, one.value_dim) for one in found] == [
        (one.num_kv_heads, one.key_dim, one.value_dim) for one in loaded
    ]


@pytest.mark.parametrize("trusted", [False, True])
def test_nobody_is_asked_at_the_terminal(trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *text: pytest.fail("asked"))
    make_model(Case("llama"), tmp_path)
    values = AutoConfig.from_pretrained(tmp_path)
    values.auto_map = {"AutoModelForCausalLM": "modeling.Model"}
    assert len(kv_layers(values, trust_remote_code=trusted)) == (0 if trusted else 4)


@pytest.mark.parametrize("kind", ["float64", "int8", "nonsense"])
def test_number_formats_that_no_cache_has_are_told_of_when_the_model_is_loaded(kind: str, tmp_path: Path) -> None:
    make_model(Case("llama"), tmp_path)
    values = AutoConfig.from_pretrained(tmp_path)
    values.dtype = kind
    require_cache_fits(EngineConfig(model=str(tmp_path), kv_cache_memory="1KiB"), values, CPU)
    with pytest.raises(ConfigError, match="at least two blocks"):
        require_cache_fits(EngineConfig(model=str(tmp_path), dtype="bfloat16", kv_cache_memory="1KiB"), values, CPU)
