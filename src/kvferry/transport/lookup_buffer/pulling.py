"""Reading a peer's blocks by way of a pipe: the reader asks, and the peer sends them, gathered, down the pipe.

    reader ── Open(ticket) ────────► peer      and `pipe.meeting` makes the pipe with that ticket
           ── Pull(spans) ─────────►
           ◄═ uint8 tensors ═══════            through the pipe, of at most a piece's size, in the order of the pulls
           ◄═ None, and Refused ═══            spans outside of its memory

Nothing is sent that was not asked for. So a peer holds one gathered piece for each reader, however many hand-offs
wait and in whatever order they are fetched, and a FIFO serves by key without anyone waiting for another's turn.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor, uint8

from kvferry.core.errors import KvferryError, PeerLost, ProtocolError
from kvferry.transport.connection import Connection, limited_to
from kvferry.transport.fabric.base import (
    Fabric,
    FabricContext,
    FabricPeer,
    host_and_port,
    require_same_length,
    require_within,
)
from kvferry.transport.lookup_buffer.block_bytes import BlockBytes, pieces_of, take_front
from kvferry.transport.memory import Span
from kvferry.transport.pipe.base import PipeKind, PipeReceiver, PipeSender
from kvferry.transport.pipe.meeting import MEET_S, PipeServer, connect_pipe
from kvferry.transport.tls import require_covered
from kvferry.transport.wire import Message

PURPOSE = "pull"
PIECE_BYTES = 8 * 2**20
STALL_S = 60.0
"""A peer that keeps a pipe waiting for so long is given up."""


class Open(Message, frozen=True):
    """A reader's first words: it is about to make the pipe with this ticket."""

    ticket: str


class Pull(Message, frozen=True):
    """Send these spans of your memory."""

    spans: list[Span]


class Refused(Message, frozen=True):
    """Why the pull that a None answers was refused."""

    reason: str


class PullFabric(Fabric):
    """Reads, and lets read, through pipes of one kind."""

    def __init__(self, context: FabricContext, kind: PipeKind) -> None:
        super().__init__(context)
        require_covered(context.tls, f"pipe {kind.name}", covered=kind.under_tls)
        self.name, self.over_tcp, self._kind = kind.name, kind.over_tcp, kind  # type: ignore[misc]
        self.blocks = BlockBytes(context.memory)
        self._pipes = PipeServer(context.listener, kind)
        context.listener.handle(PURPOSE, self._serve)

    def describe(self) -> dict[str, Any]:
        """Where the serving side listens."""
        return {"host": self.context.listener.host, "port": self.context.listener.port}

    def reachable(self, description: dict[str, Any]) -> bool:
        """Always, as far as can be told without trying."""
        return "port" in description

    async def connect(self, description: dict[str, Any], deadline: float) -> FabricPeer:
        """Make a first pipe, so that what does not work shows now."""
        host, port = host_and_port(description, self.name)
        peer = PullPeer(self, host, port)
        await peer.connect(deadline)
        return peer

    async def open_session(self, host: str, port: int, deadline: float) -> PullSession:
        """A pipe, and the connection on which to ask for what comes through it."""
        context, ticket = self.context, secrets.token_hex(16)
        connection = await context.dial(host, port, PURPOSE, deadline)
        try:
            await connection.send(Open(ticket))
            pipe = await connect_pipe(
                self._kind, host, port, ticket, context.identity, context.token, deadline, context.tls
            )
        except BaseException:
            await connection.close()
            raise
        return PullSession(connection, pipe, self.blocks)

    async def _serve(self, connection: Connection) -> None:
        """Answer one reader, pull by pull, until it leaves."""
        deadline = asyncio.get_running_loop().time() + MEET_S
        async with limited_to(deadline, "the first message of a reader"):
            opened: Open = await connection.receive(Open)
        pipe = await self._pipes.accept(opened.ticket, deadline)
        try:
            while True:
                pull: Pull = await connection.receive(Pull)
                await self._answer(connection, pipe, pull.spans)
        finally:
            await pipe.close()

    async def _answer(self, connection: Connection, pipe: PipeSender, spans: Sequence[Span]) -> None:
        loop = asyncio.get_running_loop()
        try:
            require_within(spans, self.context.memory.num_bytes, "peer's")
            for piece in pieces_of(spans, PIECE_BYTES):
                await pipe.send_tensor(self.blocks.gather(piece), deadline=loop.time() + STALL_S)
        except ProtocolError as error:
            pipe.require_open()
            await connection.send(Refused(str(error)))
            await pipe.send_tensor(None, deadline=loop.time() + STALL_S)


