"""A pipe of your own: tensors between two processes of one machine, over a Unix socket.

Use it by naming the fabric over it, `"transport": "unix_socket_pipe:UnixSocketFabric"` in `kv_connector_extra_config`,
or give that an entry point in your package, after which `"transport": "unix"` finds it:

    [project.entry-points."kvferry.fabrics"]
    unix = "unix_socket_pipe:UnixSocketFabric"

test_unix_socket_pipe.py beside it shows that it does what a pipe must.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from kvferry.core.messages.wire import Message
from kvferry.transport.connection import Connection
from kvferry.transport.fabric.pipe import PipeFabric, TensorPipe


class SocketPath(Message, frozen=True):
    """Where the sender's Unix socket is."""

    path: str


class UnixSocketFabric(PipeFabric):
    """Joins two processes of one user on one machine."""

    name = "unix"
    under_tls = True  # nothing leaves the machine

    async def open_pipe(self, connection: Connection, deadline: float, *, sends: bool) -> TensorPipe:
        """The sender listens and tells the path; the receiver connects."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as listening, tempfile.TemporaryDirectory() as folder:
            sock = listening
            sock.setblocking(False)
            if sends:
                sock.bind(path := str(Path(folder) / "pipe"))
                sock.listen(1)
                await connection.send(SocketPath(path))
                sock, _ = await loop.sock_accept(sock)
                sock.setblocking(False)
            else:
                where: SocketPath = await connection.receive(SocketPath)
                await loop.sock_connect(sock, where.path)
                sock = sock.dup()
        return UnixSocketPipe(sock)


class UnixSocketPipe(TensorPipe):
    """Either end."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    async def send_tensor(self, tensor: Tensor) -> None:
        """Send its bytes."""
        await asyncio.get_running_loop().sock_sendall(self._socket, tensor.numpy().data)

    async def recv_tensor(self, num_bytes: int) -> Tensor:
        """Receive into new memory."""
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        rest = tensor.numpy().data
        while rest:
            count = await asyncio.get_running_loop().sock_recv_into(self._socket, rest)
            if not count:
                raise EOFError("the sender is gone")
            rest = rest[count:]
        return tensor

    async def close(self) -> None:
        """Close the socket; what was sent still arrives."""
        self._socket.close()
