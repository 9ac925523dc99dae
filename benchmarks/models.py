"""The model that benchmarks run: random weights, since speed does not depend on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.models.random_model import make_random_model

SHAPE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
}
"""A Llama of 88 million parameters."""


def make_bench_model(folder: Path, **changes: Any) -> str:
    """Write it into `folder`/model, with a tokenizer; returns the path."""
    return str(make_random_model(folder / "model", "llama", **(SHAPE | changes)))
