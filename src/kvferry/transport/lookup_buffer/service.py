"""The producer's end of the control channel: tells each consumer what happens to the keys it selected.

Owns one session per connection. News is not queued: a session remembers how much it has told (a cursor per key)
and asks the entry table for the rest, so a slow consumer costs no memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from kvferry.core.errors import ProtocolError
from kvferry.transport.checksum import digest
from kvferry.transport.connection import Connection
from kvferry.transport.lookup_buffer.entries import Cursor, EntryTable
from kvferry.transport.lookup_buffer.messages import (
    FromConsumer,
    News,
    Offer,
    Over,
    ReleaseKey,
    Renew,
    Select,
    Take,
    TakeAnswer,
    Unselect,
    Verify,
    VerifyAnswer,
)
from kvferry.transport.memory import BlockMemory
from kvferry.transport.tasks import run_together

MAX_SELECTS = 4096
MAX_KEY_LENGTH = 512
MAX_TAKERS = 1024


class ProducerService:
    """Serves the "lookup" purpose of the instance's listener."""

    def __init__(self, table: EntryTable, offer: Offer, memory: BlockMemory) -> None:
        self._table, self._offer, self._memory = table, offer, memory
        self._sessions: set[_Session] = set()

    async def serve(self, connection: Connection) -> None:
        """One consumer, until it leaves. Keys it has not taken stay for the rest of their lease."""
        session = _Session(self._table, connection, self._memory, self._sessions)
        self._sessions.add(session)
        self._table.listen(session.wake)
        try:
            await connection.send(self._offer)
            await run_together(session.listen(), session.tell())
        finally:
            self._table.unlisten(session.wake)
            self._sessions.discard(session)


@dataclass
class _Selected:
    key: str
    cursor: Cursor


class _Session:
    """One consumer's selections. Lives on the transfer loop, but for `wake`."""

    def __init__(
        self, table: EntryTable, connection: Connection, memory: BlockMemory, sessions: Collection[_Session]
    ) -> None:
        self._table, self._connection, self._memory, self._sessions = table, connection, memory, sessions
        self._loop = asyncio.get_running_loop()
        self._selected: dict[int, _Selected] = {}
        self._answers: deque[TakeAnswer | VerifyAnswer] = deque()
        self._news = asyncio.Event()
        self._woken = False

    def wake(self) -> None:
        """There may be something to tell. From any thread; many calls before the loop gets to it are one."""
        if self._selected and not self._woken:  # a select that comes meanwhile looks for itself
            self._woken = True
            self._loop.call_soon_threadsafe(self._on_wake)

    def _on_wake(self) -> None:
        self._woken = False  # before looking, so that a change after the look wakes again
        self._news.set()

    async def listen(self) -> None:
        """Do as the consumer says."""
        while True:
            message: FromConsumer = await self._connection.receive(FromConsumer)
            match message:
                case Select():
                    self._select(message)
                case Unselect():
                    self._selected.pop(message.select_id, None)
                case Verify():
                    await self._verify(message)
                case Take():
                    self._take(message)
                case Renew():
                    self._renew(message)
                case ReleaseKey():
                    self._release(_checked(message.key))

    async def tell(self) -> None:
        """Tell the consumer what happens."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._answers:
                await self._answer(self._answers.popleft())
            for select_id, selected in list(self._selected.items()):
                await self._tell_one(select_id, selected)

    async def _answer(self, answer: TakeAnswer | VerifyAnswer) -> None:
        selected = self._selected.get(answer.select_id)
        if isinstance(answer, VerifyAnswer) and selected is not None:
            await self._tell_one(answer.select_id, selected)  # a digest of blocks in other use comes after that news
        await self._connection.send(answer)

    async def _tell_one(self, select_id: int, selected: _Selected) -> None:
        while self._selected.get(select_id) is selected:
            changes, selected.cursor = self._table.changes(selected.key, selected.cursor)
            if not changes:
                return
            if any(isinstance(change, Over) for change in changes):
                del self._selected[select_id]
            await self._connection.send(News(select_id, changes))

    def _select(self, message: Select) -> None:
        if len(self._selected) >= MAX_SELECTS or message.select_id in self._selected:
            raise ProtocolError(f"select {message.select_id}: in use, or one of more than {MAX_SELECTS}")
        self._selected[message.select_id] = _Selected(_checked(message.key), Cursor())
        self._news.set()

    async def _verify(self, message: Verify) -> None:
        if self._memory.device != "cpu":
            raise ProtocolError("checksums are made of host memory only")
        self._queue(VerifyAnswer(message.select_id, await digest(self._memory, message.spans)))

    def _take(self, message: Take) -> None:
        if not 0 <= message.taker < message.num_takers <= MAX_TAKERS:
            raise ProtocolError(f"taker {message.taker} of {message.num_takers}")
        selected = self._selected.get(message.select_id)
        held = selected is not None and self._table.take(
            selected.key, message.generation, message.taker, message.num_takers
        )
        if held:
            del self._selected[message.select_id]
        self._queue(TakeAnswer(message.select_id, message.generation, held))

    def _queue(self, answer: TakeAnswer | VerifyAnswer) -> None:
        if len(self._answers) >= MAX_SELECTS:
            raise ProtocolError("answers are asked for faster than they are read")
        self._answers.append(answer)
        self._news.set()

    def _release(self, key: str) -> None:
        """A consumer speaks for its own instance: another that has the same ticket, as after a retry, keeps the key."""
        if not any(one.selects(key) and one.engine_id != self.engine_id for one in self._sessions):
            self._table.release(key)

    @property
    def engine_id(self) -> str:
        """The consumer's."""
        return self._connection.peer.engine_id

    def selects(self, key: str) -> bool:
        """Whether the consumer waits for this key, or reads it."""
        return any(selected.key == key for selected in self._selected.values())

    def _renew(self, message: Renew) -> None:
        for select_id in message.select_ids:
            selected = self._selected.get(select_id)
            if selected is not None:
                self._table.renew(selected.key)


def _checked(key: str) -> str:
    if not 0 < len(key) <= MAX_KEY_LENGTH:
        raise ProtocolError(f"a key of {len(key)} characters; 1 to {MAX_KEY_LENGTH} are taken")
    return key
