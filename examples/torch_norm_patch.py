"""A model patch of one's own: RMS norms computed by `torch.nn.functional.rms_norm`, one kernel in place of several.

    PYTHONPATH=examples kvferry serve MODEL --model-patch torch_norm_patch:TorchNorm

`?largest=4096` leaves norms over more features alone. `test_torch_norm_patch.py` runs the contract suite
on it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from kvferry.engine.model.patch import ModelPatch


class TorchNormOptions(msgspec.Struct, frozen=True):
    """What may follow the name after a question mark."""

    largest: int = 2**20
    """Features over which a norm may go, at most."""


class TorchNorm(ModelPatch):
    """Takes over every RMS norm that it can compute: which one that is, is found by trying, not by its name."""

    options_type = TorchNormOptions
    options: TorchNormOptions

    def apply(self, model: nn.Module) -> int:
        """Replace the forward of each norm that fits."""
        norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
        return sum(self._replace(norm) for norm in norms)

    def _replace(self, norm: Any) -> bool:
        weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
        if weight is None or epsilon is None or weight.numel() > self.options.largest:
            return False
        fused = partial(_forward, weight, epsilon)
        tried = torch.linspace(-3, 3, 4 * weight.numel(), dtype=weight.dtype, device=weight.device)
        rows = tried.reshape(4, -1)
        if not torch.allclose(fused(rows), norm(rows), rtol=2e-2, atol=1e-4):
            return False  # a norm of another formula, such as Gemma's, which scales by 1 + weight
        norm.forward = fused
        return True


def _forward(weight: Tensor, epsilon: float, hidden_states: Tensor) -> Tensor:
    """hidden_states [..., features] → the same shape."""
    return nn.functional.rms_norm(hidden_states, weight.shape, weight, epsilon)
