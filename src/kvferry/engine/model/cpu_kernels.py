"""The model patch `cpu_kernels`: kvferry's own kernels for CPUs. It is the default of `--model-patch`."""

from __future__ import annotations

from torch import nn

from kvferry.engine.model.patch import ModelPatch
from kvferry.engine.ops.transform import optimize


class CpuKernels(ModelPatch):
    """Replaces the modules for which `ops.transform` has verified that the kernels compute the same; none on other
    devices."""

    verifies_itself = True

    def apply(self, model: nn.Module) -> int:
        """Replace modules. Returns the number of replaced ones."""
        return sum(optimize(model).values())