class _Wanted:
    """One pull under way, and where its bytes go."""

    def __init__(self, spans: Sequence[Span], num_bytes: int) -> None:
        self.spans, self.num_left = list(spans), num_bytes
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(self, error: KvferryError | None = None) -> None:
        """Wake the reader, unless it gave up."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class PullSession:
    """A pipe and the pulls under way on it. Owns both ends' connections; `close` it."""

    def __init__(self, connection: Connection, pipe: PipeReceiver, blocks: BlockBytes) -> None:
        self.failure: KvferryError | None = None
        self._connection, self._pipe, self._blocks = connection, pipe, blocks
        self._asking = asyncio.Lock()
        self._wanted: deque[_Wanted] = deque()
        self._asked = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="pulling")

    async def pull(self, remote: Sequence[Span], local: Sequence[Span], num_bytes: int) -> None:
        """Ask, and wait until the bytes are in place."""
        wanted = _Wanted(local, num_bytes)
        async with self._asking:  # what is asked for comes in the order in which it was asked for
            if self.failure is not None:
                raise self.failure
            self._wanted.append(wanted)
            try:
                await self._connection.send(Pull(list(remote)))
            except BaseException:  # half of a frame may be out, and nothing can follow it
                self._fail(PeerLost("a read request was cut off"))
                raise
            self._asked.set()
        await wanted.done  # a cancelled wait cancels the future too: what still comes goes nowhere

    async def close(self) -> None:
        """Break off; pulls under way raise `PeerLost`."""
        self._fail(PeerLost("the connection to the peer was closed during a read"))
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._pipe.close()
        await self._connection.close()

    async def _run(self) -> None:
        """Receive what was asked for, while there is any."""
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                while self._wanted and self.failure is None:
                    await self._receive(self._wanted[0])
                    self._wanted.popleft()
        except KvferryError as error:
            self._fail(error)
        finally:
            self._fail(PeerLost("the connection to the peer was closed during a read"))

    async def _receive(self, wanted: _Wanted) -> None:
        loop = asyncio.get_running_loop()
        while wanted.num_left:
            data = await self._pipe.recv_tensor(deadline=loop.time() + STALL_S)
            if data is None:
                async with limited_to(loop.time() + STALL_S, "the reason of a refusal"):
                    refused: Refused = await self._connection.receive(Refused)
                wanted.finish(ProtocolError(f"the peer refused a read: {refused.reason}"))
                return
            self._place(wanted, data)
        wanted.finish()

    def _place(self, wanted: _Wanted, data: Tensor) -> None:
        if data.dtype != uint8 or data.dim() != 1 or not 0 < data.numel() <= wanted.num_left:
            raise ProtocolError(f"{tuple(data.shape)} of {data.dtype} came for a read of {wanted.num_left} bytes more")
        spans, wanted.spans = take_front(wanted.spans, data.numel())
        wanted.num_left -= data.numel()
        if not wanted.done.done():
            self._blocks.scatter(data, spans)

    def _fail(self, error: KvferryError) -> None:
        self.failure = self.failure or error
        self._connection.abort()
        for wanted in self._wanted:
            wanted.finish(self.failure)


class PullPeer(FabricPeer):
    """A peer whose blocks come through a pipe; a pipe that broke is made anew with the next read."""

    def __init__(self, fabric: PullFabric, host: str, port: int) -> None:
        self._fabric, self._host, self._port = fabric, host, port
        self._session: PullSession | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def connect(self, deadline: float) -> PullSession:
        """The session, made anew if need be."""
        async with self._connecting:
            if self._session is not None and self._session.failure is not None:
                await self._session.close()
                self._session = None
            if self._closed:
                raise PeerLost("the connection to the peer was closed during a read")
            if self._session is None:
                self._session = await self._fabric.open_session(self._host, self._port, deadline)
            return self._session

    async def read(self, remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
        """Ask, and wait until the bytes are in place."""
        require_within(local, self._fabric.context.memory.num_bytes, "own")
        num_bytes = require_same_length(remote, local)
        if not num_bytes:
            return
        async with limited_to(deadline, "reading a peer's blocks"):
            session = await self.connect(deadline)
            await session.pull(remote, local, num_bytes)

    async def close(self) -> None:
        """Break the pipe off."""
        self._closed = True
        async with self._connecting:
            if self._session is not None:
                await self._session.close()
