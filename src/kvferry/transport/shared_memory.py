"""Segments of POSIX shared memory, each with one owner.

Owns the segments' names and mappings; it does not know what lies in them. The owner removes the name when it
closes the segment or ends. An owner that was killed cannot, so every creation first sweeps the names of owners
that are gone: their process no longer exists, and the lock that each owner keeps on its segment has fallen.

`multiprocessing.shared_memory` is not used: before Python 3.13 its resource tracker removes segments that
another process still owns.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvferry.core.errors import ConfigError, PeerLost

SHM_ROOT = Path("/dev/shm")
_NAME = re.compile(r"kvferry-(\d+)-[0-9a-f]{16}")


class SharedSegment:
    """One segment, mapped into this process. Made by `create` (the owner) or `attach`."""

    def __init__(self, name: str, mapping: mmap.mmap, *, owned: bool) -> None:
        self.name = name
        self.num_bytes = len(mapping)
        self.address = _address_of(mapping)
        """Where the segment begins in this process."""
        self._mapping: mmap.mmap | None = mapping
        self._remove_name = weakref.finalize(self, _unlink, name, os.getpid()) if owned else None

    @classmethod
    def create(cls, num_bytes: int) -> SharedSegment:
        """A new segment of zeros, owned by this process.

        All its memory is claimed now. Raises `ConfigError` when the machine has not that much shared memory.
        """
        assert num_bytes > 0, "an empty segment"
        sweep_stale_segments()
        name = f"kvferry-{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(SHM_ROOT / name, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _claim(descriptor, num_bytes)
            return cls(name, mmap.mmap(descriptor, num_bytes), owned=True)
        except BaseException:
            _unlink(name, os.getpid())
            raise
        finally:
            os.close(descriptor)  # the mapping keeps a duplicate, and with it the lock

    @classmethod
    def attach(cls, name: str, *, writable: bool = False) -> SharedSegment:
        """Map a segment that another process owns.

        Raises `PeerLost` when there is none of that name, `ConfigError` when this user may not open it.
        """
        if not _NAME.fullmatch(name):
            raise PeerLost(f"{name!r} is not the name of a kvferry shared memory segment")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        try:
            descriptor = os.open(SHM_ROOT / name, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise PeerLost(f"shared memory segment {name} is gone; its owner has ended") from error
        except OSError as error:
            raise ConfigError(f"cannot open shared memory segment {name}: {error.strerror}") from error
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
        """Give the segment back; the owner's close also removes its name. May be called twice.

        Memory that a tensor still looks at stays mapped until that tensor is gone: a late reader never crashes.
        """
        self.unlink()
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with suppress(BufferError):  # somebody still looks at it: unmapped with the last view
                mapping.close()

    def unlink(self) -> None:
        """Remove the name, if this process owns it: nobody can attach any more."""
        if self._remove_name is not None:
            self._remove_name()


def sweep_stale_segments() -> list[str]:
    """Remove segments whose owner is gone; returns their names."""
    return [name for name in _names() if _owner_is_gone(name) and _remove(name)]


def owned_segment_names() -> list[str]:
    """Names of this process's segments that still exist; for leak checks."""
    return [name for name in _names() if _owner(name) == os.getpid()]


def remove_owned_segments() -> None:
    """Remove this process's segments by name, when it is about to end without closing them."""
    for name in owned_segment_names():
        _remove(name)


def _names() -> list[str]:
    try:
        return [entry.name for entry in SHM_ROOT.iterdir() if _NAME.fullmatch(entry.name)]
    except OSError as error:
        raise ConfigError(f"no POSIX shared memory on this machine: {SHM_ROOT}: {error.strerror}") from error


def _owner(name: str) -> int:
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[1])


def _owner_is_gone(name: str) -> bool:
    """No process of that id lives here, and none elsewhere (another container) holds the owner's lock."""
    try:
        os.kill(_owner(name), 0)
        return False
    except ProcessLookupError:
        pass
    except OSError:
        return False
    try:
        descriptor = os.open(SHM_ROOT / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _remove(name: str) -> bool:
    try:
        (SHM_ROOT / name).unlink()
        return True
    except OSError:  # another process swept it first
        return False


def _unlink(name: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, whose exit would take the segment from its parent
        _remove(name)


def _claim(descriptor: int, num_bytes: int) -> None:
    """Give the segment its size and its memory now: later, lack of memory would show as SIGBUS on a write."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        free = os.statvfs(SHM_ROOT)
        raise ConfigError(
            f"cannot take {num_bytes / 2**20:.0f} MiB of shared memory: {error.strerror}; {SHM_ROOT} has"
            f" {free.f_bavail * free.f_frsize / 2**20:.0f} MiB free; lower --kv-cache-memory, or enlarge it"
            " (docker: --shm-size; Kubernetes: an emptyDir of medium Memory)"
        ) from error


def _address_of(mapping: mmap.mmap) -> int:
    # Through numpy, since ctypes takes no address of read-only memory; the view is gone on return.
    address: int = np.frombuffer(mapping, dtype=np.uint8).__array_interface__["data"][0]
    return address
