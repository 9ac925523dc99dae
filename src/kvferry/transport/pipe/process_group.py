"""Pipes over a `torch.distributed` process group of two: how the group is formed, and how a tensor goes through it.

The two processes start independently, and each may be in many groups. So there is no global group, and `Rendezvous`
replaces the store server. Headers go over the connection as frames (nothing is pickled), payloads through the group:

    receiver ── Ready ─────────────► sender      at most one tensor is under way: the pipe's bound
             ◄────── TensorHeader ──
             ── Accepted ──────────►             neither calls the group before the other is about to
             ◄══════ payload ══════              through the group, as uint8
             ── Received ──────────►             a sender that closes now takes nothing back:
                                                 what a group has "sent" may still lie with it

A call of the group cannot be cancelled, so none begins that could wait for long. If the peer dies during one, the
connection ends at once, and the call is left behind on its thread until it fails too, at the latest after `CALL_S`.
The group's sockets have no authentication: use them in trusted networks only.
"""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvferry.core.errors import PeerLost, TransferTimeout
from kvferry.transport.connection import Connection, Message, limited_to
from kvferry.transport.pipe.base import PipeKind, PipeReceiver, PipeSender
from kvferry.transport.pipe.blocking_thread import BlockingThread
from kvferry.transport.pipe.connected import ConnectedEnd
from kvferry.transport.pipe.messages import Accepted, Formed, NoTensor, Published, Ready, Received, TensorHeader
from kvferry.transport.pipe.rendezvous import Rendezvous
from kvferry.transport.pipe.tensors import flat_bytes, header_of, num_bytes_of, shaped
from kvferry.transport.transfer_loop import run_together

SENDER, RECEIVER = 0, 1
SHORTEST_S = 0.001
CALL_S = 8.0
CALL_BYTES = 16 * 2**20
"""Moved by one call, which takes far less than `CALL_S` if both ends are at work."""


class ProcessGroupPipe(PipeKind):
    """A kind of pipe over a process group. A subclass makes the group, and says how to wait for it."""

    device: torch.device

    @abstractmethod
    def make_group(self, store: Rendezvous, rank: int, timeout_s: float) -> Any:
        """A connected group of two. Called on a thread, may block; raises `RuntimeError`, as torch does."""

    @abstractmethod
    def send(self, group: Any, data: Tensor, timeout_s: float) -> None:
        """Send uint8 `[num_bytes]` to the receiver; as `make_group`."""

    @abstractmethod
    def receive(self, group: Any, data: Tensor, timeout_s: float) -> None:
        """Fill uint8 `[num_bytes]` from the sender; as `make_group`."""

    @abstractmethod
    def discard(self, group: Any) -> None:
        """Give up a group, perhaps during a call."""

    async def open_sender(self, connection: Connection, deadline: float) -> PipeSender:
        """Form the group as its rank 0."""
        return GroupSender(self, connection, *await self._join(connection, SENDER, deadline))

    async def open_receiver(self, connection: Connection, deadline: float) -> PipeReceiver:
        """Form the group as its rank 1."""
        return GroupReceiver(self, connection, *await self._join(connection, RECEIVER, deadline))

    async def _join(self, connection: Connection, rank: int, deadline: float) -> tuple[BlockingThread, Any]:
        thread = BlockingThread(f"{self.name}-pipe")
        try:
            async with limited_to(deadline, f"forming a {self.name} group"):
                return thread, await _form(self, thread, connection, rank, deadline)
        except BaseException:
            thread.close()
            raise


async def _form(
    kind: ProcessGroupPipe, thread: BlockingThread, connection: Connection, rank: int, deadline: float
) -> Any:
    """Make the group: pass on what both ends publish, until both have joined it."""
    loop = asyncio.get_running_loop()
    outbox: asyncio.Queue[Message] = asyncio.Queue()  # bounded by what a rendezvous takes

    def publish(key: str, value: bytes) -> None:
        loop.call_soon_threadsafe(outbox.put_nowait, Published(key, value))

    timeout_s = max(SHORTEST_S, deadline - loop.time())
    store = Rendezvous(publish, timeout_s)
    group: Any = None

    async def make() -> None:
        nonlocal group
        try:
            group = await thread.run(partial(kind.make_group, store, rank, timeout_s))
        except Exception as error:  # noqa: BLE001 - what torch raises over a value that the peer made up is anything
            outbox.put_nowait(Formed(f"{kind.name}: {error}"[:2000]))
        else:
            outbox.put_nowait(Formed())

    async def speak() -> None:
        while True:
            message = await outbox.get()
            await connection.send(message)
            if isinstance(message, Formed):
                _require(message, "this end")
                return

    async def listen() -> None:
        while True:
            message: Published | Formed = await connection.receive(Published | Formed)
            if isinstance(message, Formed):
                _require(message, "the peer")
                return
            store.learn(message.key, message.value)

    try:
        await run_together(make(), speak(), listen())
    except BaseException:
        store.fail(PeerLost("the group was abandoned"))
        if group is not None:
            kind.discard(group)
        raise
    return group


