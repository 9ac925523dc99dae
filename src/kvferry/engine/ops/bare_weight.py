"""Weights that modelling code multiplies by itself, with `F.linear`, rather than through `nn.Linear`: routers, mostly.

Such a weight becomes a tensor that answers `F.linear` with the packed product, through torch's own protocol for tensors
that override functions; everything else is done with it as before. So these products too give a row the same bits
whatever the rows beside it.
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
        """The same numbers; the caller puts it in the place of `weight`."""
        made = weight.detach().clone().as_subclass(cls)
        made._packed, made._wide = {}, None
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch calls this for every function that is given one."""
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
                self._packed[key] = PackedLinear(self.as_subclass(Tensor), bias), bias  # which keeps its id its own
        out: Tensor = self._packed[key][0].forward(x)
        return out

    def _widened(self, values: Tensor) -> BareWeight:
        """This in float32; the same each time, since it is packed once."""
        if self.dtype == torch.float32:
            return self
        if self._wide is None:
            self._wide = BareWeight.of(values.as_subclass(Tensor))
        return self._wide


class _Products(TorchFunctionMode):
    """While it lasts, notes which parameters come into `F.linear` as weights, as they are or cast."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplied: set[int] = set()
        self._sources: dict[int, Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _CASTS and isinstance(args[0], nn.Parameter):
            self._sources[id(result)] = args[0]
            self._kept = result  # so that its id is not given to another
        if function is functional.linear and len(args) > 1:
            self.multiplied.add(id(self._sources.get(id(args[1]), args[1])))
        return result


def pack_bare_weights(model: nn.Module, run: Any) -> int:
    """Replace what `run(model)`, a forward, multiplies by `F.linear` outside of `nn.Linear`; returns how many."""
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
