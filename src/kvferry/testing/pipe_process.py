"""One end of a pipe in a process of its own, to be killed. Arguments: role, kind, port, number of bytes a tensor.

A receiver dials the port, and says "joined", then a line for each tensor. A sender listens, and says its port; then it
sends tensors for ever, saying a line for each.
"""

from __future__ import annotations

import asyncio
import sys

import torch

from kvferry.testing.kv import soon
from kvferry.testing.pipe_ends import SETTINGS, join, serving
from kvferry.transport.pipe.base import pipe_kind


def say(word: object) -> None:
    """For whoever started this."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


async def receive(kind: str, port: int) -> None:
    """Take one tensor for each line of stdin."""
    receiver = await join(pipe_kind(kind, SETTINGS), port)
    say("joined")
    while True:
        await asyncio.to_thread(sys.stdin.readline)
        tensor = await receiver.recv_tensor(deadline=soon(60))
        say("None" if tensor is None else int(tensor.reshape(-1).view(torch.uint8).long().sum()))


async def send(kind: str, num_bytes: int) -> None:
    """Send for ever."""
    async with serving(kind, SETTINGS) as (listener, server):
        say(listener.port)
        sender = await server.accept("t", soon())
        while True:
            say("sending")
            await sender.send_tensor(torch.ones(num_bytes, dtype=torch.uint8), deadline=soon(60))


if __name__ == "__main__":
    role, kind, port, num_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    asyncio.run(receive(kind, port) if role == "receiver" else send(kind, num_bytes))
