"""What every pipe must do. In a package that brings one:

    from kvferry.testing.pipe import PipeContract

    class TestMyPipe(PipeContract):
        kind = "my_package.my_module:MyPipe"

Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar

import pytest
import pytest_asyncio
import torch

from kvferry.core.errors import AuthenticationFailed, PeerLost, ProtocolError, TransferTimeout
from kvferry.testing.kv import soon, until
from kvferry.testing.pipe_ends import (
    CAPACITY,
    MIB,
    SETTINGS,
    Ends,
    PipeProcess,
    fill,
    join,
    pass_on,
    random_tensor,
    same,
    serving,
)
from kvferry.transport.pipe.base import PipeSettings, pipe_kind
from kvferry.transport.pipe.tensors import DTYPES


class PipeEnds:
    """What can be shown of the two ends of any pipe. `settings`: what both ends are built with."""

    pytestmark = pytest.mark.asyncio
    settings: ClassVar[PipeSettings] = SETTINGS

    def pipe(self, settings: PipeSettings) -> AbstractAsyncContextManager[Ends]:
        """Both ends, in this process; closed with the body."""
        raise NotImplementedError

    @pytest_asyncio.fixture
    async def ends(self) -> AsyncIterator[Ends]:
        async with self.pipe(self.settings) as ends:
            yield ends

    @pytest.mark.parametrize("dtype", DTYPES)
    async def test_every_dtype(self, ends: Ends, dtype: str) -> None:
        tensor = random_tensor(DTYPES[dtype], (3, 5))
        [received] = await pass_on(ends, tensor)
        assert same(received, tensor)

    async def test_every_shape(self, ends: Ends) -> None:
        sent = [
            torch.tensor(3.5),
            torch.tensor(True),
            torch.empty(0),
            torch.empty(3, 0, 4, dtype=torch.bfloat16),
            None,
            torch.arange(24).reshape(2, 3, 4).transpose(0, 2),
            torch.arange(40)[::3],
            torch.zeros(1).expand(5, 4),
            torch.randn(4, 4, dtype=torch.complex64).conj(),
            torch.randn(4, dtype=torch.complex64).conj().imag,
            torch.ones(*[1] * 20, dtype=torch.int8),
            torch.ones(2, 3, requires_grad=True),
            None,
        ]
        received = await pass_on(ends, *sent)
        assert all(same(one, other) for one, other in zip(received, sent, strict=True))
        assert not any(tensor is not None and tensor.requires_grad for tensor in received)

    async def test_in_order_and_whole_whatever_their_size(self, ends: Ends) -> None:
        generator = torch.Generator().manual_seed(1)
        sizes = torch.randint(0, 3 * CAPACITY // 2, (24,), generator=generator).tolist()
        sent = [
            torch.randint(0, 256, (size if index % 3 else size % 100,), dtype=torch.uint8, generator=generator)
            for index, size in enumerate(sizes)
        ]
        received = await pass_on(ends, *sent)
        assert all(same(one, other) for one, other in zip(received, sent, strict=True))

    async def test_much_larger_than_the_pipe(self, ends: Ends) -> None:
        tensor = torch.randint(0, 256, (20 * CAPACITY + 13,), dtype=torch.uint8)
        [received] = await pass_on(ends, tensor)
        assert same(received, tensor)

    async def test_what_was_sent_may_be_changed_and_what_was_received_too(self, ends: Ends) -> None:
        sender, receiver = ends
        source = torch.zeros(1000)
        receiving = asyncio.create_task(receiver.recv_tensor(deadline=soon()))
        await sender.send_tensor(source, deadline=soon())
        source.fill_(1)
        first = await receiving
        assert first is not None
        assert not first.any()
        first.fill_(7)
        [second] = await pass_on(ends, source)
        assert same(second, source)
        assert (first == 7).all()

    async def test_many_small_ones(self, ends: Ends) -> None:
        sent = [torch.tensor(number) for number in range(200)]
        assert [tensor is not None and int(tensor) for tensor in await pass_on(ends, *sent)] == list(range(200))

    async def test_a_full_pipe_makes_the_sender_wait(self, ends: Ends) -> None:
        """So much and no more is under way; then the deadline ends the wait."""
        assert await fill(ends[0], torch.zeros(MIB, dtype=torch.uint8)) <= 16

    async def test_a_full_pipe_goes_on_when_it_is_emptied(self, ends: Ends) -> None:
        sender, receiver = ends
        sent = [torch.full((MIB,), number, dtype=torch.uint8) for number in range(20)]

        async def send() -> None:
            for tensor in sent:
                await sender.send_tensor(tensor, deadline=soon())

        sending = asyncio.create_task(send())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not sending.done()
        for tensor in sent:
            assert same(await receiver.recv_tensor(deadline=soon()), tensor)
        await sending

    async def test_nothing_comes(self, ends: Ends) -> None:
        """Waiting in vain loses nothing."""
        _, receiver = ends
        for _ in range(2):
            with pytest.raises(TransferTimeout):
                await receiver.recv_tensor(deadline=soon(0.02))
        giving_up = asyncio.create_task(receiver.recv_tensor(deadline=soon()))
        await asyncio.sleep(0)
        giving_up.cancel()
        await asyncio.gather(giving_up, return_exceptions=True)
        [received] = await pass_on(ends, torch.arange(3))
        assert same(received, torch.arange(3))

    @pytest.mark.parametrize("who", ["sender", "receiver"])
    async def test_close_while_the_receiver_waits(self, ends: Ends, who: str) -> None:
        sender, receiver = ends
        waiting = asyncio.create_task(receiver.recv_tensor(deadline=soon()))
        await asyncio.sleep(0.01)
        await (sender if who == "sender" else receiver).close()
        with pytest.raises(PeerLost):
            await waiting
        with pytest.raises(PeerLost):
            await receiver.recv_tensor(deadline=soon())

    @pytest.mark.parametrize("who", ["sender", "receiver"])
    async def test_close_while_the_sender_waits(self, ends: Ends, who: str) -> None:
        sender, receiver = ends

        async def send() -> None:
            while True:
                await sender.send_tensor(torch.zeros(8 * MIB), deadline=soon())

        waiting = asyncio.create_task(send())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await (sender if who == "sender" else receiver).close()
        with pytest.raises(PeerLost):
            await waiting
        with pytest.raises(PeerLost):
            await sender.send_tensor(None, deadline=soon())

    async def test_what_was_sent_before_a_close_arrives(self, ends: Ends) -> None:
        sender, receiver = ends
        receiving = asyncio.create_task(receiver.recv_tensor(deadline=soon()))
        await sender.send_tensor(torch.arange(1000), deadline=soon())
        await asyncio.gather(sender.close(), receiving)
        assert same(receiving.result(), torch.arange(1000))
        with pytest.raises(PeerLost):
            await receiver.recv_tensor(deadline=soon())

    async def test_both_close_twice(self, ends: Ends) -> None:
        for _ in range(2):
            await asyncio.gather(*(end.close() for end in ends))

    async def test_what_cannot_be_sent(self) -> None:
        async with self.pipe(PipeSettings(CAPACITY, max_tensor_bytes=1000)) as ends:
            for tensor in (
                torch.zeros(1001, dtype=torch.uint8),
                torch.zeros(2, 2).to_sparse(),
                torch.zeros(2, device="meta"),
            ):
                with pytest.raises(ProtocolError):
                    await ends[0].send_tensor(tensor, deadline=soon())
            [received] = await pass_on(ends, torch.zeros(1000, dtype=torch.uint8))
            assert received is not None


class PipeContract(PipeEnds):
    """What a pipe between two instances must do. `kind`: its name, or `module:Class`."""

    kind: ClassVar[str]
    path: ClassVar[str] = ""
    """The folder of the module of `kind`, if that is not installed."""

    @pytest.fixture(autouse=True)
    def _findable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if self.path:
            monkeypatch.syspath_prepend(self.path)

    @asynccontextmanager
    async def pipe(self, settings: PipeSettings) -> AsyncIterator[Ends]:
        """Over a connection of this process with itself."""
        async with serving(self.kind, settings) as (listener, server):
            kind = pipe_kind(self.kind, settings)
            made = await asyncio.gather(server.accept("t", soon()), join(kind, listener.port))
            try:
                yield made
            finally:
                await asyncio.gather(*(end.close() for end in made))

    async def test_a_tensor_larger_than_the_receiver_takes(self) -> None:
        settings = PipeSettings(capacity_bytes=CAPACITY)
        async with serving(self.kind, settings) as (listener, server):
            kind = pipe_kind(self.kind, PipeSettings(max_tensor_bytes=1000))
            sender, receiver = await asyncio.gather(server.accept("t", soon()), join(kind, listener.port))
            receiving = asyncio.create_task(receiver.recv_tensor(deadline=soon()))
            sending = asyncio.create_task(sender.send_tensor(torch.zeros(64 * MIB), deadline=soon()))
            with pytest.raises(ProtocolError, match="at most 1000"):
                await receiving
            with pytest.raises(PeerLost):
                await sending
            await receiver.close()
            await sender.close()

    async def test_a_stranger_gets_no_pipe(self) -> None:
        settings = PipeSettings(capacity_bytes=CAPACITY)
        async with serving(self.kind, settings) as (listener, _):
            with pytest.raises(AuthenticationFailed):
                await join(pipe_kind(self.kind, settings), listener.port, token="guess")

    async def test_to_another_process_until_it_is_killed_in_the_middle_of_a_tensor(self) -> None:
        async with serving(self.kind, PipeSettings(capacity_bytes=CAPACITY)) as (listener, server):
            peer = PipeProcess("receiver", self.kind, listener.port, 0, self.path)
            try:
                sender = await server.accept("t", soon(60))
                assert await peer.line() == "joined"
                peer.go(num_tensors=4)
                tensor = torch.randint(0, 256, (3 * MIB,), dtype=torch.uint8)
                bits = torch.ones(5, dtype=torch.bool)
                for sent, told in ((tensor, str(int(tensor.long().sum()))), (None, "None"), (bits, "5")):
                    await sender.send_tensor(sent, deadline=soon())
                    assert await peer.line() == told
                large = torch.zeros(256 * MIB, dtype=torch.uint8)
                sending = asyncio.create_task(sender.send_tensor(large, deadline=soon(60)))
                await asyncio.sleep(0.02)
                assert not sending.done()
            finally:
                peer.kill()
            with pytest.raises(PeerLost):
                await sending
            await sender.close()
            await until(lambda: listener.statistics()["open_connections"] == 0)

    async def test_a_sender_is_killed_in_the_middle_of_a_tensor(self) -> None:
        peer = PipeProcess("sender", self.kind, 0, 256 * MIB, self.path)
        try:
            port = int(await peer.line())
            kind = pipe_kind(self.kind, PipeSettings(capacity_bytes=CAPACITY))
            receiver = await join(kind, port, seconds=60)
            assert await peer.line() == "sending"
            receiving = asyncio.create_task(receiver.recv_tensor(deadline=soon(60)))
            await asyncio.sleep(0.02)
            assert not receiving.done()
        finally:
            peer.kill()
        with pytest.raises(PeerLost):
            await receiving
        await receiver.close()
