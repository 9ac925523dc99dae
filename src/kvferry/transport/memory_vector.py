"""Pieces of this process's memory that go to a socket, or come from one, in order.

They are given to the kernel as the arrays that they are (`struct iovec`, `man 2 sendmsg`), not as a Python object
each: what Python does for a piece would cost as much as a short piece's copy.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

CALL_BYTES = 2**20
"""Offered to the kernel, or wanted of it, in one call: the pieces of one are looked through, taken or not."""
CALL_PIECES = 512
"""The same. Below Linux' IOV_MAX of 1024."""

ROW_BYTES = 16
"""Of `struct iovec`."""

_LIBRARY = ctypes.CDLL(None, use_errno=True)  # calls give up the GIL


class _Header(ctypes.Structure):
    """`struct msghdr`."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vector", ctypes.c_void_p),
        ("vector_length", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


def _function(name: str) -> Callable[..., int]:
    function = getattr(_LIBRARY, name)
    function.argtypes, function.restype = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int], ctypes.c_ssize_t
    found: Callable[..., int] = function
    return found


_SEND, _RECEIVE = _function("sendmsg"), _function("recvmsg")
_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class MemoryVector:
    """`lengths[i]` bytes at `addresses[i]`, int64, and how much of them is done.

    Whoever makes one has looked that the addresses are mapped, and that they stay so until it is done.
    """

    def __init__(self, addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        self._vector = np.stack((addresses, lengths), axis=1)
        self._ends = np.cumsum(lengths)
        self._header = _Header()
        self._first = 0
        self.num_bytes = int(self._ends[-1]) if len(lengths) else 0
        self.num_done = 0

    @property
    def num_left(self) -> int:
        """Bytes."""
        return self.num_bytes - self.num_done

    def send(self, sock: socket.socket) -> int:
        """What the kernel takes at once, in bytes. Raises `BlockingIOError` when that is nothing, or `OSError`."""
        self._offer()
        return self._call(_SEND, sock, _SEND_FLAGS)

    def receive(self, sock: socket.socket) -> tuple[int, int]:
        """(what was there, what was asked for), bytes. Raises as `send`; 0 were there when the peer has closed."""
        wanted = self._offer()
        return self._call(_RECEIVE, sock, socket.MSG_DONTWAIT), wanted

    def _offer(self) -> int:
        """Set up the next call: bytes that it covers."""
        end = int(np.searchsorted(self._ends, self.num_done + CALL_BYTES)) + 1
        end = min(end, self._first + CALL_PIECES, len(self._ends))
        self._header.vector = self._vector.ctypes.data + ROW_BYTES * self._first
        self._header.vector_length = end - self._first
        return int(self._ends[end - 1]) - self.num_done

    def _call(self, function: Callable[..., int], sock: socket.socket, flags: int) -> int:
        while (count := function(sock.fileno(), ctypes.byref(self._header), flags)) < 0:
            code = ctypes.get_errno()
            error = OSError(code, os.strerror(code))
            if not isinstance(error, InterruptedError):
                raise error
        self._advance(count)
        return count

    def _advance(self, num_bytes: int) -> None:
        self.num_done += num_bytes
        self._first = int(np.searchsorted(self._ends, self.num_done, side="right"))
        if self._first < len(self._ends):  # what is left of it
            row, left = self._vector[self._first], int(self._ends[self._first]) - self.num_done
            row[0] += int(row[1]) - left
            row[1] = left
