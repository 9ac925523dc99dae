"""One leg: one request to one instance, from when it is sent until it has ended or is lost.

    sent    no byte of the answer's body is here; another instance may answer instead
    begun   the answer has begun
    ended   all of it is here, or was passed on
    lost    no (more) answer will come; `error` says why

A leg owns what it takes of its instance, from `Legs.send` until it is over: its place in the counts of requests and of
work, and the connection. `close` gives back whatever is left, and cuts an answer that nobody wants any more, so that
the instance stops. What it learns of its instance (down, silent, busy) it tells the instance.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum, auto
from typing import Literal

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import PeerLost, TransferError
from kvferry.core.ordered_set import OrderedSet
from kvferry.http.client.call import Call, CallState
from kvferry.http.errors import AnswerTimeout, Unreachable
from kvferry.http.headers import RawHeaders, find_header
from kvferry.http.relay import Reader, relay
from kvferry.http.server.response import Response
from kvferry.observe.tracing import Span
from kvferry.router.choice.work import Work
from kvferry.router.errors import Silent, UnreadableStream, failure
from kvferry.router.headers import PROGRESS, content_type
from kvferry.router.instances.instance import LATE_BEFORE_DOWN, Instance

logger = logging.getLogger(__name__)

LONGEST_BUSY_S = 60.0
"""For how long an instance is passed over at most, whatever its `Retry-After` says."""
_LEAST_PAUSE_S, _USUAL_PAUSE_S = 0.1, 1.0
"""An instance that answers `Retry-After: 0` is not asked without end; and one that says nothing that can be read."""

Verdict = Literal["served", "busy", "fault"]
"""Who is at fault, according to an answer's status. `served`: the request was done, or is the client's fault, and the
answer is the client's; `busy`: load, and another instance may have room; `fault`: the instance failed, another may
not."""


def verdict(status: int) -> Verdict:
    """The meaning of an answer's status. A redirect is a fault, because it leads around the router."""
    if 200 <= status < 300:
        return "served"
    if status in (429, 503):
        return "busy"
    return "fault" if status >= 500 or 300 <= status < 400 else "served"


def retry_after_s(headers: RawHeaders) -> float:
    """How long an answer of 429 or 503 asks to wait; a date, or a value that cannot be read, counts as missing."""
    told = find_header(headers, b"retry-after") or b""
    return max(_LEAST_PAUSE_S, float(told) if told.isdigit() and len(told) < 9 else _USUAL_PAUSE_S)


class LegState(Enum):
    """How far a leg is; see the module."""

    SENT = auto()
    BEGUN = auto()
    ENDED = auto()
    LOST = auto()


class Patience(msgspec.Struct):
    """How long a leg is waited for, in seconds. `silence_s`: without a sign of progress; `total_s`: in any case.
    `movable`: another instance can give the rest, so one that seems dead is not waited for. `beside`: another instance
    whose progress counts too, because this one waits for it."""

    silence_s: float
    total_s: float
    movable: bool = True
    beside: Instance | None = None


class OpenLegs:
    """The legs that are under way. `between_bytes`: how long one is waited for whose answer has begun."""

    def __init__(self, clock: Clock, between_bytes: Patience) -> None:
        self.now, self.between_bytes = clock.monotonic, between_bytes
        self.legs: OrderedSet[Leg] = OrderedSet()


class LegChanges:
    """Wakes the request that waits for its legs. A change between two waits is not missed."""

    __slots__ = ("_error", "_told", "_waiter")

    def __init__(self) -> None:
        self._told = False
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def tell(self) -> None:
        """A leg has changed."""
        self._told = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """A fault of ours, which is the request's error."""
        self._error = error
        self.tell()

    async def wait(self) -> None:
        """Wait for the next change. Raises the error of `fail`."""
        if not self._told:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._told, self._waiter = False, None
        if self._error is not None:
            raise self._error


