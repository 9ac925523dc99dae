"""A whole decoder layer in two calls of the kernels, one before attention and one after it.

With one row for each sequence, calling twenty small operations from Python takes a third as long as reading the weights
from memory; two calls avoid that. Built from parts that were replaced before, if they are in the common order: norm,
attention, add, norm, feed-forward, add.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import addressof, byref
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvferry.engine.ops.gated_mlp import FusedGatedMLP
from kvferry.engine.ops.memory import HugePages
from kvferry.engine.ops.native import KernelStep, LinearCall, NormCall, RotateCall, library
from kvferry.engine.ops.norm import FusedRMSNorm
from kvferry.engine.ops.self_attention import FusedSelfAttention


class Workspace:
    """Buffers between the operations of a layer. All layers of a model share one workspace, since they run in turn."""

    def __init__(self) -> None:
        self.capacity = 0
        self._pages = HugePages()
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def reserve(self, rows: int) -> None:
        """Reserve space for `rows` rows. When this changes `capacity`, addresses of earlier buffers are invalid."""
        if rows > self.capacity:
            self.capacity = rows
            self._buffers.clear()
            self._pages = HugePages()

    def buffer(self, name: str, width: int, dtype: torch.dtype) -> Tensor:
        """A buffer [capacity, width]; calls with the same arguments get the same one."""
        key = (name, width, dtype)
        if key not in self._buffers:
            self._buffers[key] = self._pages.empty(self.capacity * width, dtype).view(self.capacity, width)
        return self._buffers[key]


class KernelProgram:
    """Operations that the kernels run one after the other, on the same number of rows. `is_bfloat16`: in bfloat16, else
    float32."""

    def __init__(self, *calls: LinearCall | NormCall | RotateCall, is_bfloat16: bool) -> None:
        self._is_bfloat16 = is_bfloat16
        self._calls = calls  # kept alive, because the steps contain only their addresses
        self._steps = (KernelStep * len(calls))(
            *(KernelStep(KernelStep.KINDS.index(type(call)), addressof(call)) for call in calls)
        )
        self._address = byref(self._steps)

    def run(self, rows: int) -> None:
        """Run on `rows` rows."""
        native = library()
        assert native is not None
        native.run_steps(self._address, len(self._calls), rows, self._is_bfloat16)


class FusedDecoderLayer:
    """The forward method of a decoder layer whose norms, attention and feed-forward have been replaced."""

    def __init__(
        self,
        module: Any,
        norms: tuple[FusedRMSNorm, FusedRMSNorm],
        attention: FusedSelfAttention,
        mlp: FusedGatedMLP,
        workspace: Workspace,
    ) -> None:
        self._module, self._norms, self._attention, self._mlp = module, norms, attention, mlp
        self._workspace, self._capacity, self._views_rows = workspace, 0, 0

    @classmethod
    def variants(cls, module: Any, workspace: Workspace) -> Iterator[Self]:
        """A fused layer if the layer's parts have been replaced, else nothing."""
        parts = [module.input_layernorm, module.post_attention_layernorm, module.self_attn, module.mlp]
        first, second, attention, mlp = (part.forward for part in parts)
        if isinstance(first, FusedRMSNorm) and isinstance(second, FusedRMSNorm):  # noqa: SIM102 (mypy narrows so)
            if isinstance(attention, FusedSelfAttention) and isinstance(mlp, FusedGatedMLP):
                yield cls(module, (first, second), attention, mlp, workspace)

    def install(self, module: nn.Module) -> None:
        module.forward = self

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        """hidden_states [1, T, hidden] → [1, T, hidden]; other batches use the module's original forward method, and so
        do calls with a cache (`past_key_values` before transformers 5.24)."""
        caches = {name: others.pop(name) for name in ("cache", "past_key_values") if name in others}
        has_cache = any(cache is not None for cache in caches.values())
        if hidden_states.shape[0] != 1 or has_cache or position_embeddings is None:
            others |= caches | {"position_embeddings": position_embeddings}
            output: Tensor = type(self._module).forward(
                self._module, hidden_states, attention_mask=attention_mask, **others
            )
            return output
        rows, hidden = hidden_states.shape[1], hidden_states.contiguous()
        self._prepare(rows)
        self._input_norm_call.x = hidden.data_ptr()
        cosine, sine = self._attention.angles(position_embeddings, (1, rows))
        rotation = self._rotation
        rotation.cosine, rotation.sine, rotation.size = cosine.data_ptr(), sine.data_ptr(), cosine.shape[2]
        self._before.run(rows)
        attention = self._attention
        attend = ALL_ATTENTION_FUNCTIONS[attention.module.config._attn_implementation]
        attended = attend(attention.module, *self._views, attention_mask, **attention.settings, **others)[
            0
        ].contiguous()
        out = torch.empty_like(hidden)
        self._output_call.x, self._output_call.residual, self._down_call.out = (
            attended.data_ptr(),
            hidden.data_ptr(),
            out.data_ptr(),
        )
        self._after.run(rows)
        return out

    def _prepare(self, rows: int) -> None:
        """Make buffers and views for `rows` rows, unless they exist."""
        self._workspace.reserve(rows)
        if self._capacity != self._workspace.capacity:
            self._capacity, self._views_rows = self._workspace.capacity, 0
            self._build()
        if self._views_rows != rows:
            self._views_rows = rows
            self._views = self._attention.views(self._qkv, rows)

    def _build(self) -> None:
        """Build both programs with the workspace's current addresses."""
        attention, mlp, dtype = self._attention, self._mlp, self._attention.dtype
        hidden, is_bfloat16 = attention.out.out_features, dtype == torch.bfloat16

        def buffer(name: str, width: int) -> Tensor:
            return self._workspace.buffer(name, width, dtype)

        self._qkv = buffer("qkv", attention.qkv.out_features)
        normed, middle = buffer("normed", hidden).data_ptr(), buffer("middle", mlp.gate_up.out_features).data_ptr()
        between, qkv = buffer("between", hidden).data_ptr(), self._qkv.data_ptr()
        self._input_norm_call = self._norms[0].call(0, normed, row_stride=hidden)
        self._rotation = attention.rotation(self._qkv)
        self._before = KernelProgram(
            self._input_norm_call,
            attention.qkv.call(normed, qkv),
            *attention.head_norms(self._qkv),
            *([] if attention.rotation_form == "none" else [self._rotation]),
            is_bfloat16=is_bfloat16,
        )
        self._output_call = attention.out.call(0, between)
        self._down_call = mlp.down.call(middle, 0, residual=between)
        self._after = KernelProgram(
            self._output_call,
            self._norms[1].call(between, normed, row_stride=hidden),
            mlp.gate_up.call(normed, middle),
            self._down_call,
            is_bfloat16=is_bfloat16,
        )
