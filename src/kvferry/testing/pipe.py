"""The contract of pipes. In a package that provides one:

    from kvferry.testing.pipe import PipeContract

    class TestMyPipe(PipeContract):
        transport = "my_package.my_module:MyFabric"

`transport` names the `PipeFabric` that opens the pipe, for which `FabricContract` is run too. Needs pytest and
pytest-asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
import torch

from kvferry.core.errors import PeerLost
from kvferry.testing.fabric import FabricContract
from kvferry.testing.kv import BlockRegion, make_layout, soon
from kvferry.transport.connection import Connection, Identity
from kvferry.transport.control import Listener
from kvferry.transport.fabric.base import FabricContext, fabric_class
from kvferry.transport.fabric.pipe import PipeFabric, TensorPipe
from kvferry.transport.options import TransportOptions

PURPOSE = "pipe-ends"


class PipeContract(FabricContract):
    """`path`: the folder of the module that `transport` names, if that is not installed."""

    path: ClassVar[str] = ""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _findable(cls) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            if cls.path:
                patch.syspath_prepend(cls.path)
            yield

    @asynccontextmanager
    async def ends(self) -> AsyncIterator[tuple[TensorPipe, TensorPipe]]:
        """(sender, receiver) of one pipe, opened over a connection of this process with itself, and closed."""
        region = BlockRegion(make_layout(), 4)
        listener = Listener(Identity("engine", region.memory.layout), "secret")
        fabric_type = fabric_class(self.transport)
        assert issubclass(fabric_type, PipeFabric)
        fabric = fabric_type(FabricContext(region.memory, listener, TransportOptions()))
        opened: asyncio.Future[TensorPipe] = asyncio.get_running_loop().create_future()

        async def serve(connection: Connection) -> None:
            opened.set_result(await fabric.open_pipe(connection, soon(), sends=True))
            await connection.peek_byte()

        listener.handle(PURPOSE, serve)
        serving = asyncio.create_task(listener.serve())
        connection = await listener.dial(listener.host, listener.port, PURPOSE, soon())
        receiver = await fabric.open_pipe(connection, soon(), sends=False)
        try:
            yield await opened, receiver
        finally:
            await connection.close()
            await asyncio.gather((await opened).close(), receiver.close())
            await fabric.close()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            region.close()

    async def test_in_order_and_whole_whatever_their_size(self) -> None:
        generator = torch.Generator().manual_seed(1)
        sizes = [
            1,
            PipeFabric.piece_bytes,
            3,
            *torch.randint(1, 2**20, (20,), generator=generator).tolist(),
            PipeFabric.piece_bytes - 1,
        ]
        sent = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]

        async def send(pipe: TensorPipe) -> None:
            for tensor in sent:
                await pipe.send_tensor(tensor)

        async with self.ends() as (sender, receiver):
            sending = asyncio.create_task(send(sender))
            for tensor in sent:
                received = await receiver.recv_tensor(len(tensor))
                assert received.dtype == torch.uint8
                assert torch.equal(received, tensor)
            await sending

    async def test_what_was_sent_may_be_changed(self) -> None:
        async with self.ends() as (sender, receiver):
            for size in (1000, PipeFabric.piece_bytes):
                source = torch.zeros(size, dtype=torch.uint8)
                receiving = asyncio.create_task(receiver.recv_tensor(size))
                await sender.send_tensor(source)
                source.fill_(1)
                assert not (await receiving).any()

    async def test_a_sender_without_a_receiver_waits(self) -> None:
        """Bytes in flight are bounded by the buffers between the ends. The call is then cancelled."""

        async def send(pipe: TensorPipe) -> None:
            for _ in range(64):
                await pipe.send_tensor(torch.zeros(PipeFabric.piece_bytes, dtype=torch.uint8))

        async with self.ends() as (sender, _):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await send(sender)

    async def test_a_wait_in_vain_is_given_up(self) -> None:
        async with self.ends() as (_, receiver):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await receiver.recv_tensor(4)

    async def test_a_peer_that_does_not_open_its_end(self) -> None:
        pair = self.make_pair()
        closed = asyncio.Event()

        async def leave(connection: Connection) -> None:
            closed.set()

        listener = Listener(Identity("engine", pair.local.memory.layout), "secret", tls=self.tls())
        listener.handle("pull", leave)
        serving = asyncio.create_task(listener.serve())
        with pytest.raises(PeerLost):
            await pair.reader.fabrics[0].connect({"host": listener.host, "port": listener.port}, soon())
        assert closed.is_set()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        pair.close()
