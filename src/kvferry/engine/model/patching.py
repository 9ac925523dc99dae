"""Applies patches to a loaded model, and refuses those that change more than rounding.

A few tokens are computed before and after each patch: the queries, keys and values that reach the attention function,
and the logits, must be the same within rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvferry.core.errors import KvferryError, UnsupportedModel
from kvferry.core.settings import environment
from kvferry.engine.model.patch import make_patch
from kvferry.engine.ops.transform import FINAL_TOLERANCE, AttentionRecord, recorded_attention, run
from kvferry.engine.patch_names import DEFAULT_PATCHES, FLAG

logger = logging.getLogger(__name__)

TOLERANCE = {**FINAL_TOLERANCE, torch.float16: 0.1}
"""Largest difference that counts as rounding, relative to the norm of the whole tensor."""


@dataclass(frozen=True)
class _Trace:
    """Logits [1, tokens, vocab], and the arguments of the attention function, in order."""

    logits: Tensor
    attention: list[AttentionRecord]


def apply_patches(model: nn.Module, names: Sequence[str]) -> None:
    """Apply patches in this order. All ranks call it together.

    Raises `UnsupportedModel` when a patch fails, or when the model does not compute the same with it; `ConfigError` for
    a name or an option that is wrong.
    """
    patches = [(name, make_patch(name)) for name in names]
    with torch.inference_mode():
        for name, patch in patches:
            before = None if patch.verifies_itself else _trace(model)
            try:
                count = patch.apply(model)
            except KvferryError:
                raise
            except Exception as error:
                without = f"with {environment.NATIVE}=0" if name in DEFAULT_PATCHES else "without it"
                raise UnsupportedModel(
                    f"{FLAG} {name} failed on {type(model).__name__}: {error!r}; start {without}"
                ) from error
            if before is not None:
                _require_same(name, before, _trace(model))
            logger.info("%s %s: %d modules", FLAG, name, count)


def _trace(model: nn.Module) -> _Trace:
    with recorded_attention(model) as calls:
        return _Trace(run(model), list(calls.values()))


def _require_same(name: str, before: _Trace, after: _Trace) -> None:
    if len(after.attention) != len(before.attention):
        raise UnsupportedModel(
            f"{FLAG} {name}: the attention function was called by {len(before.attention)} modules before, and by"
            f" {len(after.attention)} with the patch; KV of the others would be missing"
        )
    for layer, (old, new) in enumerate(zip(before.attention, after.attention, strict=True)):
        for noun, expected, actual in zip(("queries", "keys", "values"), old.tensors, new.tensors, strict=True):
            _require_close(f"{FLAG} {name} changes the {noun} of layer {layer}", expected, actual)
    _require_close(f"{FLAG} {name} changes the logits", before.logits, after.logits)


def _require_close(noun: str, before: Tensor, after: Tensor) -> None:
    if before.shape != after.shape or before.dtype != after.dtype:
        raise UnsupportedModel(
            f"{noun}: they were {before.dtype} {list(before.shape)}, and are {after.dtype} {list(after.shape)}"
        )
    limit = TOLERANCE[before.dtype]
    difference = float((after.double() - before.double()).norm() / before.double().norm().clamp_min(1e-30))
    if not difference <= limit:
        raise UnsupportedModel(f"{noun} by {difference:.2g} of their size; rounding is at most {limit:g}")
