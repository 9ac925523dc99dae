"""A pipe with nothing beside its connection: header, bytes, header, bytes.

Tests of headers and of peers that lie need it; to kvferry it is a pipe of another package.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.transport.connection import Connection
from kvferry.transport.pipe.base import PipeKind, PipeReceiver, PipeSender
from kvferry.transport.pipe.connected import ConnectedEnd
from kvferry.transport.pipe.messages import NoTensor, TensorHeader
from kvferry.transport.pipe.tensors import flat_bytes, header_of, host_view, num_bytes_of, shaped


class PlainPipe(PipeKind):
    name = "plain"
    under_tls = True
    over_tcp = True

    async def open_sender(self, connection: Connection, deadline: float) -> PipeSender:
        return PlainSender(connection, self.settings.max_tensor_bytes)

    async def open_receiver(self, connection: Connection, deadline: float) -> PipeReceiver:
        return PlainReceiver(connection, self.settings.max_tensor_bytes)


class PlainSender(ConnectedEnd, PipeSender):
    def __init__(self, connection: Connection, max_tensor_bytes: int) -> None:
        super().__init__(connection)
        self._max_bytes = max_tensor_bytes

    async def send_tensor(self, tensor: Tensor | None, *, deadline: float) -> None:
        self.require_open()
        if tensor is None:
            pieces: list[bytearray | memoryview] = [self.connection.encode(NoTensor())]
        else:
            header = header_of(tensor, self._max_bytes)
            pieces = [self.connection.encode(header), host_view(flat_bytes(tensor).cpu())]
        async with self.transferring(deadline, "sending a tensor"):
            await self.connection.send_bytes([piece for piece in pieces if len(piece)])


class PlainReceiver(ConnectedEnd, PipeReceiver):
    def __init__(self, connection: Connection, max_tensor_bytes: int) -> None:
        super().__init__(connection)
        self._max_bytes = max_tensor_bytes

    async def recv_tensor(self, *, deadline: float) -> Tensor | None:
        async with self.receiving(TensorHeader | NoTensor, deadline) as header:
            if isinstance(header, NoTensor):
                return None
            data = torch.empty(num_bytes_of(header, self._max_bytes), dtype=torch.uint8)
            await self.connection.receive_into(host_view(data))
            return shaped(data, header)
