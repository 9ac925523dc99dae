"""Tokenizer, configuration and sampling defaults of a model, without its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.core.errors import ConfigError
from kvferry.models.catalog import resolve

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings of generation_config.json that apply to requests without their own."""


@dataclass(frozen=True)
class ModelFiles:
    """The parts of a model that kvferry's server needs in front of a worker that serves it. `max_position`: its
    context, in tokens."""

    tokenizer: Any
    vocab_size: int
    max_position: int
    eos_token_ids: frozenset[int]
    default_sampling: dict[str, Any]


def read_model(source: str) -> ModelFiles:
    """Read a folder, or a model of the hub. Blocks, for seconds. Raises `ConfigError`."""
    from transformers import AutoConfig, AutoTokenizer  # a second, and only where there is a worker

    path = resolve(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        config = AutoConfig.from_pretrained(path).get_text_config()
        generation = _generation_config(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tokenizer and configuration of {source!r} cannot be read: {error}") from error
    eos: set[int] = set()
    for value in (generation.get("eos_token_id"), getattr(config, "eos_token_id", None), tokenizer.eos_token_id):
        eos.update([] if value is None else value if isinstance(value, list | tuple) else [value])
    return ModelFiles(
        tokenizer=tokenizer,
        vocab_size=config.vocab_size,
        max_position=config.max_position_embeddings,
        eos_token_ids=frozenset(token_id for token_id in eos if 0 <= token_id < config.vocab_size),
        default_sampling={name: generation[name] for name in _SAMPLING if generation.get(name) is not None},
    )


def _generation_config(path: Path | str) -> dict[str, Any]:
    """generation_config.json; empty where there is none. Raises `OSError` and `ValueError`."""
    if not isinstance(path, Path):
        from transformers import GenerationConfig

        return dict(GenerationConfig.from_pretrained(path).to_diff_dict())
    file = path / "generation_config.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}
