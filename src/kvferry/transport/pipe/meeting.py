"""How the two ends of a pipe find each other: the receiving instance dials the sending one's listener.

    receiver ── dial "pipe", Join(name, ticket) ──► sender's listener ──► whoever waits in `accept(ticket)`

The ticket, a random word of whoever asks for the pipe, says which of several pipes this is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvferry.core.errors import KvferryError, ProtocolError
from kvferry.transport.connection import Connection, limited_to
from kvferry.transport.control import Listener
from kvferry.transport.pipe.base import PipeKind, PipeReceiver, PipeSender
from kvferry.transport.pipe.messages import MAX_MESSAGE_BYTES, PURPOSE, Join

MEET_S = 10.0
MAX_MEETINGS = 1024


@dataclass
class _Meeting:
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    sender: asyncio.Future[PipeSender] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class PipeServer:
    """The sending instance's side, for one kind of pipe. Its pipes are closed when the listener ends."""

    def __init__(self, listener: Listener, kind: PipeKind) -> None:
        self._kind = kind
        self._meetings: dict[str, _Meeting] = {}
        listener.handle(PURPOSE, self._serve)

    async def accept(self, ticket: str, deadline: float) -> PipeSender:
        """The sending end of the pipe that comes with this ticket; the caller closes it.

        Raises `TransferTimeout`, or why the pipe could not be made.
        """
        with self._meeting(ticket) as meeting:
            meeting.wanted.set()
            async with limited_to(deadline, "waiting for a pipe's receiver"):
                return await meeting.sender

    async def _serve(self, connection: Connection) -> None:
        connection.limit_frames(MAX_MESSAGE_BYTES)
        deadline = asyncio.get_running_loop().time() + MEET_S
        async with limited_to(deadline, "the first message of a pipe"):
            join: Join = await connection.receive(Join)
        if join.name != self._kind.name:
            raise ProtocolError(
                f"the peer asks for a pipe of kind {join.name[:40]!r}, this instance uses {self._kind.name};"
                " set the same transport on both"
            )
        with self._meeting(join.ticket) as meeting:
            async with limited_to(deadline, "waiting for a pipe's sender"):
                await meeting.wanted.wait()
            sender = await self._open(connection, meeting, deadline)
        try:
            await connection.wait_closed()
        finally:
            await sender.close()

    async def _open(self, connection: Connection, meeting: _Meeting, deadline: float) -> PipeSender:
        try:
            sender = await self._kind.open_sender(connection, deadline)
        except KvferryError as error:
            if not meeting.sender.done():
                meeting.sender.set_exception(error)
            raise
        if meeting.sender.done():
            await sender.close()
            raise ProtocolError("a pipe that is no longer waited for, or that exists already")
        meeting.sender.set_result(sender)
        return sender

    @contextmanager
    def _meeting(self, ticket: str) -> Iterator[_Meeting]:
        """The meeting of `accept` and `_serve`, whichever comes first; the first one to leave ends it."""
        if ticket not in self._meetings and len(self._meetings) >= MAX_MEETINGS:
            raise ProtocolError(f"more than {MAX_MEETINGS} pipes are being made")
        meeting = self._meetings.setdefault(ticket, _Meeting())
        try:
            yield meeting
        finally:
            if self._meetings.get(ticket) is meeting:
                del self._meetings[ticket]


async def connect_pipe(kind: PipeKind, connection: Connection, ticket: str, deadline: float) -> PipeReceiver:
    """Make the pipe over a connection to a `PipeServer`, which it owns from now on; the caller closes the pipe. Raises
    why it could not be made."""
    try:
        connection.limit_frames(MAX_MESSAGE_BYTES)
        await connection.send(Join(kind.name, ticket))
        return await kind.open_receiver(connection, deadline)
    except BaseException:
        await connection.close()
        raise
