"""Ranges of this process's memory that are sent to a socket, or received from one, in order.

The kernel gets them as an array (`struct iovec`, `man 2 sendmsg`). There is no Python object for each range, which
would cost as much as the copy of a short range.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

CALL_BYTES = 2**20
"""A call offers ranges to the kernel until they have at least this many bytes, so the last range may exceed it. More
would cost time: the kernel examines all ranges of a call even if it moves few bytes."""
CALL_PIECES = 512
"""Maximum number of ranges offered to the kernel in one call. Below Linux' IOV_MAX of 1024."""
IOVEC_BYTES = 16
"""Size of a `struct iovec`."""

_LIBRARY = ctypes.CDLL(None, use_errno=True)  # calls release the GIL


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
    typed_function: Callable[..., int] = function
    return typed_function


_SEND, _RECEIVE = _function("sendmsg"), _function("recvmsg")
_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class MemoryVector:
    """`lengths[i]` bytes (not 0) at `addresses[i]`, both int64, and the number of bytes that are done. The caller must
    have checked that the addresses are mapped, and must keep them mapped until all bytes are done."""

    def __init__(self, addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        self._vector = np.stack((addresses, lengths), axis=1)
        self._ends = np.cumsum(lengths)
        self._header = _Header()
        self._first = 0
        self.num_bytes = int(self._ends[-1]) if len(lengths) else 0
        self.num_done = 0

    @property
    def num_left(self) -> int:
        """Number of bytes that are not done yet."""
        return self.num_bytes - self.num_done

    def send(self, sock: socket.socket) -> int:
        """Send as many bytes as the kernel accepts now, and return their number. Raises `BlockingIOError` if it accepts
        none, and other `OSError`s."""
        self._offer()
        return self._call(_SEND, sock, _SEND_FLAGS)

    def receive(self, sock: socket.socket) -> tuple[int, int]:
        """Receive the available bytes. Returns the number of bytes received, which is 0 when the peer has closed, and
        the number of bytes requested. Raises as `send`."""
        num_offered = self._offer()
        return self._call(_RECEIVE, sock, socket.MSG_DONTWAIT), num_offered

    def leading(self, limit: int) -> memoryview:
        """The next range that is not done, or its first `limit` bytes if it is longer."""
        address, length = (int(number) for number in self._vector[self._first])
        return _memory(address, min(length, limit))

    def gather(self, into: memoryview) -> int:
        """Copy bytes that are not done into `into`, from at most `CALL_PIECES` ranges. Returns the number of bytes
        copied. They do not count as done."""
        num_copied = 0
        for address, length in self._vector[self._first : self._first + CALL_PIECES].tolist():
            count = min(length, len(into) - num_copied)
            into[num_copied : num_copied + count] = _memory(address, count)
            num_copied += count
            if num_copied == len(into):
                break
        return num_copied

    def _offer(self) -> int:
        """Set up the header for the next call. Returns the number of bytes that it covers."""
        end = int(np.searchsorted(self._ends, self.num_done + CALL_BYTES)) + 1
        end = min(end, self._first + CALL_PIECES, len(self._ends))
        self._header.vector = self._vector.ctypes.data + IOVEC_BYTES * self._first
        self._header.vector_length = end - self._first
        return int(self._ends[end - 1]) - self.num_done

    def _call(self, function: Callable[..., int], sock: socket.socket, flags: int) -> int:
        while (count := function(sock.fileno(), ctypes.byref(self._header), flags)) < 0:
            code = ctypes.get_errno()
            error = OSError(code, os.strerror(code))
            if not isinstance(error, InterruptedError):
                raise error
        self.advance(count)
        return count

    def advance(self, num_bytes: int) -> None:
        """Record that `num_bytes` more bytes are done."""
        self.num_done += num_bytes
        num_left = int(self._ends[self._first]) - self.num_done
        if num_left < 0:
            self._first = int(np.searchsorted(self._ends, self.num_done, side="right"))
            num_left = int(self._ends[self._first]) - self.num_done if self.num_left else 0
        elif num_left == 0:
            self._first += 1
        if num_left > 0:  # of a range that is partly done
            row = self._vector[self._first]
            row[0] += int(row[1]) - num_left
            row[1] = num_left


def _memory(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
