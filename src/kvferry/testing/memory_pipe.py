"""A pipe within one process: the reference that the others are compared with, and a test double."""

from __future__ import annotations

import asyncio
from collections import deque

import torch
from torch import Tensor

from kvferry.transport.connection import limited_to
from kvferry.transport.pipe.base import PipeReceiver, PipeSender, PipeSettings, closed
from kvferry.transport.pipe.tensors import as_it_lies, header_of

LEAST_BYTES = 64
"""What a tensor counts at least, so that empty ones are bounded too."""


class _Queue:
    """What both ends share."""

    def __init__(self, settings: PipeSettings) -> None:
        self.settings = settings
        self.items: deque[Tensor | None] = deque()
        self.num_bytes = 0
        self.closed_by: set[str] = set()
        self.changed = asyncio.Condition()

    def has_room(self, num_bytes: int) -> bool:
        """A tensor larger than the pipe goes when it is alone."""
        return not self.items or self.num_bytes + num_bytes <= self.settings.capacity_bytes

    async def close(self, side: str) -> None:
        self.closed_by.add(side)
        async with self.changed:
            self.changed.notify_all()


class MemorySender(PipeSender):
    """Puts tensors into the queue of a pipe within one process."""

    def __init__(self, queue: _Queue) -> None:
        super().__init__()
        self._queue = queue

    async def send_tensor(self, tensor: Tensor | None, *, deadline: float) -> None:
        """Put a copy in."""
        self.require_open()
        queue, num_bytes = self._queue, LEAST_BYTES
        if tensor is not None:
            header_of(tensor, queue.settings.max_tensor_bytes)
            num_bytes = max(LEAST_BYTES, tensor.nbytes)
        async with limited_to(deadline, "sending a tensor"), queue.changed:
            await queue.changed.wait_for(lambda: queue.closed_by or queue.has_room(num_bytes))
            if queue.closed_by:
                self.fail(closed())
                self.require_open()
            queue.items.append(
                None if tensor is None else as_it_lies(tensor).clone(memory_format=torch.contiguous_format)
            )
            queue.num_bytes += num_bytes
            queue.changed.notify_all()

    async def close(self) -> None:
        """No more comes."""
        self.fail(closed())
        await self._queue.close("sender")


class MemoryReceiver(PipeReceiver):
    """Takes tensors out of the queue of a pipe within one process."""

    def __init__(self, queue: _Queue) -> None:
        super().__init__()
        self._queue = queue

    async def recv_tensor(self, *, deadline: float) -> Tensor | None:
        """Take one out."""
        self.require_open()
        queue = self._queue
        async with limited_to(deadline, "receiving a tensor"), queue.changed:
            await queue.changed.wait_for(lambda: queue.closed_by or queue.items)
            if "receiver" in queue.closed_by or not queue.items:
                self.fail(closed())
                self.require_open()
            item = queue.items.popleft()
            queue.num_bytes -= max(LEAST_BYTES, 0 if item is None else item.nbytes)
            queue.changed.notify_all()
            return item

    async def close(self) -> None:
        """Nobody takes any more."""
        self.fail(closed())
        self._queue.items.clear()
        await self._queue.close("receiver")


def memory_pipe(settings: PipeSettings | None = None) -> tuple[MemorySender, MemoryReceiver]:
    """Both ends, for one loop."""
    queue = _Queue(settings or PipeSettings())
    return MemorySender(queue), MemoryReceiver(queue)
