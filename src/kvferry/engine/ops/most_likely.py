"""The most likely token of those that a mask permits, in one pass over the logits of a sequence."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvferry.engine.ops.native import library

Bits = npt.NDArray[np.uint8]
"""Permitted tokens [ceil(vocab / 8)], one bit for each token of the vocabulary, the lowest first. Bits beyond the
vocabulary are 0."""

_EXCLUSIONS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
_EXCLUSIONS = _EXCLUSIONS.astype(np.float32)
"""By eight bits, what is added to the logits of their tokens."""


def most_likely_permitted(logits: Tensor, permitted: Bits) -> int | None:
    """The first of the largest logits [vocab] among permitted tokens; None: none is above minus infinity. Logits:
    float32 on the CPU, without NaN."""
    native = library()
    if native is not None and logits.is_contiguous():
        token = int(native.most_likely_permitted(logits.data_ptr(), permitted.ctypes.data, len(logits)))
        return None if token < 0 else token
    masked = (logits + exclusions(permitted, logits)).numpy()
    token = int(masked.argmax())
    return None if masked[token] == -np.inf else token


def exclusions(permitted: Bits, logits: Tensor) -> Tensor:
    """Zero for each permitted token and minus infinity for the others, as `logits` [vocab]. Adding them takes a third
    of the time of a masked fill or less."""
    if logits.is_cpu:
        added = torch.from_numpy(_EXCLUSIONS.take(permitted, axis=0))
    else:
        table, rows = (torch.from_numpy(array).to(logits.device) for array in (_EXCLUSIONS, permitted))
        added = table.index_select(0, rows.int())
    return added.flatten()[: len(logits)]
