"""One NIXL agent. NIXL is imported here and nowhere else.

Owns the agent: its backends, its registered memory, and the remote agents loaded into it. Its methods do not wait, but
a post may copy before it returns (UCX does within one machine), without the GIL.

It uses the bindings and not NIXL's Python class, since only they let the progress thread's delay be set. With the
default of 0, the thread takes most of a core while idle. With a delay it sleeps until UCX wakes it, and the delay only
bounds the cost of a lost wake-up.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import ConfigError, MissingDependency, PeerLost, ProtocolError
from kvferry.core.folders.cache_dirs import user_runtime_dirs
from kvferry.core.folders.private_folder import private_folder
from kvferry.core.runtime.threads import Thread
from kvferry.transport.memory import Pieces

PROGRESS_DELAY_US = 10_000
_LOCK_POLL_S = 0.01
_HOLDER = Struct("<QQ")
"""The content of the lock file: the holder's process id, and a random number of this start."""
Handle = int


@dataclass(frozen=True)
class MemoryKind:
    """The location of memory, in NIXL's terms: "DRAM", or "VRAM" of a device."""

    segment: str
    device: int = 0

    @classmethod
    def of(cls, device: str) -> MemoryKind:
        """The kind of memory on a device: "cpu", "cuda" or "cuda:1"."""
        kind, _, index = device.partition(":")
        return cls("DRAM") if kind == "cpu" else cls("VRAM", int(index or 0))


