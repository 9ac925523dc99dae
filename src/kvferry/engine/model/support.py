"""The architectures that run exactly. All others are refused at start."""

from __future__ import annotations

from typing import Any

from kvferry.core.errors import UnsupportedModel

HEAD_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "qkv_proj", "query_key_value"})
"""Linear layers whose outputs are heads, concatenated."""

MIN_WINDOW = 2
"""Tokens of the smallest sliding window, the token itself included."""

EXACT_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def require_supported(config: Any, model_class: type[Any]) -> None:
    """Raise `UnsupportedModel` with the reason, before any weight is loaded.

    The numeric self-check of the loaded model (`self_check`) finds all other differences.
    """
    name = f"{model_class.__name__} ({config.model_type})"
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{name} does not call attention through transformers' attention interface")
    text = config.get_text_config()
    if not isinstance(getattr(text, "max_position_embeddings", None), int):
        raise UnsupportedModel(f"{name} does not say how long a sequence may be (max_position_embeddings)")
    types = set(getattr(text, "layer_types", None) or ())
    if not types <= EXACT_LAYER_TYPES:
        others = ", ".join(sorted(types - EXACT_LAYER_TYPES))
        raise UnsupportedModel(f"{name} has layers of type {others}; only full and sliding attention run exactly here")
    if getattr(text, "attention_chunk_size", None) and "sliding_attention" not in types and not types:
        raise UnsupportedModel(f"{name} uses chunked attention, which exists only in its attention mask")
    if getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; kvferry serves decoder-only models")
    _require_window(text, name)


def _require_window(text: Any, name: str) -> None:
    window, types = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    has_window = "sliding_attention" in types if types else getattr(text, "use_sliding_window", True)
    if isinstance(window, int) and window < MIN_WINDOW and has_window:
        raise UnsupportedModel(
            f"{name} has sliding_window {window} in config.json; a window is of {MIN_WINDOW} tokens or more, because"
            " the model's own cache, with which kvferry's is compared, fails with fewer"
        )


def require_divisible(config: Any, model_class: type[Any], num_ranks: int) -> None:
    """Raise `UnsupportedModel`, with the numbers, unless transformers can split the model among `num_ranks` ranks."""
    if num_ranks == 1:
        return
    name = f"{model_class.__name__} ({config.model_type})"
    plan = _tensor_parallel_plan(config, model_class)
    if not plan:
        raise UnsupportedModel(f"{name} has no tensor-parallel plan in transformers; use --tensor-parallel-size 1")
    if not any(rule.rsplit(".", 1)[-1] in HEAD_PROJECTIONS and plan[rule] == "colwise" for rule in plan):
        return  # every rank keeps all heads
    text = config.get_text_config()
    heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if any(count % num_ranks for count in (*_as_list(heads), *_as_list(kv_heads))):
        raise UnsupportedModel(
            f"{name} has {heads} attention heads and {kv_heads} KV heads, which {num_ranks} ranks cannot share evenly;"
            " use a --tensor-parallel-size that divides both"
        )


def _tensor_parallel_plan(config: Any, model_class: type[Any]) -> dict[str, str]:
    """transformers' rules for this architecture, by module name."""
    sources = (getattr(config.get_text_config(), "base_model_tp_plan", None), getattr(model_class, "_tp_plan", None))
    return {rule: style for plan in sources for rule, style in (plan or {}).items()}


def _as_list(count: int | list[int]) -> list[int]:
    return [count] if isinstance(count, int) else list(count)
