"""Copying pieces within this process's memory: all with one call into C where that could be compiled, else one by one.

A loop in Python costs 0.4 µs a piece: as much as the copy of a small one. In C, long pieces also go past the caches.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from kvferry.core.compiled import NotCompiled, compiled
from kvferry.transport.fabric.pieces import Pieces

log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-std=c++17", "-O2", "-march=native")

SHORT_BYTES = 2**20
"""Copied with the GIL kept: giving it up may cost a wait of milliseconds behind a thread that computes in Python."""
SHORT_PIECE_BYTES = 64 * 2**10
"""The same of a piece that goes by itself."""

ADDRESS_BITS = 47
"""What a process has on x86-64 and on 64-bit Arm, as the kernel maps it unless asked for more."""
MEMORY = memoryview((ctypes.c_char * 2**ADDRESS_BITS).from_address(0)).cast("B")
"""This process's memory as one row of bytes, indexed by address. Copying from slice to slice of it is the cheapest copy
of a short block that Python has: 0.4 µs beyond the copy itself, half of a call through ctypes. Whoever slices it has
looked that the addresses are mapped."""

CopyPieces = Callable[[Pieces], None]


@cache
def copier() -> CopyPieces:
    """What copies pieces, none of which overlap. The first call may compile for a second."""
    try:
        path = str(compiled([_SOURCE], _FLAGS))
        keeping, releasing = ctypes.PyDLL(path).copy_pieces, ctypes.CDLL(path).copy_pieces
    except (NotCompiled, OSError) as error:
        if str(error):
            log.warning("copies in shared memory go one by one, which is slower: %s", error)
        return copy_one_by_one
    for function in (keeping, releasing):
        function.argtypes, function.restype = [ctypes.c_void_p] * 3 + [ctypes.c_int64], None

    def copy(pieces: Pieces) -> None:
        remote, local, lengths = map(np.ascontiguousarray, (pieces.remote, pieces.local, pieces.lengths))
        call = keeping if int(lengths.sum()) <= SHORT_BYTES else releasing
        call(remote.ctypes.data, local.ctypes.data, lengths.ctypes.data, len(lengths))

    return copy


def copy_one_by_one(pieces: Pieces) -> None:
    """The same in Python."""
    memory = MEMORY
    for source, target, length in pieces.rows():
        if length <= SHORT_PIECE_BYTES:
            memory[target : target + length] = memory[source : source + length]
        else:
            ctypes.memmove(target, source, length)
