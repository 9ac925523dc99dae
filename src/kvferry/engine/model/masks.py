"""The positions that each layer's attention may see, read from the masks that the model itself builds.

transformers builds every mask from a function of (query position, key position). While a model is probed, these
functions are recorded instead of being expanded to tensors, so that they can be evaluated at positions far beyond the
probe's own tokens: two tokens are enough to find a window of thousands. The mask decides, not a layer's attributes:
some families have a window in the mask only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvferry.core.errors import UnsupportedModel

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query position, key position) → True if the key is visible; broadcasts."""

MAX_POSITIONS = 1 << 22
"""Max position up to which masks are evaluated."""


@dataclass
class MaskRecorder:
    """The masks of one forward pass: the placeholders that the model passes on, and their functions."""

    recorded: list[tuple[Tensor, MaskFunction]] = field(default_factory=list)

    def build(self, *, q_length: int, kv_length: int, mask_function: MaskFunction, **others: Any) -> Tensor:
        """transformers' mask interface. Returns a placeholder, bool [1, 1, q_length, kv_length]."""
        placeholder = torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=others.get("device"))
        self.recorded.append((placeholder, mask_function))
        return placeholder

    def function_of(self, mask: Tensor) -> MaskFunction | None:
        """The function of a placeholder, or of a slice that is all of one; None if the model built
        `mask` itself."""
        return next((function for placeholder, function in self.recorded if _is_same(mask, placeholder)), None)


def _is_same(mask: Tensor, placeholder: Tensor) -> bool:
    return mask.data_ptr() == placeholder.data_ptr() and mask.shape == placeholder.shape


def window_of(function: MaskFunction, num_positions: int, device: torch.device, model_name: str) -> int | None:
    """The sliding window of a causal mask, the token itself included; None: full attention. `model_name` names the
    model in errors.

    Raises `UnsupportedModel` if the mask is neither of the two somewhere up to `num_positions`.
    """
    last = min(num_positions, MAX_POSITIONS) - 1
    keys = torch.arange(last + 1, device=device)
    window = int(_row(function, last, keys, model_name).sum())
    borders = {0, 1, 2, 3, window - 1, window, window + 1, 2 * window, last // 2, last - 1, last}
    for position in sorted(position for position in borders if 0 <= position <= last):
        expected = (keys <= position) & (keys > position - window)
        if not torch.equal(_row(function, position, keys, model_name), expected):
            raise UnsupportedModel(
                f"{model_name} has an attention mask that is neither causal nor a sliding window (position {position})"
            )
    return None if window == last + 1 else window


def _row(function: MaskFunction, position: int, keys: Tensor, model_name: str) -> Tensor:
    """bool [len(keys)]: true for keys that the query at `position` sees."""
    zero = torch.zeros(1, dtype=torch.long, device=keys.device)
    try:
        return torch.as_tensor(function(zero, zero, zero + position, keys), device=keys.device).expand(len(keys))
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"{model_name} has an attention mask that depends on more than positions ({error})"
        ) from error