def _require(formed: Formed, who: str) -> None:
    if formed.error:
        raise PeerLost(f"{who} could not join the process group: {formed.error}")


class GroupEnd(ConnectedEnd):
    """One end of a pipe: its group, and the thread that makes the group's calls."""

    def __init__(self, kind: ProcessGroupPipe, connection: Connection, thread: BlockingThread, group: Any) -> None:
        super().__init__(connection)
        self.kind, self._thread, self._group = kind, thread, group

    async def move(self, call: Callable[..., None], data: Tensor, deadline: float) -> None:
        """Move uint8 `[num_bytes]`; ends early when the connection does. Raises `PeerLost` or `TransferTimeout`."""
        for start in range(0, data.numel(), CALL_BYTES):
            await self._move_piece(call, data[start : start + CALL_BYTES], deadline)

    async def _move_piece(self, call: Callable[..., None], data: Tensor, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = max(SHORTEST_S, min(CALL_S, deadline - loop.time()))
        moving = loop.create_task(self._run(partial(call, self._group, data, timeout_s), deadline))
        watching = loop.create_task(_ended(self.connection))
        try:
            await asyncio.wait([moving, watching], return_when=asyncio.FIRST_COMPLETED)
            if not moving.done() and watching.result():
                raise PeerLost("the peer closed the connection")
            await moving
        finally:
            moving.cancel()
            watching.cancel()
            await asyncio.gather(moving, watching, return_exceptions=True)

    async def _run(self, call: Callable[[], None], deadline: float) -> None:
        try:
            await self._thread.run(call)
        except RuntimeError as error:
            if asyncio.get_running_loop().time() >= deadline:
                raise TransferTimeout(f"{self.kind.name} pipe: {error}") from error
            raise PeerLost(f"{self.kind.name} pipe: {error}") from error

    async def close(self) -> None:
        """Close the connection, and give up the group."""
        await super().close()
        group, self._group = self._group, None
        if group is not None:
            self.kind.discard(group)
            self._thread.close()


async def _ended(connection: Connection) -> bool:
    """Wait until there is something to receive. True if it is the end of the connection."""
    await connection.readable()
    try:
        return not connection.io.num_pending and not socket.socket.recv(connection.socket, 1, socket.MSG_PEEK)
    except OSError:
        return True


class GroupSender(GroupEnd, PipeSender):
    """Sends tensors by `torch.distributed`."""

    async def send_tensor(self, tensor: Tensor | None, *, deadline: float) -> None:
        """Wait until the receiver is ready, then send."""
        self.require_open()
        kind = self.kind
        header: Message = NoTensor() if tensor is None else header_of(tensor, kind.settings.max_tensor_bytes)
        async with self.receiving(Ready, deadline, "sending a tensor"):
            await self.connection.send(header)
            if tensor is not None and tensor.numel():
                await self.connection.receive(Accepted)
                data = flat_bytes(tensor).to(kind.device)
                await self.move(kind.send, data, deadline)
                await self.connection.receive(Received)


class GroupReceiver(GroupEnd, PipeReceiver):
    """Receives tensors by `torch.distributed`."""

    _asked = False
    """Whether `Ready` was sent for the next tensor."""

    async def recv_tensor(self, *, deadline: float) -> Tensor | None:
        """Say `Ready`, then receive."""
        self.require_open()
        kind = self.kind
        if not self._asked:
            async with self.transferring(deadline, "asking for a tensor"):
                await self.connection.send(Ready())
            self._asked = True
        async with self.receiving(TensorHeader | NoTensor, deadline) as header:
            self._asked = False
            if isinstance(header, NoTensor):
                return None
            num_bytes = num_bytes_of(header, kind.settings.max_tensor_bytes)
            data = torch.empty(num_bytes, dtype=torch.uint8, device=kind.device)
            if num_bytes:
                await self.connection.send(Accepted())
                await self.move(kind.receive, data, deadline)
                await self.connection.send(Received())
            return shaped(data, header)