class NixlAgent:
    """An agent with these backends. Raises `MissingDependency` without NIXL, `ConfigError` if a backend does not start.

    `serves`: peers read from it, which needs a progress thread. An agent that only reads makes progress when it is
    polled; a thread would compete with that, and halve its speed.
    """

    hold_margin_s = 5.0
    start_s = 60.0

    def __init__(self, name: str, backends: Sequence[str], num_threads: int, *, serves: bool) -> None:
        self.name = name
        self._nixl = _import_nixl()
        with exclusive_start(_lock_path(), self.start_s + self.hold_margin_s):
            self._agent, self._backends = _run_with_timeout(
                self.start_s, lambda: self._start(name, backends, num_threads, serves)
            )
        self._registered: list[Any] = []

    def _start(self, name: str, backends: Sequence[str], num_threads: int, serves: bool) -> tuple[Any, list[int]]:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread, config.useListenThread = serves, False
        config.pthrDelay = PROGRESS_DELAY_US
        agent = self._nixl.nixlAgent(name, config)
        plugins = agent.getAvailPlugins()
        for backend in backends:
            if backend not in plugins:
                raise ConfigError(f"NIXL has no backend {backend!r} here; it has {', '.join(sorted(plugins))}")
        options = {"num_threads": str(num_threads)} if num_threads else {}
        try:
            return agent, [agent.createBackend(backend, dict(options)) for backend in backends]
        except Exception as error:  # NIXL raises any type for a backend that does not start
            raise ConfigError(f"NIXL cannot start its backends {', '.join(backends)}: {error}") from error

    def register(self, regions: Sequence[tuple[int, int]], kind: MemoryKind) -> None:
        """Make (address, length) regions readable to peers, and readable into. Raises `ConfigError`."""
        rows = [(address, num_bytes, kind.device, "") for address, num_bytes in regions]
        descriptors = self._nixl.nixlRegDList(self._segment(kind), rows)
        try:
            self._agent.registerMem(descriptors, self._backends)
        except Exception as error:  # its backends raise any type
            raise ConfigError(f"NIXL cannot register the KV cache's {kind.segment} memory: {error}") from error
        self._registered.append(descriptors)

    def metadata(self) -> bytes:
        """The metadata that a peer must load to read the memory that is registered now."""
        blob: bytes = self._agent.getLocalMD()
        return blob

    def load(self, metadata: bytes) -> str:
        """Load a peer's agent. Returns its name. Raises `PeerLost` or `ProtocolError`."""
        with _translated():
            name = self._agent.loadRemoteMD(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def forget(self, name: str) -> None:
        """Close the connection to a peer's agent, with running transfers."""
        with _translated():
            self._agent.invalidateRemoteMD(name)

    def post(self, pieces: Pieces, local: MemoryKind, remote: MemoryKind, name: str) -> Handle:
        """Begin to read; the caller releases the handle. Raises `PeerLost` or `ProtocolError`."""
        local_list, remote_list = (
            self._list(pieces.local, pieces.lengths, local),
            self._list(pieces.remote, pieces.lengths, remote),
        )
        with _translated():
            handle: Handle = self._agent.createXferReq(
                self._nixl.NIXL_READ, local_list, remote_list, name, b"", self._backends
            )
            try:
                self._agent.postXferReq(handle, b"")
            except BaseException:
                self._agent.releaseXferReq(handle)
                raise
        return handle

    def is_done(self, handle: Handle) -> bool:
        """True if everything has arrived. Raises `PeerLost` if the transfer has failed; then it writes no more."""
        with _translated():
            return bool(self._agent.getXferStatus(handle) == self._nixl.NIXL_SUCCESS)

    def release(self, handle: Handle) -> None:
        """Release the handle of a transfer that has ended: a running one might still write."""
        with _translated():
            self._agent.releaseXferReq(handle)

    def close(self) -> None:
        """Deregister the memory, then end the agent with its thread. No handle may be left."""
        for descriptors in self._registered:
            self._agent.deregisterMem(descriptors, self._backends)
        self._registered.clear()
        del self._agent

    def _segment(self, kind: MemoryKind) -> Any:
        return self._nixl.VRAM_SEG if kind.segment == "VRAM" else self._nixl.DRAM_SEG

    def _list(self, addresses: Any, lengths: Any, kind: MemoryKind) -> Any:
        rows = np.empty((len(lengths), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, lengths, kind.device
        return self._nixl.nixlXferDList(self._segment(kind), rows)


def _import_nixl() -> Any:
    try:
        return importlib.import_module("nixl._bindings")
    except ModuleNotFoundError as error:
        raise MissingDependency("transport nixl", "nixl", "nixl") from error
    except ImportError as error:
        raise ConfigError(f"NIXL is installed but does not load: {error}") from error


@contextmanager
def _translated() -> Iterator[None]:
    """Turn NIXL's errors into kvferry's. They have no common base class but `Exception`."""
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        if kind in ("nixlNotFoundError", "nixlInvalidParamError", "nixlMismatchError"):
            raise ProtocolError(f"NIXL refuses a read: {error}") from error
        raise PeerLost(f"NIXL: {kind}: {error}") from error


@contextmanager
def exclusive_start(path: Path, max_hold_s: float, clock: Clock = SYSTEM_CLOCK) -> Iterator[None]:
    """Hold an exclusive lock at `path` while the body runs: two agents that start at the same time can hang.

    Waiting ends only if one holder keeps the lock for longer than `max_hold_s`, as a stopped process does; so each of
    many waiting processes gets it. Raises `ConfigError` that names the holder.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    holder, deadline = b"", clock.monotonic() + max_hold_s
    try:
        while not _locked(descriptor):
            now, current = clock.monotonic(), os.pread(descriptor, _HOLDER.size, 0)
            if current != holder:
                holder, deadline = current, now + max_hold_s
            if now >= deadline:
                holder_name = (
                    f"process {_HOLDER.unpack(holder)[0]}" if len(holder) == _HOLDER.size else "another process"
                )
                raise ConfigError(f"{holder_name} has been starting NIXL for {max_hold_s:g} s and holds {path}; end it")
            time.sleep(_LOCK_POLL_S)
        os.pwrite(descriptor, _HOLDER.pack(os.getpid(), secrets.randbits(64)), 0)
        yield
    finally:
        os.close(descriptor)


def _lock_path() -> Path:
    return private_folder(f"kvferry-{os.getuid()}", user_runtime_dirs()) / "nixl.lock"


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _run_with_timeout(seconds: float, start: Any) -> Any:
    """Run `start` in a thread, which is left behind if it hangs, since nothing can end it."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(start())
        except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
            results.append(error)

    thread = Thread(run, name="kvferry-nixl-start")
    thread.start()
    thread.join(seconds)
    if not results:
        raise ConfigError(f"NIXL did not start within {seconds:g} s")
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]
