"""The feed-forward part `down(f(gate(x)) * up(x))`, with gate and up in one product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from torch import Tensor, nn

from kvferry.engine.ops.linear import ACTIVATIONS, PackedLinear, can_pack, pack_gated, vector_length


class FusedGatedMLP:
    """Takes over the forward of an MLP module with gate_proj, up_proj and down_proj."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        self.gate_up = pack_gated(gate, up)
        self.down = PackedLinear(down.weight, down.bias)

    @classmethod
    def variants(cls, module: Any) -> Iterator[Self]:
        """With each of the activations that the kernels know; others show in the numbers."""
        gate, up, down = module.gate_proj, module.up_proj, module.down_proj
        if not can_pack(gate, up, down):
            return
        if gate.out_features == up.out_features and gate.out_features % vector_length() == 0:
            fused = cls(gate, up, down)
            for name in ACTIVATIONS:
                fused.gate_up.gate = name
                yield fused

    def install(self, module: nn.Module) -> None:
        """Become the module's forward, and free the weights it had."""
        for name in ("gate_proj", "up_proj", "down_proj"):
            delattr(module, name)
        module.gate_up_proj, module.down_proj = self.gate_up, self.down
        module.forward = self

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., hidden] -> [..., hidden]."""
        return self.down.forward(self.gate_up.forward(hidden_states))
