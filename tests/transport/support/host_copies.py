"""The copies of a GPU in host memory, as late as they may be: when they are waited for, or asked about often enough."""

from __future__ import annotations

import ctypes

from kvferry.transport.cuda.copies import CopyLimits, CudaCopies
from kvferry.transport.memory import Pieces


class HostCopies(CudaCopies):
    """`begin`, `is_idle`, `wait` and `close` of `CudaCopies` without a GPU."""

    def __init__(self, driver: object = None, limits: CopyLimits = CopyLimits()) -> None:  # noqa: B008, frozen
        self.limits = limits
        self.begun: list[tuple[int, int, int]] = []
        self.num_asked = 0
        self.is_open = True

    def begin(self, pieces: Pieces) -> None:
        assert self.is_open
        assert len(pieces) <= self.limits.max_pieces
        self.wait()
        self.begun = list(pieces.rows())

    def is_idle(self) -> bool:
        self.num_asked += 1
        if self.begun and self.num_asked % 3 == 0:
            self._copy(*self.begun.pop(0))
        return not self.begun

    def wait(self) -> None:
        while self.begun:
            self._copy(*self.begun.pop(0))

    def close(self) -> None:
        assert not self.begun
        self.is_open = False

    def _copy(self, source: int, target: int, num_bytes: int) -> None:
        ctypes.memmove(target, source, num_bytes)
