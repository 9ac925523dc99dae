"""KV memory as uint8 tensors, on whichever device it is: blocks are gathered into one tensor, and scattered from one.

Owns nothing; not to be used once the KV cache is closed.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvferry.core.errors import ProtocolError
from kvferry.transport.memory import BlockMemory, Region, Span


class BlockBytes:
    """See the module."""

    def __init__(self, memory: BlockMemory) -> None:
        self.device = torch.device(memory.device)
        self._regions = [_as_tensor(region, self.device) for region in memory.regions]
        self._starts = list(accumulate((region.num_bytes for region in memory.regions), initial=0))

    def gather(self, spans: Sequence[Span]) -> Tensor:
        """A new tensor with the spans' bytes, in order."""
        return torch.cat([self._view(span) for span in spans])

    def scatter(self, data: Tensor, spans: Sequence[Span]) -> None:
        """Fill the spans with the data, which is as long as they are. Done when it returns."""
        start = 0
        for span in spans:
            self._view(span).copy_(data[start : start + span[1]])
            start += span[1]
        if self.device.type != "cpu":
            torch.cuda.current_stream(self.device).synchronize()

    def _view(self, span: Span) -> Tensor:
        offset, length = span
        index = bisect_right(self._starts, offset) - 1
        if offset < 0 or length <= 0 or index >= len(self._regions) or offset + length > self._starts[index + 1]:
            raise ProtocolError(f"bytes {offset} to {offset + length} lie outside of the region")
        start = offset - self._starts[index]
        return self._regions[index][start : start + length]


def pieces_of(spans: Sequence[Span], largest: int) -> Iterator[list[Span]]:
    """The spans, in order, in groups of at most `largest` bytes."""
    group: list[Span] = []
    room = largest
    for offset, length in spans:
        while length:
            taken = min(length, room)
            group.append((offset, taken))
            offset, length, room = offset + taken, length - taken, room - taken
            if not room:
                yield group
                group, room = [], largest
    if group:
        yield group


def take_front(spans: Sequence[Span], num_bytes: int) -> tuple[list[Span], list[Span]]:
    """The spans of the first `num_bytes`, and of the rest."""
    front, rest = [], list[Span]()
    for offset, length in spans:
        taken = min(length, num_bytes)
        if taken:
            front.append((offset, taken))
        if taken < length:
            rest.append((offset + taken, length - taken))
        num_bytes -= taken
    return front, rest


class _DeviceMemory:
    """How device memory of a known address is shown to torch."""

    def __init__(self, region: Region) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (region.num_bytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "strides": None,
            "version": 2,
        }


def _as_tensor(region: Region, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_char * region.num_bytes).from_address(region.address), dtype=torch.uint8)
    return torch.as_tensor(_DeviceMemory(region), device=device)
