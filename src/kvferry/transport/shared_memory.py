"""Segments of shared memory, each with one owner.

A segment is anonymous memory (`memfd_create`) that other processes of the same user open through its owner's
descriptor, `/proc/PID/fd/N`, which its name contains. So nothing can be left behind: the memory is freed with the last
mapping, even if processes end by SIGKILL. It does not count against the size of `/dev/shm`.

`multiprocessing.shared_memory` is not used: it leaves names behind, and before Python 3.13 its resource tracker removes
segments that another process still owns.
"""

from __future__ import annotations

import mmap
import os
import re
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvferry.core import entropy
from kvferry.core.errors import ConfigError, PeerLost
from kvferry.core.host.machine import usable_memory

_NAME = re.compile(r"(kvferry-[0-9a-f]{16})-(\d{1,10})-(\d{1,10})")
_owned: dict[str, int] = {}
"""Descriptors of this process's segments, by name."""


class SharedSegment:
    """One segment, mapped into this process. Made by `create` (the owner) or `attach`."""

    def __init__(self, name: str, mapping: mmap.mmap, *, owned: bool) -> None:
        self.name = name
        self.num_bytes = len(mapping)
        self.address = _address_of(mapping)
        """Address of the first byte in this process."""
        self._mapping: mmap.mmap | None = mapping
        self._close_descriptor = weakref.finalize(self, _close_descriptor, name) if owned else None

    @classmethod
    def create(cls, num_bytes: int, *, populated: bool = False) -> SharedSegment:
        """A new segment of zeros, owned by this process, with all its memory reserved.

        `populated`: its pages are also mapped now (half a second a GiB) and not each when it is first written to, which
        would make the first copy into a block several times as slow. Raises `ConfigError` if memory is short.
        """
        assert num_bytes > 0, "an empty segment"
        label = f"kvferry-{entropy.token_hex(8)}"
        try:
            descriptor = os.memfd_create(label, os.MFD_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"no shared memory on this machine (memfd_create): {error.strerror}") from error
        try:
            _reserve(descriptor, num_bytes)
            mapping = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED | (mmap.MAP_POPULATE if populated else 0))
        except BaseException:
            os.close(descriptor)
            raise
        name = f"{label}-{os.getpid()}-{descriptor}"
        _owned[name] = descriptor
        return cls(name, mapping, owned=True)

    @classmethod
    def attach(cls, name: str, *, writable: bool = False) -> SharedSegment:
        """Map another process's segment. Raises `PeerLost` if there is none of that name, `ConfigError` if this user
        may not open it."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise PeerLost(f"{name!r} is not the name of a kvferry shared memory segment")
        label, owner, number = match.groups()
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        descriptor = _open(name, Path("/proc") / owner / "fd" / number, label, os.O_RDWR if writable else os.O_RDONLY)
        try:
            return cls(name, mmap.mmap(descriptor, 0, access=access), owned=False)
        finally:
            os.close(descriptor)

    @property
    def buffer(self) -> mmap.mmap:
        """The mapping, for `torch.frombuffer` and the like. Not after `close`."""
        assert self._mapping is not None, "the segment is closed"
        return self._mapping

    def close(self) -> None:
        """Release the segment; may be called twice. Memory that a tensor still uses stays mapped until the tensor is
        freed, so that a late reader does not crash."""
        if self._close_descriptor is not None:
            self._close_descriptor()
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with suppress(BufferError):  # still in use: it is unmapped with the last view
                mapping.close()


def owned_segment_names() -> list[str]:
    """Names of this process's segments that can still be attached; for leak checks."""
    return list(_owned)


def _open(name: str, path: Path, label: str, flags: int) -> int:
    """Reopen the owner's descriptor, if it is still the segment: its number may be another file's by now."""
    gone_error = PeerLost(f"shared memory segment {name} is gone; its owner has ended, or closed it")
    try:
        if not _is_labelled(path, label):  # checked first: opening a file of another kind may have side effects
            raise gone_error
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise gone_error from error
    except OSError as error:
        raise ConfigError(f"cannot open shared memory segment {name}: {error.strerror}") from error
    if not _is_labelled(Path(f"/proc/self/fd/{descriptor}"), label):
        os.close(descriptor)
        raise gone_error
    return descriptor


def _is_labelled(path: Path, label: str) -> bool:
    return str(path.readlink()).startswith(f"/memfd:{label} ")


def _close_descriptor(name: str) -> None:
    """Close the owner's descriptor, so that no process can attach the segment any more."""
    os.close(_owned.pop(name))


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Set the segment's size and reserve its memory: later, a lack of memory would be a SIGBUS on a write."""
    limits = usable_memory()
    try:
        if num_bytes > limits.available_with_swap:  # the kernel would kill a process rather than refuse
            raise OSError(0, "not enough memory")
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        raise ConfigError(
            f"cannot take {num_bytes / 2**20:.0f} MiB of shared memory: {error.strerror};"
            f" {limits.available / 2**20:.0f} MiB are free; lower --kv-cache-memory"
        ) from error


def _address_of(mapping: mmap.mmap) -> int:
    # Through numpy, since ctypes takes no address of read-only memory; the view is gone on return.
    address: int = np.frombuffer(mapping, dtype=np.uint8).__array_interface__["data"][0]
    return address
