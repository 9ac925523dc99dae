"""The models that benchmarks run: random weights, since speed does not depend on them."""

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


MIXTURE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
}
"""A Qwen3-MoE of 650 million parameters, 120 million of them for a token."""
LARGE_VOCABULARY: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
}
"""Qwen2 with half a billion parameters, of which the vocabulary has a quarter."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SHAPE),
    "mixture": ("qwen3_moe", MIXTURE),
    "vocabulary": ("qwen2", LARGE_VOCABULARY),
}
"""(architecture, shape) by the name that flags and results know."""


def make_named_model(folder: Path, name: str) -> str:
    """Write one of MODELS into `folder`/name; returns the path. Seconds, and gigabytes."""
    architecture, shape = MODELS[name]
    return str(make_random_model(folder / name, architecture, dtype="bfloat16", **shape))


def make_bench_model(folder: Path, **changes: Any) -> str:
    """Write it into `folder`/model, with a tokenizer; returns the path."""
    return str(make_random_model(folder / "model", "llama", **(SHAPE | changes)))
