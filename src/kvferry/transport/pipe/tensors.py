"""Tensors as a header and bytes. A peer's header is checked before memory is allocated for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvferry.core.errors import ProtocolError
from kvferry.transport.pipe.messages import TensorHeader

MAX_DIMS = 64
MAX_ELEMENTS = 2**56
"""More than any memory holds, but so few that no stride overflows, even if another dimension is 0."""
_NAMES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64"
    " complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)}
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


def header_of(tensor: Tensor, max_bytes: int) -> TensorHeader:
    """The header of a tensor to send. Raises `ProtocolError` for a tensor that no receiver accepts."""
    if tensor.layout is not torch.strided or tensor.dtype not in _NAME_OF or tensor.is_meta:
        raise ProtocolError(f"a pipe takes plain dense tensors, not {tensor.layout}, {tensor.dtype}")
    header = TensorHeader(_NAME_OF[tensor.dtype], list(tensor.shape))
    num_bytes_of(header, max_bytes)
    return header


def num_bytes_of(header: TensorHeader, max_bytes: int) -> int:
    """The size of the tensor. Raises `ProtocolError` if there can be no such tensor, or it is too large."""
    if header.dtype not in DTYPES:
        raise ProtocolError(f"a tensor of dtype {header.dtype[:40]!r}, which is not supported here")
    if len(header.shape) > MAX_DIMS or any(size < 0 for size in header.shape):
        raise ProtocolError("a tensor with an impossible shape (negative sizes, or too many dimensions)")
    if math.prod(max(1, size) for size in header.shape) > MAX_ELEMENTS:
        raise ProtocolError(f"a tensor of shape {header.shape[:8]} is larger than any memory")
    num_bytes = math.prod(header.shape) * DTYPES[header.dtype].itemsize
    if num_bytes > max_bytes:
        raise ProtocolError(f"a tensor of {num_bytes} bytes; a pipe takes at most {max_bytes}")
    return num_bytes


def flat_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes as uint8 `[num_bytes]`, on its device; a copy only where it is not contiguous."""
    flat = as_it_lies(tensor).contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def as_it_lies(tensor: Tensor) -> Tensor:
    """Without gradient, and with a conjugation or negation that was put off until now."""
    return tensor.detach().resolve_conj().resolve_neg()


def host_view(data: Tensor) -> memoryview:
    """Uint8 `[num_bytes]` in host memory, as Python sees it."""
    return data.numpy().data if data.numel() else memoryview(bytearray())


def shaped(data: Tensor, header: TensorHeader) -> Tensor:
    """Uint8 `[num_bytes]` as the tensor that the header describes, without a copy."""
    dtype = DTYPES[header.dtype]
    if not data.numel():
        return torch.empty(header.shape, dtype=dtype, device=data.device)
    return data.view(dtype).reshape(header.shape)
