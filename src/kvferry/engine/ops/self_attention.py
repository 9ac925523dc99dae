"""The self-attention module of a decoder layer, with Q, K and V in one product and rotation in place.

The function registered in transformers' attention interface still writes KV and attends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import byref
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvferry.engine.ops.linear import PackedLinear, can_pack, pack_together
from kvferry.engine.ops.native import NormCall, RotateCall, library
from kvferry.engine.ops.norm import FusedRMSNorm

ROTATION_FORMS = ("turn", "double", "none")
""""turn": rotate the first elements of a head, one for each angle. "double": twice as many, because the embeddings
contain only half of the angles. "none": rotate nothing."""


class FusedSelfAttention:
    """The forward method of an attention module with q_proj, k_proj, v_proj and o_proj."""

    def __init__(self, module: Any, head_dim: int, settings: dict[str, Any]) -> None:
        """`settings`: what the module passes to the attention function: scaling, window, sinks and so on."""
        self.module, self.settings, self.head_dim, self.rotation_form = module, settings, head_dim, "turn"
        self.heads = module.q_proj.out_features // head_dim
        self.kv_heads = module.k_proj.out_features // head_dim
        self.dtype = module.q_proj.weight.dtype
        self.qkv = pack_together(module.q_proj, module.k_proj, module.v_proj)
        self.out = PackedLinear(module.o_proj.weight, module.o_proj.bias)
        self._norms: list[Any] = [getattr(module, name, None) for name in ("q_norm", "k_norm")]

    @classmethod
    def variants(cls, module: Any, head_dim: int, settings: dict[str, Any]) -> Iterator[Self]:
        """A variant for each form of rotation. Yields the same object each time, updated in place."""
        query, key, value = module.q_proj, module.k_proj, module.v_proj
        if not can_pack(query, key, value, module.o_proj):
            return
        if key.out_features == value.out_features and not any(x.out_features % head_dim for x in (query, key)):
            fused = cls(module, head_dim, settings)
            for form in ROTATION_FORMS:
                fused.rotation_form = form
                yield fused

    def install(self, module: nn.Module) -> None:
        """Replace the module's forward method, and free the module's own weights."""
        for name in ("q_proj", "k_proj", "v_proj"):
            delattr(module, name)
        module.packed_qkv, module.o_proj = self.qkv, self.out
        module.forward = self

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [B, T, hidden] → [B, T, hidden] and, if the attention function returns them, the attention
        weights. `past_key_values`: the name of `cache` before transformers 5.24."""
        projected = self.qkv.forward(hidden_states).unflatten(2, (-1, self.head_dim))
        query, key, value = projected.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        if self._norms[0] is not None:
            query, key = self._norms[0](query), self._norms[1](key)
        if position_embeddings is not None and self.rotation_form != "none":
            angles = self.angles(position_embeddings, hidden_states.shape[:2])
            self._rotate(query, *angles)
            self._rotate(key, *angles)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if (kv_cache := past_key_values if cache is None else cache) is not None:
            key, value = kv_cache.update(key, value, self.module.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.module.config._attn_implementation]
        attended, weights = attend(self.module, query, key, value, attention_mask, **self.settings, **others)
        return self.out.forward(attended.flatten(2)), weights

    def angles(self, embeddings: tuple[Tensor, Tensor], shape: Sequence[int]) -> list[Tensor]:
        """Cosine and sine as the kernel needs them: [*shape, size], contiguous. Raises `ValueError` if they do not
        fit."""
        both = [torch.cat([x, x], dim=-1) for x in embeddings] if self.rotation_form == "double" else embeddings
        if any(x.shape[-1] > self.head_dim or x.dtype != self.dtype for x in both):
            raise ValueError(f"cannot turn heads of {self.head_dim} by angles {tuple(both[0].shape)} {both[0].dtype}")
        return [x.expand(*shape, -1).contiguous() for x in both]

    def _rotate(self, heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
        """Rotate heads [B, T, n, head_dim] in place by cosine and sine [B, T, size]."""
        native = library()
        assert native is not None
        tokens, size = cosine.shape[0] * cosine.shape[1], cosine.shape[2]
        call = RotateCall(
            heads.data_ptr(), cosine.data_ptr(), sine.data_ptr(),
            tokens, heads.shape[2], size, heads.stride(1), heads.stride(2),
        )  # fmt: skip
        native.rotate(byref(call), heads.element_size() == 2)

    # Calls for a program of the whole layer; `qkv` is a buffer [capacity, qkv.out_features].

    def head_norms(self, qkv: Tensor) -> list[NormCall]:
        """Calls that normalize the heads of query and key in place; none if the module has no such norms."""
        forwards = [getattr(norm, "forward", None) for norm in self._norms]
        counts, starts = (self.heads, self.kv_heads), (0, self.heads * self.head_dim)
        return [
            norm.call(address, address, heads=count, row_stride=qkv.shape[1])
            for norm, count, start in zip(forwards, counts, starts, strict=True)
            if isinstance(norm, FusedRMSNorm) and (address := qkv.data_ptr() + start * qkv.element_size())
        ]

    def rotation(self, qkv: Tensor) -> RotateCall:
        """A call that rotates query and key in place; the angles and their number are set later."""
        heads = self.heads + self.kv_heads
        return RotateCall(qkv.data_ptr(), 0, 0, 0, heads, 0, qkv.shape[1], self.head_dim)

    def views(self, qkv: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim], in the first rows of the
        buffer."""
        heads = qkv[:rows].view(1, rows, -1, self.head_dim).transpose(1, 2)
        query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return query, key, value
