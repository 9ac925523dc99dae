"""The lookup buffer over a pipe: what a consumer asks for by key is gathered and sent down the pipe.

Announcements, the fence and leases go over the control channel, as with a fabric; only how blocks are read differs
(`pulling`). A producer keeps what nobody has asked for in the KV cache, where it lies; that is what `kv_buffer_size`
bounds.
"""

from __future__ import annotations

from kvferry.core.clock import Clock
from kvferry.transport.fabric.base import FabricContext
from kvferry.transport.lookup_buffer.entries import EntryBounds
from kvferry.transport.lookup_buffer.fabric import FabricLookupBuffer
from kvferry.transport.lookup_buffer.pulling import PIECE_BYTES, PullFabric
from kvferry.transport.pipe.base import PipeSettings
from kvferry.transport.pipe.table import pipe_kind


class PipeLookupBuffer(FabricLookupBuffer):
    """Both ends, for one instance; `pipe` is a name of `pipe.table`."""

    def __init__(
        self,
        context: FabricContext,
        pipe: str,
        bounds: EntryBounds | None = None,
        clock: Clock | None = None,
        *,
        checksum: bool | None = None,
    ) -> None:
        settings = PipeSettings(max_tensor_bytes=PIECE_BYTES, host=context.listener.host, device=context.memory.device)
        super().__init__(context, [PullFabric(context, pipe_kind(pipe, settings))], bounds, clock, checksum=checksum)
