"""Weights that modelling code multiplies with `F.linear` directly instead of through `nn.Linear`, mostly in MoE
routers. They are packed too, so that these products also give a row the same bits in any batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kvferry.engine.ops.linear import PackedLinear, factors_of, is_plain_weight

_CASTS = (Tensor.float, Tensor.type, Tensor.to)


class _Products(TorchFunctionMode):
    """Records, while active, the parameters that are used as weights of `F.linear`, directly or after a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplied: set[int] = set()
        self._sources: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []
        """Results of casts, kept alive so that their ids are not reused."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _CASTS and isinstance(args[0], nn.Parameter):
            self._sources[id(result)] = args[0]
            self._kept.append(result)
        if function is functional.linear:
            weight = factors_of(*args, **(kwargs or {}))[1]
            self.multiplied.add(id(self._sources.get(id(weight), weight)))
        return result


def pack_bare_weights(model: nn.Module, run: Any) -> int:
    """Replace the parameters that `run(model)`, a forward pass, multiplies by `F.linear` outside of `nn.Linear`.
    Returns their number."""
    with _Products() as products:
        run(model)
    count = 0
    for module in model.modules():
        for name, value in list(module._parameters.items()):
            is_own = type(module) not in (nn.Linear, nn.Embedding) and id(value) in products.multiplied
            if value is not None and is_own and is_plain_weight(value):
                delattr(module, name)
                setattr(module, name, PackedLinear(value).weight)
                count += 1
    return count
