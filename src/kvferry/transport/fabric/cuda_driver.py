"""The few calls of the CUDA driver that sharing device memory between processes needs, through ctypes.

Owns one retained primary context and one stream. Every call makes the context current, so any thread may call.
"""

from __future__ import annotations

import ctypes
from typing import Any

from kvferry.core.errors import ConfigError, PeerLost

HANDLE_BYTES = 64
NOT_READY = 600
LAZY_PEER_ACCESS = 1
NON_BLOCKING = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaDriver:
    """The driver, with a context and a stream on one device. Raises `ConfigError` without a driver or this device."""

    def __init__(self, device: int) -> None:
        try:
            self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError("transport cuda_ipc needs the CUDA driver, and libcuda.so.1 is not here") from error
        self._device, self._context, self._stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        try:
            self._call("cuInit", 0)
            self._call("cuDeviceGet", ctypes.byref(self._device), device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
            self.make_current()
            self._call("cuStreamCreate", ctypes.byref(self._stream), NON_BLOCKING)
        except PeerLost as error:
            raise ConfigError(f"transport cuda_ipc cannot use device {device}: {error}") from error

    def export(self, address: int) -> tuple[bytes, int]:
        """(handle of the allocation that contains `address`, offset of `address` in it). Raises `ConfigError` if the
        memory cannot be shared, such as that of expandable segments."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        self.make_current()
        try:
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        except PeerLost as error:
            raise ConfigError(
                f"this device memory cannot be shared between processes ({error}); with PyTorch's expandable segments"
                " it never can: unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF, or use transport nixl"
            ) from error
        return bytes(handle), address - base.value

    def open(self, handle: bytes) -> int:
        """Map another process's allocation. Returns its address here. Raises `PeerLost`."""
        found = ctypes.c_uint64()
        self.make_current()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(found),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(LAZY_PEER_ACCESS),
        )
        return found.value

    def unmap(self, address: int) -> None:
        """Remove a mapping."""
        self.make_current()
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Begin a copy between device addresses; copies are made in the order in which they were begun."""
        pointers = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self._call("cuMemcpyDtoDAsync_v2", *pointers, ctypes.c_size_t(num_bytes), self._stream)

    def is_idle(self) -> bool:
        """Whether all copies that were begun are done. Raises `PeerLost` if one has failed."""
        self.make_current()
        return self._call("cuStreamQuery", self._stream, allowed=NOT_READY) == 0

    def close(self) -> None:
        """Release stream and context."""
        self.make_current()
        self._call("cuStreamDestroy_v2", self._stream)
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def make_current(self) -> None:
        """Use this device on this thread. Call it before the first of several copies."""
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any, allowed: int = 0) -> int:
        result: int = getattr(self._cuda, name)(*arguments)
        if result not in (0, allowed):
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(result, ctypes.byref(text))
            raise PeerLost(f"{name}: {(text.value or b'unknown error').decode()} ({result})")
        return result
