"""Which models several ranks can share, known before any weight is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvferry.core.errors import ConfigError, UnsupportedModel
from kvferry.engine.model.checkpoint import require_divisible, require_supported
from kvferry.engine.model.rank_placement import RankPlacement
from kvferry.models.random_model import make_config


def require(architecture: str, num_ranks: int, **settings: Any) -> None:
    config = make_config(architecture, **settings)
    require_divisible(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], num_ranks)


@pytest.mark.parametrize(
    ("architecture", "num_ranks"), [("llama", 2), ("qwen3_moe", 2), ("phi3", 4), ("olmo2", 3), ("deepseek_v3", 8)]
)
def test_heads_that_divide_or_stay_whole(architecture: str, num_ranks: int) -> None:
    require(architecture, num_ranks)


def test_heads_that_do_not_divide_are_named() -> None:
    with pytest.raises(UnsupportedModel, match="4 attention heads and 2 KV heads, which 4 ranks cannot share"):
        require("mixtral", 4)
    with pytest.raises(UnsupportedModel, match="6 attention heads and 4 KV heads, which 4 ranks"):
        require("llama", 4, num_attention_heads=6, num_key_value_heads=4, hidden_size=96)
    require("llama", 1, num_attention_heads=5, num_key_value_heads=5, hidden_size=80)


def test_an_architecture_without_a_plan_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="has no tensor-parallel plan in transformers"):
        require("falcon", 2)


@pytest.mark.parametrize(("architecture", "window"), [("mistral", 1), ("mistral", 0), ("gemma2", 1), ("gpt_oss", -1)])
def test_windows_in_which_the_models_own_cache_fails_are_named(architecture: str, window: int) -> None:
    config = make_config(architecture, sliding_window=window)
    with pytest.raises(UnsupportedModel, match=rf"sliding_window {window} in config.json; a window is of 2 tokens"):
        require_supported(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def test_a_window_that_no_layer_has_does_not_matter() -> None:
    config = make_config("gemma2", sliding_window=1, layer_types=["full_attention"] * 4)
    require_supported(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def test_a_rank_takes_its_share_of_the_threads() -> None:
    before = torch.get_num_threads()
    try:
        RankPlacement(0, 2).set_num_threads(4)
        assert torch.get_num_threads() == 2
        RankPlacement(1, 4).set_num_threads(1)
        assert torch.get_num_threads() == 1
        with pytest.raises(ConfigError, match="--num-threads"):
            RankPlacement().set_num_threads(0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_device_is_the_ranks_own() -> None:
    assert RankPlacement(1, 2).choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="no GPU"):
        RankPlacement(1, 2).choose_device("cuda")
