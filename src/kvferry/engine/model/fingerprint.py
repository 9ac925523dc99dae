"""A name for a model's weights, the same however many ranks hold them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

MAX_SAMPLES = 65


def model_fingerprint(module: nn.Module) -> str:
    """A name for these weights in this number format: every tensor's name, shape, type and a sample of its values.

    Of a sharded tensor each rank brings the samples that it holds, so the ranks must call this together.
    """
    digest = hashlib.sha256()
    tensors = module.state_dict()
    gathered = _gathered([tensor for tensor in tensors.values() if is_sharded(tensor)])
    for name, tensor in tensors.items():
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        samples = next(gathered) if is_sharded(tensor) else _bits(_samples(tensor))
        digest.update(samples.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor of which this rank holds a part."""
    return any(hasattr(placement, "dim") for placement in getattr(tensor, "placements", ()))


def _samples(tensor: Any) -> Tensor:
    """Values spread over the whole tensor."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.reshape(-1)[:: max(1, local.numel() // 64)][:MAX_SAMPLES]


def _bits(values: Tensor) -> Tensor:
    """The values as float32, as int32: numbers that may be added without rounding."""
    return values.float().contiguous().view(torch.int32)


def _gathered(tensors: Sequence[Any]) -> Iterator[Tensor]:
    """What `_samples` would give for each of these sharded tensors if it were whole, as `_bits`."""
    if not tensors:
        return
    held = [_held_samples(tensor) for tensor in tensors]
    summed = torch.cat(held)
    dist.all_reduce(summed)
    yield from summed.split([len(samples) for samples in held])


def _held_samples(tensor: Any) -> Tensor:
    """The samples of a sharded tensor as `_bits`, with zeros for those that other ranks hold."""
    local: Tensor = tensor.to_local()
    places = np.arange(0, tensor.numel(), max(1, tensor.numel() // 64))[:MAX_SAMPLES]
    coordinates = list(np.unravel_index(places, tuple(tensor.shape)))
    dim = tensor.placements[0].dim % tensor.ndim
    local_index = np.full(tensor.shape[dim], -1)
    indices = _held_indices(tensor, dim)
    local_index[indices] = np.arange(len(indices))
    coordinates[dim] = local_index[coordinates[dim]]
    is_held = coordinates[dim] >= 0
    samples = torch.zeros(len(places), dtype=torch.int32, device=local.device)
    if is_held.any():
        chosen = tuple(torch.from_numpy(one[is_held]).to(local.device) for one in coordinates)
        samples[torch.from_numpy(is_held).to(local.device)] = _bits(local[chosen])
    return samples


def _held_indices(tensor: Any, dim: int) -> np.ndarray:
    """Which indices along `dim` of the whole tensor this rank holds, in the order in which it holds them."""
    shape = [1] * tensor.ndim
    shape[dim] = tensor.shape[dim]
    every = torch.arange(tensor.shape[dim], device=tensor.device).view(shape)
    # no data goes between the ranks: each cuts its share of the same numbers
    held = distribute_tensor(every, tensor.device_mesh, tensor.placements, src_data_rank=None)
    indices: np.ndarray = held.to_local().flatten().cpu().numpy()
    return indices
