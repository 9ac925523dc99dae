"""Makes a loaded model independent of its files.

safetensors and PyTorch map a checkpoint's files into memory. A mapped weight follows its file: overwriting the file in
place changes the answers, and truncating it ends the process (SIGBUS).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

MAPS = Path("/proc/self/maps")


class MappedFiles:
    """The ranges of this process's memory that are mapped from files. Where the system does not list them (only Linux
    does), all memory counts as mapped."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.paths: set[str] = set()
        self._is_listed = MAPS.is_file()
        for line in MAPS.read_text().splitlines() if self._is_listed else ():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):  # others are "[heap]" and the like
                start, _, end = fields[0].partition("-")
                self._starts.append(int(start, 16))
                self._ends.append(int(end, 16))
                self.paths.add(fields[5])

    def __contains__(self, address: int) -> bool:
        index = bisect.bisect_right(self._starts, address) - 1
        return not self._is_listed or (index >= 0 and address < self._ends[index])


def own_memory(module: nn.Module) -> None:
    """Copy all parameters and buffers in host memory that are mapped from files into memory of this process. Shared
    tensors stay shared."""
    mapped = MappedFiles()
    copies: dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], Tensor] = {}
    for tensor in _tensors(module):
        if tensor.device.type == "cpu" and tensor.numel() and tensor.data_ptr() in mapped:
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if key not in copies:
                copies[key] = tensor.detach().clone()
            tensor.data = copies[key]


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Every parameter and buffer with memory of its own; for sharded ones, this rank's shard."""
    for tensor in [*module.parameters(), *module.buffers()]:
        with torch.no_grad():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if type(local) in (Tensor, nn.Parameter):
            yield local
