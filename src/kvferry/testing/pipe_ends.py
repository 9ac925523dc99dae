"""Both ends of a pipe for its contract suite: in this process, and in a process that is killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from kvferry.core.errors import TransferTimeout
from kvferry.testing.kv import make_layout, soon
from kvferry.transport.connection import Identity
from kvferry.transport.control import Listener, dial
from kvferry.transport.pipe.base import PipeKind, PipeReceiver, PipeSender, PipeSettings, pipe_kind
from kvferry.transport.pipe.meeting import PipeServer, connect_pipe
from kvferry.transport.pipe.messages import PURPOSE

Ends = tuple[PipeSender, PipeReceiver]
MIB = 2**20
CAPACITY = 2**20
TOKEN = "secret"
SETTINGS = PipeSettings(capacity_bytes=CAPACITY)


async def join(kind: PipeKind, port: int, *, token: str = TOKEN, seconds: float = 10) -> PipeReceiver:
    """The receiving end of the pipe named "t" that is served at a port of this machine."""
    connection = await dial("127.0.0.1", port, PURPOSE, Identity("receiver", make_layout()), token, soon(seconds))
    return await connect_pipe(kind, connection, "t", soon(seconds))


@asynccontextmanager
async def serving(kind: str, settings: PipeSettings) -> AsyncIterator[tuple[Listener, PipeServer]]:
    """A listener that serves the sending ends of pipes, closed with the body."""
    listener = Listener(Identity("sender", make_layout()), TOKEN)
    server = PipeServer(listener, pipe_kind(kind, settings))
    task = asyncio.create_task(listener.serve())
    try:
        yield listener, server
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled(), task.exception()


class PipeProcess:
    """Runs one end of a pipe, "sender" or "receiver", as `kvferry.testing.pipe_process`. `path`: the folder of the
    module of `kind`, if that is not installed."""

    def __init__(self, role: str, kind: str, port: int, num_bytes: int, path: str = "") -> None:
        command = [sys.executable, "-m", "kvferry.testing.pipe_process", role, kind, str(port), str(num_bytes)]
        paths = [*filter(None, [path, os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stdin=pipe, text=True, env=environment)

    async def line(self) -> str:
        """The next line of its standard output."""
        assert self.process.stdout is not None
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    def go(self, num_tensors: int) -> None:
        """Let a receiver take `num_tensors` more."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n" * num_tensors)
        self.process.stdin.flush()

    def kill(self) -> None:
        """Kill it, whatever it is doing."""
        self.process.kill()
        self.process.communicate()


async def pass_on(ends: Ends, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Send all tensors while they are received. Returns what was received."""
    sender, receiver = ends

    async def send() -> None:
        for tensor in tensors:
            await sender.send_tensor(tensor, deadline=soon())

    sending = asyncio.create_task(send())
    received = [await receiver.recv_tensor(deadline=soon()) for _ in tensors]
    await sending
    return received


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor with random bytes; of bools, with random truth values."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    count = dtype.itemsize * torch.Size(shape).numel()
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


async def fill(sender: PipeSender, tensor: torch.Tensor | None) -> int:
    """Send until a send times out because the pipe is full. Returns how many were sent."""
    num_sent = 0
    while True:
        try:
            await sender.send_tensor(tensor, deadline=soon(0.2))
        except TransferTimeout:
            return num_sent
        num_sent += 1


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether both are None, or equal bit by bit, including NaNs."""
    if one is None or other is None:
        return one is other
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    left, right = (tensor.resolve_conj().resolve_neg().contiguous().reshape(-1) for tensor in (one, other))
    return not left.numel() or torch.equal(left.view(torch.uint8), right.view(torch.uint8))