class Leg:
    """Made by `Legs.send`. `on_change`: called before whoever waits is woken."""

    __slots__ = (
        "_call", "_changes", "_open", "begun_at", "ended_at", "error", "failure", "first_byte_at", "instance",
        "on_change", "patience", "progress_at", "seen_bytes", "span", "state", "verdict", "work",
    )  # fmt: skip

    def __init__(
        self, open_legs: OpenLegs, instance: Instance, call: Call, patience: Patience, work: Work, changes: LegChanges
    ) -> None:
        self.instance, self.patience, self.work = instance, patience, work
        self._open, self._call, self._changes = open_legs, call, changes
        self.on_change: Callable[[], None] | None = None
        self.state = LegState.SENT
        self.verdict: Verdict | None = None
        """The meaning of the answer's status; None before it has begun."""
        self.error: PeerLost | None = None
        self.failure = ""
        """Why it failed, as a label for metrics; empty: it has not, or its end was no failure of the instance."""
        self.span: Span | None = None
        self.begun_at = self.progress_at = open_legs.now()
        self.first_byte_at = self.ended_at = 0.0
        """On the router's monotonic clock; 0 before that."""
        self.seen_bytes = 0
        open_legs.legs.add(self)
        call.watch(self._changed)

    # What comes of it.

    @property
    def status(self) -> int:
        """The answer's HTTP status; 0 before it is here."""
        return self._call.status

    @property
    def headers(self) -> RawHeaders:
        """The answer's headers, names in lower case."""
        return self._call.headers

    @property
    def has_served(self) -> bool:
        """Whether an answer for the client has begun."""
        return self.verdict == "served" and self.state is not LegState.LOST

    @property
    def has_failed(self) -> bool:
        """Whether it was lost, or the answer reports load or a fault."""
        return self.state is LegState.LOST or self.verdict in ("busy", "fault")

    @property
    def was_unreachable(self) -> bool:
        """Whether the instance has seen nothing of it."""
        return isinstance(self.error, Unreachable)

    @property
    def is_event_stream(self) -> bool:
        """Whether the answer is a stream of server-sent events to which an event can be added."""
        return self._call.is_event_stream and content_type(self.headers) == b"text/event-stream"

    @property
    def is_marked(self) -> bool:
        """Whether the answer's events say how far it has come (`core.messages.continuation`)."""
        return self.is_event_stream and self.status == 200 and PROGRESS in self._call.first

    def _changed(self) -> None:
        """For its call: more has come, or it is over."""
        try:
            self._advance()
        except Exception as error:
            # The edge: a fault of ours is this request's, and not its connection's.
            logger.exception("a leg to %s is given up", self.instance)
            self.error = PeerLost(f"the answer of {self.instance} cannot be taken: {error}")
            self._end(LegState.LOST)
            self._changes.fail(error)

    def _advance(self) -> None:
        call = self._call
        match call.state:
            case CallState.ANSWERING if self.state is LegState.SENT:
                self._begin()
            case CallState.COMPLETE:
                if self.state is LegState.SENT:
                    self._begin()
                self._end(LegState.ENDED)
            case CallState.LOST if self.state is LegState.SENT or self.state is LegState.BEGUN:
                assert call.error is not None
                self._lose(call.error)
            case CallState.ANSWERING if call.is_event_stream or self.state is LegState.LOST:
                return  # nobody waits for single pieces of a stream
        if self.on_change is not None:
            self.on_change()
        self._changes.tell()

    def _begin(self) -> None:
        self.state = LegState.BEGUN
        self.first_byte_at = now = self._open.now()
        self.instance.last_sign = self.progress_at = now
        self.work.answered()
        self.patience = self._open.between_bytes
        self.verdict = verdict(self._call.status)
        if self.verdict != "served":
            self.failure = str(self.status)
            if self.verdict == "busy" and (self.work.computes or self.work.decodes):
                self.instance.pauses(now + min(retry_after_s(self.headers), LONGEST_BUSY_S))

    def _lose(self, error: TransferError) -> None:
        instance = self.instance
        match error:
            case Silent():
                self.error = error
                instance.is_silent()
            case Unreachable() | AnswerTimeout():  # only connecting has a deadline of the client's own
                self.error = Unreachable(f"{instance} cannot be reached: {error}")
                instance.is_down(str(error))
            case _:
                self.error = PeerLost(f"the answer of {instance} is incomplete: {error}")
                if not isinstance(error, UnreadableStream):
                    instance.lost_request()
        self.failure = self.failure or failure(self.error)
        self._end(LegState.LOST)

    def _end(self, state: LegState) -> None:
        if self.state is LegState.ENDED or self.state is LegState.LOST:
            return
        self.state, self.ended_at = state, self._open.now()
        self._open.legs.discard(self)
        self.work.end()

    # What is done with the answer.

    def take(self) -> bytes:
        """What is here of the body and has not been taken."""
        return self._call.take()

    async def read(self, max_bytes: int) -> bytes:
        """The whole body. Raises `PeerLost` if it is longer than `max_bytes`, or does not come to its end."""
        try:
            return await self._call.read(max_bytes)
        except TransferError as error:
            raise self.error or PeerLost(f"the answer of {self.instance} cannot be read: {error}") from error

    def collect(self, max_bytes: int) -> None:
        """Keep all of the answer until it is taken; one that is longer is lost."""
        self._call.collect(max_bytes)

    async def relay(self, response: Response, reader: Reader, *, movable: bool = False) -> None:
        """Write what `reader` makes of the body to a response that has begun, and leave the response open. `movable`:
        another instance can give the rest. Raises `PeerLost`."""
        if movable:
            self.patience = msgspec.structs.replace(self.patience, movable=True)
        try:
            await relay(self._call, response, reader)
        except TransferError as error:
            raise self.error or PeerLost(f"the answer of {self.instance} cannot be read: {error}") from error

    # Waiting for it.

    def restart(self, now: float) -> None:
        """The instance beside whose progress counted is done; from here on only its own counts."""
        if self.state is LegState.SENT and self.patience.beside is not None:
            self.progress_at = max(self.progress_at, now)
            self.patience = msgspec.structs.replace(self.patience, beside=None)

    def silent_for(self, now: float) -> float:
        """Seconds without progress."""
        beside = self.patience.beside
        return now - max(self.progress_at, self.instance.last_sign, 0.0 if beside is None else beside.last_sign)

    def look(self, now: float) -> None:
        """Note what has come since the last look; give it up if that took too long."""
        num_bytes = self._call.num_received_so_far
        if num_bytes != self.seen_bytes:
            self.seen_bytes, self.progress_at, self.instance.last_sign = num_bytes, now, now
        elif self._call.paused:
            self.progress_at = now  # it is the client who does not read
        patience, waited_s = self.patience, now - self.progress_at
        stands_still = patience.movable and self.instance.looks.num_late >= LATE_BEFORE_DOWN
        if stands_still or waited_s > patience.total_s or self.silent_for(now) > patience.silence_s:
            self._call.fail(Silent(f"{self.instance} was given up after {waited_s:.1f} s without an answer"))

    def close(self) -> None:
        """Nobody wants it any more, or all of it was used. May be called several times."""
        self.on_change = None  # which may refer to whoever has this leg
        self._call.close()
        self._end(LegState.LOST)
