"""Proves at start that paged attention reproduces the model's own: a wrong answer is worse than no start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvferry.core.errors import UnsupportedModel
from kvferry.core.layout import LayerLayout
from kvferry.engine.model.attention import ATTENTION_NAME, PagedContext, attention_context
from kvferry.engine.ops.batch import AttentionBatch

NUM_TOKENS = 24
BLOCK_SIZE = 8
# Distances are relative to the logits' own spread. Rounding stays far below these, a wrong mask or position is at about
# 1. Where rounding is amplified (experts chosen by a hair), transformers' own two ways differ as much, which counts.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.12, torch.float16: 0.03}
ROUNDING_MARGIN = 3.0


def self_check(module: Any, layers: tuple[LayerLayout, ...], device: torch.device) -> None:
    """Run a few tokens in two chunks through the pages and in one piece through eager attention, and compare.

    Raises `UnsupportedModel` when the logits differ by more than rounding.
    """
    vocab = module.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (NUM_TOKENS,), generator=generator).to(device)
    with torch.inference_mode():
        expected = _logits(module, ids, "eager")
        found = _distance(_paged_logits(module, layers, ids), expected)
        allowed = max(TOLERANCE[expected.dtype], ROUNDING_MARGIN * _rounding(module, ids, expected))
    if not found <= allowed:
        raise UnsupportedModel(
            f"{type(module).__name__} does not give the same logits through paged attention as through its own"
            f" (they are {found:.2g} of their spread apart, {allowed:.2g} could be rounding); it would answer wrongly"
        )


def _logits(module: Any, ids: Tensor, implementation: str) -> Tensor:
    """Logits [T, vocab] by one of transformers' own attention functions. Raises `ValueError` where it has it not."""
    module.set_attn_implementation(implementation)
    try:
        logits: Tensor = module(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    finally:
        module.set_attn_implementation(ATTENTION_NAME)
    return logits


def _rounding(module: Any, ids: Tensor, expected: Tensor) -> float:
    """How far apart two right ways are; 0 where the model knows only one."""
    try:
        return _distance(_logits(module, ids, "sdpa"), expected)
    except ValueError:
        return 0.0


def _distance(found: Tensor, expected: Tensor) -> float:
    spread = (expected - expected.mean()).double().norm()
    return float((found - expected).double().norm() / spread.clamp(min=1e-12))


def _paged_logits(module: Any, layers: tuple[LayerLayout, ...], ids: Tensor) -> Tensor:
    num_blocks = -(-NUM_TOKENS // BLOCK_SIZE)
    dtype = next(module.parameters()).dtype
    caches = [
        torch.zeros(
            num_blocks,
            spec.num_kv_heads,
            BLOCK_SIZE * (spec.key_dim + spec.value_dim),
            dtype=dtype,
            device=ids.device,
        )
        for spec in layers
    ]
    table, split, logits = list(range(num_blocks)), NUM_TOKENS * 2 // 3, []
    for start, end in ((0, split), (split, NUM_TOKENS)):
        batch = AttentionBatch.build([end - start], [end], [table], block_size=BLOCK_SIZE, device=ids.device)
        with attention_context(PagedContext(batch, caches)):
            output = module(input_ids=ids[None, start:end], position_ids=batch.positions.unsqueeze(0), use_cache=False)
        logits.append(output.logits[0])
    return torch.cat(logits)
