"""What a layer sees is read from the model's own masks, however far out it matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from kvferry.core.errors import UnsupportedModel
from kvferry.engine.config import EngineConfig
from kvferry.engine.model.attention import ATTENTION_NAME, probe_layers, register_attention, window_of
from kvferry.engine.model.loader import load_model
from kvferry.engine.model.rank_placement import RankPlacement
from support.families import Case, make_model

CPU = torch.device("cpu")


def window(function: Any, num_positions: int = 20_000) -> int | None:
    return window_of(function, num_positions, CPU, "Odd")


@pytest.mark.parametrize("width", [1, 2, 7, 4096, 19_999])
def test_a_window_is_found_however_wide(width: int) -> None:
    assert window(sliding_window_causal_mask_function(width)) == width


def test_a_window_as_long_as_any_sequence_is_none() -> None:
    assert window(causal_mask_function) is None
    assert window(sliding_window_causal_mask_function(20_000)) is None
    assert window(sliding_window_causal_mask_function(50_000)) is None


def holes(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return causal_mask_function(batch, head, query, key) & (key != query - 17)


def from_far_out(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return causal_mask_function(batch, head, query, key) & ((query < 9000) | (query - key < 512))


def of_one_head(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return torch.zeros(1, 3)[batch, key] == 0


ODD = {
    "chunks": chunked_causal_mask_function(512, torch.zeros(1, dtype=torch.long)),
    "both directions": sliding_window_bidirectional_mask_function(8),
    "holes": holes,
    "a window from far out on": from_far_out,
    "a mask of the tokens at hand": of_one_head,
}


@pytest.mark.parametrize("kind", ODD)
def test_other_masks_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match="Odd has an attention mask that"):
        window(ODD[kind])


def probe(folder: Path) -> tuple[int | None, ...]:
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    return probe_layers(model.eval(), CPU, RankPlacement()).windows


def test_a_window_that_is_in_the_mask_only_is_found(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 300, "max_window_layers": 3}
    make_model(Case("qwen2_moe", "", window), tmp_path)
    assert probe(tmp_path) == (300, None, 300, None)


def test_windows_beyond_the_check_are_crossed_when_made_small(
    model_maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of thousands of tokens that attention ignored would be found at start, with a few tokens."""
    from kvferry.engine.model import attention

    folder = model_maker("mistral", sliding_window=3000)
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu")
    assert set(load_model(config).windows) == {3000}
    real = attention.paged_attention
    monkeypatch.setattr(attention, "paged_attention", lambda *args, **kw: real(*args, **{**kw, "window": None}))
    with pytest.raises(UnsupportedModel, match="does not give the same logits"):
        load_model(config)
