"""The KV layout of a model from its configuration alone, before any weight is read."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvferry.core.blocks.layout import DTYPE_BYTES, KVLayout, LayerLayout
from kvferry.core.host.machine import require_memory
from kvferry.core.settings.units import parse_bytes
from kvferry.engine.blocks.kv_cache import require_two_blocks
from kvferry.engine.config import EngineConfig
from kvferry.engine.model.attention import ATTENTION_NAME, ProbeContext, attention_context, register_attention


def require_cache_fits(config: EngineConfig, values: Any, device: torch.device) -> None:
    """Raise `ConfigError` if --kv-cache-memory is too little for the model, or more than the machine has. `values`: the
    checkpoint's configuration. Errors that need the weights are raised when the cache is allocated."""
    if config.kv_cache_memory is None:
        return
    num_bytes = parse_bytes(config.kv_cache_memory, "--kv-cache-memory")
    if device.type == "cpu":
        require_memory(num_bytes, f"--kv-cache-memory {config.kv_cache_memory}")
    dtype = getattr(values, "dtype", None) if config.dtype == "auto" else config.dtype
    name = str(dtype or torch.float32).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        return
    layers = tuple(kv_layers(values, trust_remote_code=config.trust_remote_code))
    require_two_blocks(
        KVLayout(model_fingerprint="", dtype=name, block_size=config.block_size, layers=layers), num_bytes
    )


def kv_layers(values: Any, *, trust_remote_code: bool) -> list[LayerLayout]:
    """Each layer's KV on a single rank. If the model does not run without its weights, the layers up to that point: a
    lower bound."""
    register_attention()
    context = ProbeContext()
    # Errors recur when the model is loaded. bfloat16, because some experts compute in nothing else.
    with contextlib.suppress(Exception), torch.device("meta"), torch.inference_mode(), attention_context(context):
        options = {"attn_implementation": ATTENTION_NAME, "dtype": torch.bfloat16}
        # Passed in both cases: transformers would prompt at the terminal without it.
        module = AutoModelForCausalLM.from_config(values, trust_remote_code=trust_remote_code, **options)
        module(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    return [context.layers[layer] for layer in sorted(context.layers)]
