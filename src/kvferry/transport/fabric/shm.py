"""Reading a peer on the same machine: its segments are mapped read-only, and a read is one copy between mappings.

A read works even after the peer has died, since its memory lives as long as our mapping. The lookup buffer's fence,
on the control channel, decides whether the bytes may be used.

The pieces of a slice are copied by one call into C++, or one by one where that cannot be compiled. A loop in Python
costs 0.4 µs a piece, as much as the copy of a small one; in C++, long pieces also bypass the caches.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvferry.core.compiled import NotCompiled, compiled
from kvferry.core.errors import ConfigError, PeerLost, ProtocolError
from kvferry.transport.fabric.base import Fabric, FabricContext, FabricPeer
from kvferry.transport.memory import BlockMemory, Pieces, Region, RegionMap, Span, join
from kvferry.transport.shared_memory import SharedSegment

logger = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("copying.cpp")
_FLAGS = ("-std=c++17", "-O2", "-march=native")

SHORT_BYTES = 2**20
"""Copies up to this size keep the GIL: to reacquire it may take milliseconds if another thread computes in Python."""
SHORT_PIECE_BYTES = 64 * 2**10
"""Like `SHORT_BYTES`, for one piece that is copied without C++."""

ADDRESS_BITS = 47
"""User addresses on x86-64 and 64-bit Arm stay below this, unless a process asks the kernel for more."""
MEMORY = memoryview((ctypes.c_char * 2**ADDRESS_BITS).from_address(0)).cast("B")
"""This process's memory, indexed by address. Copying between slices of it is the cheapest copy of a short block in
Python: 0.4 µs beyond the copy itself, half of a call through ctypes. The caller has checked the addresses."""

CopyPieces = Callable[[Pieces], None]
SLICE_BYTES = 8 * 2**20
"""Bytes copied before other tasks run: about a millisecond."""


class ShmFabric(Fabric):
    """Joins processes of the same user on one machine."""

    name = "shm"
    under_tls = True

    def __init__(self, context: FabricContext) -> None:
        super().__init__(context)
        if any(region.segment is None for region in context.memory.regions):
            raise ConfigError("transport shm needs the KV cache in shared memory; use transport tcp")
        copier()  # compiled now rather than during the first transfer

    def describe(self) -> dict[str, Any]:
        segments = [[region.segment, region.num_bytes] for region in self.context.memory.regions]
        return {"machine": machine_id(), "segments": segments}

    def reachable(self, description: dict[str, Any]) -> bool:
        """True if it is this machine, and this process can open its segments: containers may hide them."""
        if description.get("machine") != machine_id():
            return False
        try:
            _close(_attach(description))
        except (PeerLost, ConfigError, ProtocolError):
            return False
        return True

    async def connect(self, description: dict[str, Any], deadline: float) -> FabricPeer:
        return ShmPeer(_attach(description), self.context.memory)


class ShmPeer(FabricPeer):
    """The mapped segments of a peer. Owns the mappings."""

    max_pieces = 4096

    def __init__(self, segments: Sequence[SharedSegment], memory: BlockMemory) -> None:
        self._segments = segments
        self._remote_map = RegionMap([Region(segment.address, segment.num_bytes) for segment in segments], "peer's")
        self._local_map = memory.map
        self._copy = copier()

    async def read(self, remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
        self.require_going(deadline)
        pieces = join(remote, self._remote_map, local, self._local_map, SLICE_BYTES)
        for index, part in enumerate(pieces.slices(SLICE_BYTES, self.max_pieces)):
            if index:
                await asyncio.sleep(0)  # meanwhile the peer may be closed, and unmapped
                self.require_going(deadline)
            self._copy(part)

    async def close(self) -> None:
        self.closed = True
        _close(self._segments)


def machine_id() -> str:
    """Equal for two processes exactly if they run on one machine, booted once."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _attach(description: dict[str, Any]) -> list[SharedSegment]:
    try:
        described = msgspec.convert(description.get("segments"), list[tuple[str, int]])
    except msgspec.ValidationError as error:
        raise ProtocolError("a shared memory description without segments") from error
    segments: list[SharedSegment] = []
    try:
        for name, num_bytes in described:
            segments.append(SharedSegment.attach(name))
            if segments[-1].num_bytes != num_bytes:
                raise ProtocolError(f"segment {name} has {segments[-1].num_bytes} bytes, not the {num_bytes} described")
    except BaseException:
        _close(segments)
        raise
    return segments


def _close(segments: Sequence[SharedSegment]) -> None:
    for segment in segments:
        segment.close()


@cache
def copier() -> CopyPieces:
    """A function that copies pieces, which must not overlap. The first call may compile for a second."""
    try:
        path = str(compiled([_SOURCE], _FLAGS))
        with_gil, without_gil = ctypes.PyDLL(path).copy_pieces, ctypes.CDLL(path).copy_pieces
    except (NotCompiled, OSError) as error:
        if str(error):
            logger.warning("copies in shared memory are made one by one, which is slower: %s", error)
        return copy_one_by_one
    for function in (with_gil, without_gil):
        function.argtypes, function.restype = [ctypes.c_void_p] * 3 + [ctypes.c_int64], None

    def copy(pieces: Pieces) -> None:
        remote, local, lengths = map(np.ascontiguousarray, (pieces.remote, pieces.local, pieces.lengths))
        call = with_gil if int(lengths.sum()) <= SHORT_BYTES else without_gil
        call(remote.ctypes.data, local.ctypes.data, lengths.ctypes.data, len(lengths))

    return copy


def copy_one_by_one(pieces: Pieces) -> None:
    """Copy pieces without C++."""
    memory = MEMORY
    for source, target, length in pieces.rows():
        if length <= SHORT_PIECE_BYTES:
            memory[target : target + length] = memory[source : source + length]
        else:
            ctypes.memmove(target, source, length)
