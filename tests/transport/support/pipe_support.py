"""Pipes between two ends in this process, or with one end in a process of its own that can be killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import torch
from kv_support import make_layout, soon

from kvferry.transport.control import Listener
from kvferry.transport.pipe.base import PipeReceiver, PipeSender, PipeSettings
from kvferry.transport.pipe.meeting import PipeServer, connect_pipe
from kvferry.transport.pipe.memory import memory_pipe
from kvferry.transport.pipe.table import pipe_kind
from kvferry.transport.wire import Identity

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.append(str(EXAMPLES))
KINDS = {
    "plain": "plain_pipe:PlainPipe",
    "gloo": "gloo",
    "example": "unix_socket_pipe:UnixSocketPipe",
}
TOKEN = "secret"
CAPACITY = 2**20


@asynccontextmanager
async def serving(kind: str, settings: PipeSettings) -> AsyncIterator[tuple[Listener, PipeServer]]:
    """A sending instance."""
    listener = Listener(Identity("sender", make_layout()), TOKEN)
    server = PipeServer(listener, pipe_kind(kind, settings))
    task = asyncio.create_task(listener.serve())
    try:
        yield listener, server
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled(), task.exception()


@asynccontextmanager
async def pipe_of(
    name: str, settings: PipeSettings | None = None, **changes: object
) -> AsyncIterator[tuple[PipeSender, PipeReceiver]]:
    """Both ends; "memory", or one of `KINDS`."""
    settings = replace(settings or PipeSettings(capacity_bytes=CAPACITY), **changes)
    if name == "memory":
        sender, receiver = memory_pipe(settings)
        try:
            yield sender, receiver
        finally:
            await sender.close()
            await receiver.close()
        return
    async with serving(KINDS[name], settings) as (listener, server):
        identity = Identity("receiver", make_layout())
        kind = pipe_kind(KINDS[name], settings)
        made = await asyncio.gather(
            server.accept("t", soon()),
            connect_pipe(kind, listener.host, listener.port, "t", identity, TOKEN, soon()),
        )
        try:
            yield made
        finally:
            await asyncio.gather(*(end.close() for end in made))


class PipeProcess:
    """`pipe_process.py`, running: the end of that role. Its lines on stdout are told."""

    def __init__(self, role: str, name: str, port: int, num_bytes: int) -> None:
        script = Path(__file__).with_name("pipe_process.py")
        command = [sys.executable, str(script), role, KINDS[name], str(port), str(num_bytes)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    def go(self, num_tensors: int) -> None:
        """Have a receiver take so many more."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n" * num_tensors)
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Bit by bit, NaNs included."""
    if one is None or other is None:
        return one is other
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    left, right = (tensor.resolve_conj().resolve_neg().contiguous().reshape(-1) for tensor in (one, other))
    return not left.numel() or torch.equal(left.view(torch.uint8), right.view(torch.uint8))
