"""All experts of an MoE layer in one call of the kernels, on packed weights.

transformers keeps the weights of all experts stacked in two or three parameters, and calls each chosen expert by
itself. The kernel groups rows by expert, computes gate and up in one product, and a token's sum does not depend on
other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref
from typing import Any, Self

import torch
from torch import Tensor, nn

from kvferry.engine.ops.linear import GATES, PACKABLE, interleave, vector_length
from kvferry.engine.ops.memory import weights
from kvferry.engine.ops.native import ExpertsCall, library


class StackedWeight:
    """Weights [experts, out_features, in_features], packed one after the other, and biases [experts, out_features]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        native = library()
        assert native is not None, "pack only where the kernels are"
        experts, columns, depth = weight.shape
        is_bfloat16 = weight.dtype == torch.bfloat16
        units = native.packed_units(columns, depth, is_bfloat16)
        self.packed = weights.empty(experts * units, torch.int32)
        self.bias = None if bias is None else bias.detach().float().contiguous()
        for expert, expert_weight in enumerate(weight.detach()):
            source = expert_weight.contiguous()
            target = self.packed.data_ptr() + expert * units * 4
            native.pack_weight(source.data_ptr(), columns, depth, target, is_bfloat16)

    @property
    def addresses(self) -> tuple[int, int | None]:
        """Addresses of weights and biases."""
        return self.packed.data_ptr(), None if self.bias is None else self.bias.data_ptr()


class FusedExperts:
    """The forward method of a module that holds the experts of one layer."""

    def __init__(self, module: Any) -> None:
        """Pack the weights of `module`. The activation is set by `variants`."""
        enter, enter_bias, leave, leave_bias = _weights_of(module)
        self.num_experts, self.hidden, middle = leave.shape
        self._dtype, self.is_gated = leave.dtype, enter.shape[1] == 2 * middle
        missing = -middle % vector_length()
        self.middle = middle + missing
        self._gate_up = StackedWeight(
            _arranged(enter, missing, self.is_gated),
            None if enter_bias is None else _arranged(enter_bias, missing, self.is_gated),
        )
        self._down = StackedWeight(nn.functional.pad(leave, (0, missing)), leave_bias)
        self.gate, self.limit, self.alpha = "silu", 0.0, 1.0

    @classmethod
    def variants(cls, module: Any) -> Iterator[Self]:
        """A variant for each activation of the kernels, with and without the module's limit. Yields the same object
        each time, updated in place."""
        if not _is_plain(module):
            return
        fused = cls(module)
        for fused.limit, fused.alpha in _clamps_of(module):
            for name in filter(None, GATES):
                fused.gate = name
                yield fused

    def install(self, module: nn.Module) -> None:
        """Replace the module's forward method, and free its own weights."""
        for name in _PARAMETERS:
            if name in module._parameters:
                delattr(module, name)
        module.forward = self

    def __call__(self, hidden_states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """hidden_states [T, hidden], chosen experts [T, top_k] and their weights `shares` [T, top_k] → [T, hidden]."""
        if hidden_states.ndim != 2 or chosen.shape != shares.shape or chosen.shape[0] != hidden_states.shape[0]:
            raise ValueError(f"cannot route {tuple(hidden_states.shape)} by {tuple(chosen.shape)}")
        x = hidden_states.to(self._dtype).contiguous()
        chosen, shares = chosen.long().contiguous(), shares.float().contiguous()
        out = torch.empty_like(x)
        call = ExpertsCall(
            x.data_ptr(), self._gate_up.addresses[0], self._down.addresses[0],
            self._gate_up.addresses[1], self._down.addresses[1],
            chosen.data_ptr(), shares.data_ptr(), out.data_ptr(),
            x.shape[0], chosen.shape[1], self.num_experts, self.hidden, self.middle, x.shape[1],
            GATES.index(self.gate), self.is_gated, self.limit, self.alpha,
        )  # fmt: skip
        native = library()
        assert native is not None
        native.experts(byref(call), self._dtype == torch.bfloat16)
        return out


_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")


def holds_experts(module: nn.Module) -> bool:
    """True if `module` holds the experts of a layer in transformers' stacked form."""
    leave, enter = module._parameters.get("down_proj"), _entering(module)
    return leave is not None and enter is not None and leave.ndim == enter.ndim == 3


def _entering(module: nn.Module) -> Tensor | None:
    return next(
        (module._parameters[x] for x in ("gate_up_proj", "up_proj") if module._parameters.get(x) is not None), None
    )


def _is_plain(module: Any) -> bool:
    """Ordinary weights with nothing added: not tensor-parallel (DTensor), not quantized."""
    parameters = {name: value for name, value in module._parameters.items() if value is not None}
    return (
        library() is not None
        and set(parameters) <= set(_PARAMETERS)
        and not any(True for _ in module.children() if next(_.parameters(), None) is not None)
        and all(type(x) is nn.Parameter and x.device.type == "cpu" for x in parameters.values())
        and len({x.dtype for x in parameters.values()}) == 1
        and module.down_proj.dtype in PACKABLE
    )


def _weights_of(module: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Weights [experts, out_features, in_features] and biases, gates before values in whatever order the module has
    them."""
    name = "gate_up_proj" if module._parameters.get("gate_up_proj") is not None else "up_proj"
    enter, leave = getattr(module, name), module.down_proj
    enter_bias, leave_bias = getattr(module, f"{name}_bias", None), getattr(module, "down_proj_bias", None)
    if getattr(module, "is_transposed", False):
        enter, leave = enter.transpose(1, 2), leave.transpose(1, 2)
    if not getattr(module, "is_concatenated", True):
        enter = torch.cat([enter[:, ::2], enter[:, 1::2]], dim=1)
        enter_bias = None if enter_bias is None else torch.cat([enter_bias[:, ::2], enter_bias[:, 1::2]], dim=1)
    return enter, enter_bias, leave, leave_bias


def _arranged(x: Tensor, missing: int, is_gated: bool) -> Tensor:
    """x [experts, columns, ...] with `missing` rows of zeros at its end, and with gates and values interleaved if it
    has both."""
    parts = x.chunk(2, dim=1) if is_gated else (x,)
    wide = [torch.cat([part, part.new_zeros(len(part), missing, *part.shape[2:])], dim=1) for part in parts]
    return torch.stack([interleave(*pair) for pair in zip(*wide, strict=True)]) if is_gated else wide[0]


def _clamps_of(module: Any) -> Iterator[tuple[float, float]]:
    """(limit, alpha) to try: from the module's attributes, and without limit."""
    limits = [getattr(module, name, None) for name in ("swiglu_limit", "limit")]
    alphas = [getattr(module, name, None) for name in ("swiglu_alpha", "alpha")]
    limit = next((float(x) for x in limits if isinstance(x, int | float)), None)
    alpha = next((float(x) for x in alphas if isinstance(x, int | float)), 1.0)
    if limit is not None:
        yield limit, alpha
    yield 0.0, alpha
