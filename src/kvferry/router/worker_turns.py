"""Tickets for next turns in a router with several workers: each conversation has one worker that keeps its tickets.

A turn may come to any worker, which asks the keeper. A keeper that is gone has lost its tickets, and one that does not
answer is left alone for a while: those turns are computed. The parent hears of all tickets, and has another worker
release those of one that is gone. What it had just taken for a request, instances free when its time is over
(`decoder_kv_blocks_ttl`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Literal, TypeVar
from zlib import crc32

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import InvalidRequest, TransferError, Unavailable
from kvferry.router.instance import Instance
from kvferry.router.next_turn import Kept, KeptTickets

logger = logging.getLogger(__name__)

LONGEST_MESSAGE = 256 * 1024
"""Bytes: a ticket of the longest, and what says whose it is."""

_LEFT_ALONE_S = 2.0

Found = TypeVar("Found")
Ask = Callable[[bytes], Awaitable[bytes]]
"""Another worker: from a message to its answer. Raises `TransferError` and `Unavailable` if it cannot be asked now, and
`InvalidRequest` if it refuses this message."""


class KeptMessage(msgspec.Struct, frozen=True):
    """A ticket on its way between workers. `decode`: name and URL. `until` is by the machine's monotonic clock, which
    all of its processes share."""

    decode: tuple[str, str]
    engine_id: str
    transfer_id: str
    params: dict[str, Any]
    until: float


class TurnMessage(msgspec.Struct, frozen=True):
    """What one worker wants of a conversation's keeper."""

    do: Literal["take", "put_back", "keep", "drop"]
    session: str
    kept: KeptMessage | None = None


_MESSAGES = msgspec.json.Decoder(TurnMessage)
_ANSWERS = msgspec.json.Decoder(KeptMessage | None)


def keeper_number(session: str, num_workers: int) -> int:
    """The worker that keeps a conversation's tickets."""
    return crc32(session.encode("utf-8", "replace")) % num_workers


async def answer_for_others(own: KeptTickets, message: bytes) -> bytes:
    """What another worker is told; nothing, where what it brings cannot be kept here. Raises `msgspec.MsgspecError`, of
    which there is no cause but a mistake of ours."""
    asked, found = _MESSAGES.decode(message), None
    kept = None if asked.kept is None else _here(asked.kept, own.instances)
    if kept is None and asked.kept is not None:
        return b""
    match asked.do:
        case "take":
            found = await own.take(asked.session)
        case "drop":
            await own.drop(asked.session)
        case "put_back" if kept is not None:
            await own.put_back(asked.session, kept)
        case "keep" if kept is not None:
            await own.keep(asked.session, kept)
    return msgspec.json.encode(None if found is None else _told(found))


class KeeperElsewhere:
    """Another worker's `KeptTickets`. Owns the questions that are under way."""

    def __init__(self, ask: Ask, own: KeptTickets, clock: Clock) -> None:
        """`own` releases what cannot be kept there."""
        self._ask, self._own, self._clock = ask, own, clock
        self._left_alone_until = 0.0
        self._under_way: set[asyncio.Task[Any]] = set()

    def is_new(self) -> None:
        """Another process is in its place."""
        self._left_alone_until = 0.0

    async def take(self, session: str) -> Kept | None:
        """As `TurnKeeper`. What comes for who was cancelled meanwhile is released."""
        taking = self._begin(self._take(session))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._release_taken)
            raise

    def _release_taken(self, taking: asyncio.Task[Kept | None]) -> None:
        kept = None if taking.cancelled() or taking.exception() is not None else taking.result()
        if kept is not None:
            self._own.release(kept)

    def _begin(self, work: Coroutine[Any, Any, Found]) -> asyncio.Task[Found]:
        """To be seen to its end, which is near, also when who wants it has left."""
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _take(self, session: str) -> Kept | None:
        answer = await self._say(TurnMessage("take", session))
        told = None if answer is None else _ANSWERS.decode(answer)
        return None if told is None else _here(told, self._own.instances)

    async def put_back(self, session: str, kept: Kept) -> None:
        """Give a ticket that was taken in vain back to the process that keeps them, even if the caller is cancelled."""
        await asyncio.shield(self._begin(self._give("put_back", session, kept)))

    async def keep(self, session: str, kept: Kept) -> None:
        """Give a new ticket to the process that keeps them, even if the caller is cancelled."""
        await asyncio.shield(self._begin(self._give("keep", session, kept)))

    async def drop(self, session: str) -> None:
        """Have the process that keeps the tickets release this one."""
        await self._say(TurnMessage("drop", session))

    async def _give(self, do: Literal["put_back", "keep"], session: str, kept: Kept) -> None:
        if not await self._say(TurnMessage(do, session, _told(kept))):
            self._own.release(kept)

    async def _say(self, message: TurnMessage) -> bytes | None:
        """None: nobody hears it."""
        if self._clock.monotonic() < self._left_alone_until:
            return None
        encoded = msgspec.json.encode(message)
        try:
            if len(encoded) > LONGEST_MESSAGE:
                raise InvalidRequest(f"a message of {len(encoded)} bytes is too long")
            return await self._ask(encoded)
        except InvalidRequest as error:  # about this message alone: others may be asked for
            logger.debug("a worker is not told of a conversation: %s", error)
            return None
        except (TransferError, Unavailable) as error:
            self._left_alone_until = self._clock.monotonic() + _LEFT_ALONE_S
            logger.warning("what is kept for next turns cannot be asked for: %s", error)
            return None


def _told(kept: Kept) -> KeptMessage:
    named = (kept.decode.name, kept.decode.url)
    return KeptMessage(named, kept.engine_id, kept.transfer_id, kept.params, kept.until)


def _here(told: KeptMessage, instances: Iterable[Instance]) -> Kept | None:
    """None when the instance has left."""
    for one in instances:
        if (one.name, one.url) == told.decode:
            return Kept(one, told.engine_id, told.transfer_id, told.params, told.until)
    return None
