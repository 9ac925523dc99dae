"""Fabrics whose reads a test makes late, counts, or spoils."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from kvferry.transport.fabric.base import Fabric, FabricPeer
from kvferry.transport.memory import BlockMemory, Span

ReadHook = Callable[[Callable[[], Awaitable[None]], BlockMemory, Sequence[Span]], Awaitable[None]]
"""Makes one read: with the call that reads, this instance's memory, and the spans to fill."""


def with_reads(kind: type[Fabric], hook: ReadHook) -> type[Fabric]:
    """A fabric of this kind whose reads `hook` makes."""

    class Hooked(kind):  # type: ignore[valid-type, misc]
        async def connect(self, description: dict[str, Any], deadline: float) -> FabricPeer:
            peer: FabricPeer = await super().connect(description, deadline)
            read, memory = peer.read, self.context.memory

            async def hooked(remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
                await hook(partial(read, remote, local, deadline), memory, local)

            peer.read = hooked  # type: ignore[method-assign]
            return peer

    return Hooked
