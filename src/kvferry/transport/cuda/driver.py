"""The few calls of the CUDA driver that are needed to share and to copy device memory, through ctypes.

Owns one retained primary context. Any thread may call; `make_current` comes before the calls of a thread.
"""

from __future__ import annotations

import ctypes
from typing import Any

from kvferry.core.errors import ConfigError, PeerLost

HANDLE_BYTES = 64
NOT_READY = 600
LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaDriver:
    """The driver, with a context on one device. Raises `ConfigError` without a driver or this device."""

    def __init__(self, device: str) -> None:
        """`device`: "cuda" (the first) or "cuda:1"."""
        try:
            self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError("KV in GPU memory needs the CUDA driver, and libcuda.so.1 is not here") from error
        self._device, self._context = ctypes.c_int(), ctypes.c_void_p()
        try:
            self.call("cuInit", 0)
            self.call("cuDeviceGet", ctypes.byref(self._device), int(device.partition(":")[2] or 0))
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        except PeerLost as error:
            raise ConfigError(f"the CUDA driver cannot use {device}: {error}") from error

    def export(self, address: int) -> tuple[bytes, int]:
        """(handle of the allocation that contains `address`, offset of `address` in it). Raises `ConfigError` if the
        memory cannot be shared, as in expandable segments."""
        handle = _Handle()
        try:
            base, _ = self.allocation(address)
            self.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        except PeerLost as error:
            raise ConfigError(
                f"this device memory cannot be shared between processes ({error}); with PyTorch's expandable segments"
                " it never can: unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF, or use transport nixl"
            ) from error
        return bytes(handle), address - base

    def open(self, handle: bytes) -> tuple[int, int]:
        """Map another process's allocation. Returns its address in this process, and its size in bytes. Raises
        `PeerLost`."""
        address = ctypes.c_uint64()
        self.make_current()
        self.call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(LAZY_PEER_ACCESS),
        )
        try:
            return address.value, self.allocation(address.value)[1]
        except PeerLost:
            self.unmap(address.value)
            raise

    def allocation(self, address: int) -> tuple[int, int]:
        """(address, size in bytes) of the allocation that contains `address`. Raises `PeerLost` if none does."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.make_current()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def unmap(self, address: int) -> None:
        """Remove a mapping."""
        self.make_current()
        self.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def close(self) -> None:
        """Release the context."""
        self.call("cuDevicePrimaryCtxRelease_v2", self._device)

    def make_current(self) -> None:
        """Use this device on this thread."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: Any, allowed: int = 0) -> int:
        """Call a function of the driver, without the interpreter's lock. Returns its result, 0 or `allowed`. Raises
        `PeerLost` for any other."""
        result: int = getattr(self._cuda, name)(*arguments)
        if result not in (0, allowed):
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(result, ctypes.byref(text))
            raise PeerLost(f"{name}: {(text.value or b'unknown error').decode()} ({result})")
        return result
