"""Weights that modelling code multiplies by itself with `F.linear` instead of through `nn.Linear`: mostly those of MoE
routers.

Such a weight becomes a tensor that computes `F.linear` with the packed product, through torch's protocol for tensor
subclasses; every other function treats it as before. So these products, too, give a row the same bits in any batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kvferry.engine.ops.linear import PACKABLE, PackedLinear

_CASTS = (Tensor.float, Tensor.type, Tensor.to)


class BareWeight(Tensor):
    """A weight [out_features, in_features] that is also packed; made by `of`."""

    _packed: dict[int | None, tuple[PackedLinear, Any]]
    _wide: BareWeight | None

    @classmethod
    def of(cls, weight: Tensor) -> BareWeight:
        """A copy of `weight` that the caller puts in its place."""
        made = weight.detach().clone().as_subclass(cls)
        made._packed, made._wide = {}, None
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every function that gets such a tensor."""
        kwargs = kwargs or {}
        if function is functional.linear and type(args[1]) is cls and args[0].dtype == args[1].dtype:
            return args[1]._product(args[0], *args[2:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        if function in _CASTS and type(args[0]) is cls and result.dtype == torch.float32:
            return args[0]._widened(result)
        return result

    def _product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        key = None if bias is None else id(bias)
        if key not in self._packed:
            with torch._C.DisableTorchFunctionSubclass():
                self._packed[key] = (
                    PackedLinear(self.as_subclass(Tensor), bias),
                    bias,
                )  # keeps its id unique
        out: Tensor = self._packed[key][0].forward(x)
        return out

    def _widened(self, values: Tensor) -> BareWeight:
        """This weight in float32; the same object each time, so that it is packed only once."""
        if self.dtype == torch.float32:
            return self
        if self._wide is None:
            self._wide = BareWeight.of(values.as_subclass(Tensor))
        return self._wide


class _Products(TorchFunctionMode):
    """Notes, while active, which parameters are used as weights of `F.linear`, as they are or cast."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplied: set[int] = set()
        self._sources: dict[int, Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _CASTS and isinstance(args[0], nn.Parameter):
            self._sources[id(result)] = args[0]
            self._kept = result  # keeps its id unique
        if function is functional.linear and len(args) > 1:
            self.multiplied.add(id(self._sources.get(id(args[1]), args[1])))
        return result


def pack_bare_weights(model: nn.Module, run: Any) -> int:
    """Replace the parameters that `run(model)`, a forward pass, multiplies by `F.linear` outside of `nn.Linear`.
    Returns how many."""
    with _Products() as products:
        run(model)
    count = 0
    for module in model.modules():
        for name, value in list(module._parameters.items()):
            if id(value) in products.multiplied and _is_plain(module, value):
                delattr(module, name)
                setattr(module, name, BareWeight.of(value))  # type: ignore[arg-type]
                count += 1
    return count


def _is_plain(module: nn.Module, weight: Any) -> bool:
    return (
        type(weight) is nn.Parameter
        and type(module) not in (nn.Linear, nn.Embedding)
        and weight.ndim == 2
        and weight.device.type == "cpu"
        and weight.dtype in PACKABLE
    )
