"""Reading a peer on the same machine: its segment is mapped read-only, and a read is one copy between mappings.

A read goes on after the peer has died, since its memory lives as long as our mapping: whether the bytes may be
used is settled by the lookup buffer's fence, on the control channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.errors import ConfigError, PeerLost, ProtocolError
from kvferry.transport.fabric.base import Fabric, FabricContext, FabricPeer
from kvferry.transport.fabric.copying import copier
from kvferry.transport.fabric.pieces import join
from kvferry.transport.memory import BlockMemory, Region, RegionMap, Span
from kvferry.transport.shared_memory import SharedSegment

SLICE_BYTES = 8 * 2**20
"""Copied before other tasks get the loop again: about a millisecond."""
MAX_PIECES = 4096


class ShmFabric(Fabric):
    """Same machine, same user."""

    name = "shm"
    under_tls = True

    def __init__(self, context: FabricContext) -> None:
        super().__init__(context)
        if any(region.segment is None for region in context.memory.regions):
            raise ConfigError("transport shm needs the KV cache in shared memory; use transport tcp")
        copier()  # compiled now rather than during the first transfer

    def describe(self) -> dict[str, Any]:
        """The segments' names and sizes, and the machine they are on."""
        segments = [[region.segment, region.num_bytes] for region in self.context.memory.regions]
        return {"machine": machine_id(), "segments": segments}

    def reachable(self, description: dict[str, Any]) -> bool:
        """The same machine, and segments that can be opened from here (containers may hide them)."""
        if description.get("machine") != machine_id():
            return False
        try:
            _close(_attach(description))
        except (PeerLost, ConfigError, ProtocolError):
            return False
        return True

    async def connect(self, description: dict[str, Any], deadline: float) -> FabricPeer:
        """Map the peer's segments."""
        return ShmPeer(_attach(description), self.context.memory)


class ShmPeer(FabricPeer):
    """The mapped segments of a peer. Owns the mappings."""

    def __init__(self, segments: Sequence[SharedSegment], memory: BlockMemory) -> None:
        self._segments = segments
        self._theirs = RegionMap([Region(segment.address, segment.num_bytes) for segment in segments], "peer's")
        self._ours = memory.map
        self._copy = copier()

    async def read(self, remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
        """Copy, slice by slice."""
        self.require_going(deadline)
        pieces = join(remote, self._theirs, local, self._ours, SLICE_BYTES)
        for number, part in enumerate(pieces.slices(SLICE_BYTES, MAX_PIECES)):
            if number:
                await asyncio.sleep(0)  # others have the loop; the peer may be closed meanwhile, and so unmapped
                self.require_going(deadline)
            self._copy(part)

    async def close(self) -> None:
        """Unmap."""
        self.closed = True
        _close(self._segments)


def machine_id() -> str:
    """The same for two processes exactly when they run on one booted machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _attach(description: dict[str, Any]) -> list[SharedSegment]:
    try:
        wanted = msgspec.convert(description.get("segments"), list[tuple[str, int]])
    except msgspec.ValidationError as error:
        raise ProtocolError("a shared memory description without segments") from error
    segments: list[SharedSegment] = []
    try:
        for name, num_bytes in wanted:
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
