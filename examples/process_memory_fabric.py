"""A fabric of your own, in one file: the kernel copies from the memory of P's process to that of D's.

    "transport": "process_memory_fabric:ProcessMemoryFabric"

    [project.entry-points."kvferry.fabrics"]
    process_memory = "process_memory_fabric:ProcessMemoryFabric"

`process_vm_readv` of Linux reads any process of one's own on the same machine, where the kernel allows it
(`kernel.yama.ptrace_scope`): the KV cache need not be in shared memory. test_process_memory_fabric.py beside it shows
that it does what a fabric must.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvferry.core.errors import ConfigError, PeerLost, ProtocolError
from kvferry.transport.fabric.base import Fabric, FabricContext, FabricPeer
from kvferry.transport.fabric.shm import machine_id
from kvferry.transport.memory import BlockMemory, Numbers, Pieces, Region, RegionMap, Span, join

SLICE_BYTES = 8 * 2**20
SLICE_PIECES = 1024
"""Copied by one call, which takes no more; then others have the loop."""
BEACON_BYTES = 16

_read = ctypes.CDLL(None, use_errno=True).process_vm_readv
_vectors: list[type[Any]] = [ctypes.c_void_p, ctypes.c_ulong] * 2
_read.argtypes = [ctypes.c_int, *_vectors, ctypes.c_ulong]
_read.restype = ctypes.c_ssize_t


class Description(msgspec.Struct, frozen=True):
    """What a reader needs: whose memory it is, the KV cache in it as (address, length), and the address and content of
    a beacon, random bytes by which the reader knows that it reads the process that described itself."""

    machine: str
    process: int
    regions: list[tuple[int, int]]
    beacon: tuple[int, str]


class ProcessMemoryFabric(Fabric):
    """Two processes of one user on one machine."""

    name = "process_memory"
    under_tls = True  # nothing leaves the machine

    def __init__(self, context: FabricContext) -> None:
        super().__init__(context)
        if context.memory.device != "cpu":
            raise ConfigError(f"transport {self.name} needs the KV cache in host memory; use transport auto")
        self._beacon = ctypes.create_string_buffer(secrets.token_bytes(BEACON_BYTES), BEACON_BYTES)

    def describe(self) -> dict[str, Any]:
        """This process and where its KV cache is."""
        regions = [(region.address, region.num_bytes) for region in self.context.memory.regions]
        beacon = (ctypes.addressof(self._beacon), self._beacon.raw.hex())
        described = Description(machine_id(), os.getpid(), regions, beacon)
        return msgspec.to_builtins(described)  # type: ignore[no-any-return]

    def reachable(self, description: dict[str, Any]) -> bool:
        """Whether its beacon can be read from here."""
        try:
            return _sees_beacon(_described(description))
        except (PeerLost, ProtocolError):
            return False

    async def connect(self, description: dict[str, Any], deadline: float) -> FabricPeer:
        """There is nothing to open."""
        described = _described(description)
        if not _sees_beacon(described):
            raise PeerLost(f"process {described.process} is not the one that described itself")
        return ProcessMemoryPeer(described, self.context.memory)

    async def close(self) -> None:
        """Whoever still has our description finds another beacon."""
        ctypes.memset(self._beacon, 0, BEACON_BYTES)


class ProcessMemoryPeer(FabricPeer):
    """A peer whose memory the kernel reads for us."""

    def __init__(self, described: Description, memory: BlockMemory) -> None:
        self._process = described.process
        self._remote = RegionMap([Region(address, size) for address, size in described.regions], "peer's")
        self._local = memory.map

    async def read(self, remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
        """Copy, slice by slice. `join` checks the spans: those of `remote` come from the peer."""
        self.require_going(deadline)
        for part in join(remote, self._remote, local, self._local, SLICE_BYTES).slices(SLICE_BYTES, SLICE_PIECES):
            self.require_going(deadline)
            copy(self._process, part)
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Reads under way end with their slice."""
        self.closed = True


def copy(process: int, pieces: Pieces) -> None:
    """Fill our pieces with those of another process. Raises `PeerLost`."""
    local, remote = _vector(pieces.local, pieces.lengths), _vector(pieces.remote, pieces.lengths)
    num_read = _read(process, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if num_read != int(pieces.lengths.sum()):
        reason = os.strerror(ctypes.get_errno()) if num_read < 0 else "part of it is gone"
        raise PeerLost(f"the memory of process {process} cannot be read: {reason}")


def _vector(addresses: Numbers, lengths: Numbers) -> Numbers:
    """As `struct iovec`: `[pieces, 2]`."""
    return np.stack((addresses, lengths), axis=1)


def _described(description: dict[str, Any]) -> Description:
    try:
        return msgspec.convert(description, Description)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"a description of process memory that cannot be read: {error}") from error


def _sees_beacon(described: Description) -> bool:
    address, expected = described.beacon
    found = ctypes.create_string_buffer(BEACON_BYTES)
    numbers = [np.array([number], np.int64) for number in (address, ctypes.addressof(found), BEACON_BYTES)]
    if described.machine != machine_id():
        return False
    copy(described.process, Pieces(*numbers))
    return found.raw.hex() == expected
