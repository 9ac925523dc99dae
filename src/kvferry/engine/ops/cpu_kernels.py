"""The patch that makes models fast on CPUs: kvferry's own kernels, applied unless `--model-patch` leaves it out."""

from __future__ import annotations

from torch import nn

from kvferry.engine.model.patch import ModelPatch
from kvferry.engine.ops.transform import optimize


class CpuKernels(ModelPatch):
    """Replaces what `ops.transform` can prove to compute the same; nothing on other devices."""

    verifies_itself = True

    def apply(self, model: nn.Module) -> int:
        """How many modules were replaced, of any kind."""
        return sum(optimize(model).values())
