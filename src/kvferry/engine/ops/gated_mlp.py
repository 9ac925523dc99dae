"""The gated feed-forward module `down(f(gate(x)) * up(x))`, with gate and up in one product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from torch import Tensor, nn

from kvferry.engine.ops.linear import ACTIVATIONS, PackedLinear, can_pack, pack_gated, vector_length


class FusedGatedMLP:
    """The forward method of an MLP with gate_proj, up_proj (or both joined) and down_proj."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        self.gate_up = pack_gated(gate, up)
        self.down = PackedLinear(down.weight, down.bias)

    @classmethod
    def variants(cls, module: Any) -> Iterator[Self]:
        """A variant for each activation of the kernels; the right one is found by comparing results. Yields the same
        object each time, updated in place."""
        joined, down = getattr(module, "gate_up_proj", None), module.down_proj
        if not can_pack(joined or module.gate_proj, joined or module.up_proj, down):
            return
        gate, up = (module.gate_proj, module.up_proj) if joined is None else _halves(joined)
        if gate.out_features == up.out_features and gate.out_features % vector_length() == 0:
            fused = cls(gate, up, down)
            for name in ACTIVATIONS:
                fused.gate_up.gate = name
                yield fused

    def install(self, module: nn.Module) -> None:
        """Replace the module's forward method, and free its own weights. Original
        names are not reused for other products."""
        for name in ("gate_proj", "up_proj", "gate_up_proj"):
            if hasattr(module, name):
                delattr(module, name)
        module.gate_times_up, module.down_proj = self.gate_up, self.down
        module.forward = self

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., hidden] → [..., hidden]."""
        return self.down.forward(self.gate_up.forward(hidden_states))


def _halves(joined: nn.Linear) -> tuple[nn.Linear, nn.Linear]:
    """The first and the second half of a layer's outputs as two layers that share its memory."""
    biases = (None, None) if joined.bias is None else joined.bias.chunk(2)
    halves = []
    for weight, bias in zip(joined.weight.chunk(2), biases, strict=True):
        half = nn.Linear(joined.in_features, len(weight), bias=bias is not None, device="meta", dtype=weight.dtype)
        half.weight = nn.Parameter(weight, requires_grad=False)
        half.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        halves.append(half)
    return halves[0], halves[1]
