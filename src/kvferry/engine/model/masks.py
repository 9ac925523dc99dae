"""Which positions each layer's attention may see, read from the masks that the model itself builds.

transformers builds every mask from a function of (query position, key position). While a model is probed, these
functions are kept instead of being expanded to tensors, so that they can be evaluated at positions far beyond the
probe's own tokens: two tokens are enough to find a window of thousands. The mask decides, whatever else a layer says
about itself: some families have a window in the mask only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvferry.core.errors import UnsupportedModel

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query position, key position) → whether the key is seen; broadcasts."""

MAX_POSITIONS = 1 << 22
"""Masks are evaluated up to this position at most."""


@dataclass
class SeenMasks:
    """The masks of one forward pass: the placeholders that the model passes on, and their functions."""

    made: list[tuple[Tensor, MaskFunction]] = field(default_factory=list)

    def build(self, *, q_length: int, kv_length: int, mask_function: MaskFunction, **others: Any) -> Tensor:
        """transformers' mask interface. Returns a placeholder, bool [1, 1, q_length, kv_length]."""
        stand_in = torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=others.get("device"))
        self.made.append((stand_in, mask_function))
        return stand_in

    def function_of(self, mask: Tensor) -> MaskFunction | None:
        """The function of a placeholder, or of a slice that is all of one; None if `mask` is something that the model
        has made itself."""
        return next((function for stand_in, function in self.made if _is_whole(mask, stand_in)), None)


def _is_whole(mask: Tensor, stand_in: Tensor) -> bool:
    return mask.data_ptr() == stand_in.data_ptr() and mask.shape == stand_in.shape


def window_of(function: MaskFunction, num_positions: int, device: torch.device, who: str) -> int | None:
    """The sliding window of a causal mask, the token itself included; None: full attention. `who` names the model in
    errors.

    Raises `UnsupportedModel` if the mask is neither of the two somewhere up to `num_positions`.
    """
    last = min(num_positions, MAX_POSITIONS) - 1
    keys = torch.arange(last + 1, device=device)
    window = int(_row(function, last, keys, who).sum())
    borders = {0, 1, 2, 3, window - 1, window, window + 1, 2 * window, last // 2, last - 1, last}
    for position in sorted(position for position in borders if 0 <= position <= last):
        expected = (keys <= position) & (keys > position - window)
        if not torch.equal(_row(function, position, keys, who), expected):
            raise UnsupportedModel(
                f"{who} has an attention mask that is neither causal nor a sliding window (at position {position})"
            )
    return None if window == last + 1 else window


def _row(function: MaskFunction, position: int, keys: Tensor, who: str) -> Tensor:
    """bool [len(keys)]: whether the query at `position` sees each key."""
    zero = torch.zeros(1, dtype=torch.long, device=keys.device)
    try:
        return torch.as_tensor(function(zero, zero, zero + position, keys), device=keys.device).expand(len(keys))
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"{who} has an attention mask that depends on more than positions ({error})") from error
