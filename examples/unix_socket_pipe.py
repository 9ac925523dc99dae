"""A pipe of your own: tensors between two processes of one machine, over a Unix socket.

Use it by naming it, `"transport": "unix_socket_pipe:UnixSocketPipe"` in `kv_connector_extra_config`, or give it an
entry point in your package, after which `"transport": "unix"` finds it:

    [project.entry-points."kvferry.pipes"]
    unix = "unix_socket_pipe:UnixSocketPipe"

test_unix_socket_pipe.py beside it shows that it does what a pipe must.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from kvferry.core.errors import KvferryError, PeerLost
from kvferry.transport.connection import Connection, Message, limited_to, translated_errors
from kvferry.transport.pipe.base import PipeKind, PipeReceiver, PipeSender
from kvferry.transport.pipe.connected import ConnectedEnd
from kvferry.transport.pipe.messages import NoTensor, TensorHeader
from kvferry.transport.pipe.tensors import flat_bytes, header_of, host_view, num_bytes_of, shaped


class SocketPath(Message, frozen=True):
    """Where the sender's Unix socket is."""

    path: str


class UnixSocketPipe(PipeKind):
    """Headers over the connection that kvferry brings, bytes over a Unix socket: about twice as fast as TCP."""

    name = "unix"

    async def open_sender(self, connection: Connection, deadline: float) -> PipeSender:
        """Listen, tell the path, and accept one."""
        loop = asyncio.get_running_loop()
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
            path = Path(folder) / "pipe"
            listening.bind(str(path))
            listening.listen(1)
            listening.setblocking(False)
            async with limited_to(deadline, "opening a Unix socket pipe"):
                await connection.send(SocketPath(str(path)))
                accepted, _ = await loop.sock_accept(listening)
        accepted.setblocking(False)
        return UnixSocketSender(connection, accepted, self.settings.max_tensor_bytes)

    async def open_receiver(self, connection: Connection, deadline: float) -> PipeReceiver:
        """Connect to the sender's socket."""
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            async with limited_to(deadline, "opening a Unix socket pipe"):
                where: SocketPath = await connection.receive(SocketPath)
                with translated_errors():
                    await asyncio.get_running_loop().sock_connect(sock, where.path)
        except BaseException:
            sock.close()
            raise
        return UnixSocketReceiver(connection, sock, self.settings.max_tensor_bytes)


class _UnixSocketEnd(ConnectedEnd):
    """`ConnectedEnd` sees to the connection, to deadlines and to one call at a time; here the socket follows it."""

    def __init__(self, connection: Connection, sock: socket.socket, max_tensor_bytes: int) -> None:
        super().__init__(connection)
        self._socket, self._max_bytes = sock, max_tensor_bytes

    def fail(self, error: KvferryError) -> None:
        """Whoever waits on the socket, here or there, is woken."""
        super().fail(error)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """Both sockets are closed once nobody uses them."""
        await super().close()
        self._socket.close()


class UnixSocketSender(_UnixSocketEnd, PipeSender):
    """See the module."""

    async def send_tensor(self, tensor: Tensor | None, *, deadline: float) -> None:
        """The header one way, the bytes the other."""
        self.require_open()
        header: Message = NoTensor() if tensor is None else header_of(tensor, self._max_bytes)
        async with self.transferring(deadline, "sending a tensor"):
            await self.connection.send(header)
            if tensor is not None and tensor.numel():
                with translated_errors():
                    data = host_view(flat_bytes(tensor).cpu())
                    await asyncio.get_running_loop().sock_sendall(self._socket, data)


class UnixSocketReceiver(_UnixSocketEnd, PipeReceiver):
    """See the module."""

    async def recv_tensor(self, *, deadline: float) -> Tensor | None:
        """Nothing is lost while it waits for a header; from then on it is all or failed."""
        async with self.receiving(TensorHeader | NoTensor, deadline) as header:
            if isinstance(header, NoTensor):
                return None
            data = torch.empty(num_bytes_of(header, self._max_bytes), dtype=torch.uint8)
            rest = host_view(data)
            while rest:
                with translated_errors():
                    count = await asyncio.get_running_loop().sock_recv_into(self._socket, rest)
                if not count:
                    raise PeerLost("the sender is gone")
                rest = rest[count:]
            return shaped(data, header)
