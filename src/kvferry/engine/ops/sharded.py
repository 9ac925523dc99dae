"""Linear layers of one tensor-parallel rank, with plain local weights instead of transformers' DTensors.

They compute the same with the same collective operations. But each product is an ordinary `nn.Linear`, which
`transform` packs for the CPU, and a call has no overhead of DTensor. Layers of other styles stay as transformers made
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class SummedLinear(nn.Module):
    """Each rank multiplies its share of the inputs, and the products are summed over all ranks: transformers'
    `rowwise`."""

    bias: Tensor | None

    def __init__(self, shard: nn.Linear, bias: Tensor | None) -> None:
        super().__init__()
        self.shard = shard
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features / ranks] → [..., out_features], the same on every rank."""
        out = _summed(self.shard(x))
        return out if self.bias is None else out + self.bias


def _summed(part: Tensor) -> Tensor:
    """The sum over all ranks. A row gives the same bits at any position in the batch.

    A ring all-reduce adds in an order that depends on the position of an element. For two ranks there is only one
    order.
    """
    if dist.get_world_size() <= 2:
        dist.all_reduce(part)
        return part
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    total = parts[0].float()
    for addend in parts[1:]:
        total += addend
    return total.to(part.dtype)


class GatheredLinear(nn.Module):
    """Each rank computes its share of the outputs, and the shares are concatenated: transformers'
    `colwise_gather_output`."""

    def __init__(self, shard: nn.Linear) -> None:
        super().__init__()
        self.shard = shard

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] → [..., out_features], the same on every rank."""
        part: Tensor = self.shard(x)
        all_ranks = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(all_ranks, part.contiguous())
        return torch.cat(all_ranks, dim=-1)


def replace_sharded_linears(model: Any) -> int:
    """Replace the sharded linear layers of `model` that can be replaced. Returns their number. All ranks must call this
    together."""
    count = 0
    for parent_name, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            style = model.tp_plan.get(_plan_pattern(f"{parent_name}.{name}" if parent_name else name))
            build = _BUILDERS.get(style)
            if build is not None and type(child) is nn.Linear and _is_evenly_sharded(child):
                setattr(parent, name, build(child))
                count += 1
    return count


def _plan_pattern(name: str) -> str:
    """A module's name as transformers' plans write it: `layers.*.mlp` for `layers.3.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _is_evenly_sharded(linear: nn.Linear) -> bool:
    weight: Any = linear.weight
    placements: Any = getattr(weight, "placements", ())
    if len(placements) != 1 or not placements[0].is_shard():
        return False
    size: int = weight.shape[placements[0].dim]
    return size % dist.get_world_size() == 0


def _colwise(linear: nn.Linear) -> nn.Linear:
    return _linear_of(_local_tensor(linear.weight), None if linear.bias is None else _local_tensor(linear.bias))


def _rowwise(linear: nn.Linear) -> SummedLinear:
    return SummedLinear(
        _linear_of(_local_tensor(linear.weight), None), None if linear.bias is None else _local_tensor(linear.bias)
    )


def _gathered(linear: nn.Linear) -> GatheredLinear:
    return GatheredLinear(_colwise(linear))


_BUILDERS: dict[str | None, Callable[[nn.Linear], nn.Module]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "colwise_gather_output": _gathered,
}


def _linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear.eval()


def _local_tensor(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, as a plain tensor."""
    local: Tensor = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().contiguous()
    return local
