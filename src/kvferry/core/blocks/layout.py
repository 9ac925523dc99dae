"""The meaning of a block's bytes, and the checks that two instances can read each other's blocks.

One block of one layer is one contiguous span, `[kv_heads, K then V, block_size, dim]`: heads are outermost, so that the
share of a tensor-parallel rank is contiguous too, and within each head K precedes V.
"""

from __future__ import annotations

import hashlib

import msgspec

from kvferry.core.errors import LayoutMismatch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
HEADS_FIRST = "heads-kv-tokens"
"""kvferry's own packing."""


class LayerLayout(msgspec.Struct, frozen=True):
    """One layer's share of a block on one tensor-parallel rank: heads `[first_kv_head, first_kv_head + num_kv_heads)`.

    Several ranks may hold the same heads: all of them if a model family does not split its KV heads, or each head
    several times if there are more ranks than heads.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    page_bytes: int | None = None
    """Bytes of one block of the layer in another engine's packing; None: computed from the heads and dimensions."""
    first_kv_head: int = 0
    total_kv_heads: int | None = None
    """KV heads of the whole model in this layer; None: this rank holds all of them."""

    @property
    def model_kv_heads(self) -> int:
        """KV heads of the whole model in this layer: `total_kv_heads`, or this rank's heads if that is None."""
        return self.num_kv_heads if self.total_kv_heads is None else self.total_kv_heads

    @property
    def end_kv_head(self) -> int:
        """The head after the last one on this rank."""
        return self.first_kv_head + self.num_kv_heads


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that two instances must agree on before one may read the other's bytes. `packing` names the
    arrangement of the values in a span; `HEADS_FIRST` is kvferry's own. Spans of any other packing are moved as a whole
    and not interpreted."""

    model_fingerprint: str
    dtype: str
    block_size: int
    packing: str = HEADS_FIRST
    kernels: str = ""
    """Identifies the kernels that compute the KV. Empty in float32, where their rounding does not change answers, and
    if the user has allowed mixing kernels."""
    tp_size: int = 1
    tp_rank: int = 0
    layers: tuple[LayerLayout, ...]

    @property
    def num_layers(self) -> int:
        """Number of layers that store KV."""
        return len(self.layers)

    def span_bytes(self, layer: int) -> int:
        """Bytes of one block of one layer."""
        spec = self.layers[layer]
        if spec.page_bytes is not None:
            return spec.page_bytes
        return spec.num_kv_heads * self.head_bytes(layer)

    def head_bytes(self, layer: int) -> int:
        """Bytes of one head in one block of one layer. Not for opaque layouts (`is_opaque`)."""
        spec = self.layers[layer]
        return (spec.key_dim + spec.value_dim) * DTYPE_BYTES[self.dtype] * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, on this rank."""
        return sum(self.span_bytes(layer) for layer in range(self.num_layers))

    @property
    def is_opaque(self) -> bool:
        """True if another engine arranges the values within spans, so that only whole spans can be moved."""
        return self.packing != HEADS_FIRST or any(layer.page_bytes is not None for layer in self.layers)

    @property
    def model_identity(self) -> str:
        """Identifies the model and, unless `kernels` is empty, its kernels. Two instances may use each other's KV only
        if it is equal."""
        return f"{self.model_fingerprint}/{self.kernels}" if self.kernels else self.model_fingerprint

    def fingerprint(self) -> str:
        """32 hexadecimal digits, equal exactly if all fields are equal."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]

    def require_same(self, other: KVLayout) -> None:
        """Raise `LayoutMismatch` with the first field in which `other` differs."""
        for field in self.__struct_fields__:
            _require_equal(field, getattr(self, field), getattr(other, field))

    def require_reconcilable(self, other: KVLayout) -> None:
        """Raise `LayoutMismatch` with the first field that prevents converting one side's blocks into the other's.

        Block sizes and tensor-parallel sizes may differ if one divides the other; spans of another engine's packing are
        moved only between equal layouts.
        """
        for field in ("dtype", "model_fingerprint", "kernels"):
            _require_equal(field, getattr(self, field), getattr(other, field))
        if self.is_opaque != other.is_opaque:
            _require_equal("packing", self.packing, other.packing)
        if self.is_opaque or other.is_opaque:
            self.require_same(other)
            return
        _require_divides("block_size", self.block_size, other.block_size)
        _require_divides("tp_size", self.tp_size, other.tp_size)
        _require_equal("number of layers", self.num_layers, other.num_layers)
        for index, (layer, other_layer) in enumerate(zip(self.layers, other.layers, strict=True)):
            for field in ("key_dim", "value_dim", "model_kv_heads"):
                _require_equal(f"layers[{index}].{field}", getattr(layer, field), getattr(other_layer, field))


def _require_equal(field: str, local: object, remote: object) -> None:
    if local != remote:
        raise LayoutMismatch(field, local, remote)


def _require_divides(field: str, local: int, remote: int) -> None:
    """Raise `LayoutMismatch` unless both are positive and one divides the other."""
    if min(local, remote) < 1 or max(local, remote) % min(local, remote):
        raise LayoutMismatch(field, local, remote)
