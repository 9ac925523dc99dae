"""Copies of many small pieces with one kernel: between device memory, a peer's mapped memory and pinned host memory.

The driver's own copies take 4 to 6 µs each to begin, which is more than a block of 64 KiB takes to copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from kvferry.transport.cuda.driver import NOT_READY, CudaDriver
from kvferry.transport.memory import Pieces

NUM_BLOCKS, NUM_THREADS = 32, 512
"""As many blocks of threads as copy at a good speed and leave most of the GPU to the model."""
NON_BLOCKING = 1
COLUMNS = 3


@dataclass(frozen=True)
class CopyLimits:
    """Bounds of one `CudaCopies.begin`. `max_bytes` take a few milliseconds at the speed of PCIe. Pieces of more than
    `piece_bytes` are divided, so that all blocks of threads have some."""

    max_pieces: int = 16384
    max_bytes: int = 256 * 2**20
    piece_bytes: int = 256 * 2**10


class CudaCopies:
    """A stream of copies, one `begin` at a time. Owns the stream, the kernel, the table that it reads, and the driver
    if `owns_driver`."""

    def __init__(
        self,
        driver: CudaDriver,
        *,
        owns_driver: bool = False,
        limits: CopyLimits = CopyLimits(),
    ) -> None:
        self._driver, self._owns_driver, self.limits = driver, owns_driver, limits
        self._stream, self._module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._table = ctypes.c_void_p()
        code = files(__package__).joinpath("copy.ptx").read_bytes()
        driver.make_current()
        driver.call("cuModuleLoadData", ctypes.byref(self._module), ctypes.c_char_p(code))
        driver.call("cuModuleGetFunction", ctypes.byref(self._kernel), self._module, b"kvferry_copy")
        driver.call("cuStreamCreate", ctypes.byref(self._stream), NON_BLOCKING)
        num_bytes = limits.max_pieces * COLUMNS * 8
        driver.call("cuMemHostAlloc", ctypes.byref(self._table), ctypes.c_size_t(num_bytes), 0)
        memory = memoryview((ctypes.c_char * num_bytes).from_address(self._table.value or 0))
        self._rows = np.frombuffer(memory, np.uint64).reshape(limits.max_pieces, COLUMNS)

    def copy(self, pieces: Pieces) -> None:
        """Copy each piece from `remote` to `local`; `wait` waits for the last of them. Sizes and number may be any."""
        for part in self.parts(pieces):
            self.begin(part)

    def parts(self, pieces: Pieces) -> Iterator[Pieces]:
        """The pieces, divided into as many as one `begin` can take."""
        return pieces.divided(self.limits.piece_bytes).slices(self.limits.max_bytes, self.limits.max_pieces)

    def begin(self, pieces: Pieces) -> None:
        """Begin to copy pieces when the copies before have ended: at most one of `parts`. All addresses must be mapped:
        one that is not would end the process's use of the GPU."""
        self.wait()
        for column, values in enumerate((pieces.remote, pieces.local, pieces.lengths)):
            self._rows[: len(pieces), column] = values
        arguments = self._table, ctypes.c_uint(len(pieces))
        pointers = (ctypes.c_void_p * 2)(*(ctypes.cast(ctypes.byref(each), ctypes.c_void_p) for each in arguments))
        grid, block = (min(NUM_BLOCKS, len(pieces)), 1, 1), (NUM_THREADS, 1, 1)
        self._driver.make_current()
        self._driver.call("cuLaunchKernel", self._kernel, *grid, *block, 0, self._stream, pointers, None)

    def is_idle(self) -> bool:
        """True if all copies are done. Raises `PeerLost` if one has failed."""
        self._driver.make_current()
        return self._driver.call("cuStreamQuery", self._stream, allowed=NOT_READY) == 0

    def wait(self) -> None:
        """Return when all copies are done. Raises `PeerLost` if one has failed."""
        self._driver.make_current()
        self._driver.call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Wait for the copies, and free their resources."""
        self._driver.make_current()
        self._driver.call("cuStreamDestroy_v2", self._stream)
        self._driver.call("cuMemFreeHost", self._table)
        self._driver.call("cuModuleUnload", self._module)
        if self._owns_driver:
            self._driver.close()


def pinned_memory(num_bytes: int) -> memoryview:
    """Host memory that the GPU can access, from PyTorch's cache of it, to which it returns with its last view. Raises
    `MemoryError` if there is no more."""
    import torch  # if KV is on a device, the engine has it installed

    try:
        array: Any = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError as error:
        raise MemoryError(f"no more pinned host memory: {error}") from error
    return memoryview(array)


def device_wait(device: str) -> Callable[[], None] | None:
    """A function that waits for all work that this thread has queued on the device, such as a model's kernels. None for
    host memory."""
    if device == "cpu":
        return None
    import torch

    return lambda: torch.cuda.current_stream(device).synchronize()
