"""RMSNorm in one pass over memory, instead of the half dozen operations of the modelling code."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref
from typing import Self

import torch
from torch import Tensor, nn

from kvferry.engine.ops.linear import PACKABLE
from kvferry.engine.ops.native import NormCall, library


class FusedRMSNorm:
    """The forward method of an RMSNorm module."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, epsilon: float, *, round_first: bool) -> None:
        """`weight` [size]: multiplies the normalized row. `round_first`: the row is rounded to `dtype` before that."""
        self._weight, self._dtype, self._is_bfloat16 = (
            weight.detach().float().contiguous(),
            dtype,
            dtype == torch.bfloat16,
        )
        self._epsilon, self._round_first = epsilon, round_first
        self._native = library()

    @classmethod
    def variants(cls, module: nn.Module) -> Iterator[Self]:
        """The formulas that `module` may compute: Llama's, one that rounds last, and Gemma's with 1 + weight."""
        weight = getattr(module, "weight", None)
        epsilons = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
        epsilon = next((value for value in epsilons if isinstance(value, float)), None)
        if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or weight.dtype not in PACKABLE or epsilon is None:
            return
        yield cls(weight, weight.dtype, epsilon, round_first=True)
        yield cls(weight, weight.dtype, epsilon, round_first=False)
        yield cls(1 + weight.float(), weight.dtype, epsilon, round_first=False)

    def install(self, module: nn.Module) -> None:
        module.forward = self

    def call(self, x: int, out: int, *, heads: int = 1, row_stride: int) -> NormCall:
        """Prepare a call of the kernel that reads at address `x` and writes at address `out`, for rows of `heads` heads
        each. `row_stride`: distance of two rows, in elements. The number of rows is set later."""
        size = len(self._weight)
        strides = (row_stride, size)
        return NormCall(
            x, self._weight.data_ptr(), out, 0, heads, size, *strides, *strides, self._round_first, self._epsilon
        )

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., size] → the same shape, contiguous."""
        assert self._native is not None
        x = hidden_states
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        size = x.shape[-1]
        if size != len(self._weight):
            raise ValueError(f"this norm takes rows of {len(self._weight)}, got {size}")
        if x.ndim == 4 and x.shape[0] == 1 and x.stride(3) == 1 and x.dtype == self._dtype:
            shape = (x.shape[1], x.shape[2], size, x.stride(1), x.stride(2))  # heads, perhaps slices of wider rows
        else:
            x = x.to(self._dtype).contiguous()
            shape = (x.numel() // size, 1, size, size, size)
        inner = shape[1]
        call = NormCall(
            x.data_ptr(), self._weight.data_ptr(), out.data_ptr(), *shape, inner * size, size,
            self._round_first, self._epsilon,
        )  # fmt: skip
        self._native.rms_norm(byref(call), self._is_bfloat16)
        return out
