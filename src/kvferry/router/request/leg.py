"""One leg: one request to one instance, from when it is sent until it has ended or is lost.

    sent    no byte of the answer's body is here; another instance may answer instead
    begun   the answer has begun
    ended   all of it is here, or was passed on
    lost    no (more) answer will come; `error` says why

A leg owns what it takes of its instance, from `Legs.send` until it is over: its place in the counts of requests and of
work, and the connection. `close` gives back whatever is left, and cuts an answer that nobody wants any more, so that
the instance stops. What it learns of its instance (down, silent, busy) it tells the instance. How long it is waited
for is told in `patience`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import InvalidRequest, PeerLost, TransferError
from kvferry.core.ordered_set import OrderedSet
from kvferry.http.client.call import NO_HEAD, Call
from kvferry.http.errors import AnswerTimeout, Overloaded, Unreachable
from kvferry.http.headers import RawHeaders, find_header
from kvferry.http.relay import Reader, relay
from kvferry.http.server.response import Response
from kvferry.observe.tracing import Span
from kvferry.router.config import RouterConfig
from kvferry.router.errors import LegTimedOut, UnreadableStream, failure
from kvferry.router.headers import PROGRESS
from kvferry.router.instances.connections import Connections
from kvferry.router.instances.instance import Instance
from kvferry.router.instances.load import Work
from kvferry.router.request.progress_timeout import ProgressTimeout

logger = logging.getLogger(__name__)

_SLOWEST_PREFILL = 1000
"""Bytes of a request's body for which an instance has one second more to begin its answer: not every engine computes a
prompt in steps that can be counted."""
_MAX_SWEEP_S = 1.0
_STEPS = re.compile(rb"^(?:kvferry:engine_steps_total|vllm:iteration_tokens_total_count)(?:\{[^\n]*\})? (\S+)$", re.M)
"""How many steps an engine has made, in the metrics of kvferry and of vLLM."""

MAX_BUSY_S = 60.0
"""Longest that an instance is passed over, whatever its `Retry-After` says."""
_MIN_PAUSE_S, _USUAL_PAUSE_S = 0.1, 1.0
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
    return max(_MIN_PAUSE_S, float(told) if told.isdigit() and len(told) < 9 else _USUAL_PAUSE_S)


LegState = Literal["sent", "begun", "ended", "lost"]
"""How far a leg is; see the module."""


class LegChanges(msgspec.Struct, eq=False):
    """Wakes the request that waits for its legs. A change between two waits is not missed."""

    _told: bool = False
    _waiter: asyncio.Future[None] | None = None
    _error: Exception | None = None

    def tell(self) -> None:
        """Note that a leg has changed."""
        self._told = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """Note a fault of ours, which is the request's error."""
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
    """Made by `Legs.send`."""

    __slots__ = (
        "_call", "_changes", "_legs", "begun_at", "ended_at", "error", "first_byte_at", "head", "instance", "on_change",
        "patience", "span", "state", "verdict", "work",
    )  # fmt: skip

    def __init__(
        self, legs: Legs, call: Call, instance: Instance, work: Work, changes: LegChanges, patience: ProgressTimeout,
        now: float,
    ) -> None:  # fmt: skip
        self._legs, self._call, self._changes, self.patience = legs, call, changes, patience
        self.instance, self.work = instance, work
        self.on_change: Callable[[], bool] | None = None
        """Called before the task that waits for the request's legs is woken, which is not if it returns False."""
        self.state: LegState = "sent"
        self.head = NO_HEAD
        """Status and headers of the answer, once it has begun."""
        self.verdict: Verdict | None = None
        """The meaning of the status; None before the answer has begun."""
        self.error: PeerLost | None = None
        self.span: Span | None = None
        self.begun_at = now
        self.first_byte_at = self.ended_at = 0.0
        """When the first byte came and when the leg ended, on the router's monotonic clock; 0 before that."""
        call.watch(self._changed)

    # What comes of it.

    @property
    def failure(self) -> str:
        """Why it failed, as a label for metrics; empty: it has not, or its end was no failure of the instance."""
        if self.verdict in ("busy", "fault"):
            return str(self.head.status)
        return "" if self.error is None else failure(self.error)

    @property
    def has_served(self) -> bool:
        """Whether an answer for the client has begun."""
        return self.verdict == "served" and self.state != "lost"

    @property
    def has_failed(self) -> bool:
        """Whether it was lost, or the answer reports load or a fault."""
        return self.state == "lost" or self.verdict in ("busy", "fault")

    @property
    def was_unreachable(self) -> bool:
        """Whether the instance has seen nothing of it."""
        return isinstance(self.error, Unreachable)

    @property
    def is_marked(self) -> bool:
        """Whether the answer's events say how far it has come (`core.messages.continuation`)."""
        return self.head.is_event_stream and self.head.status == 200 and PROGRESS in self.head.first

    def _changed(self) -> None:
        """Called by its call when more has come, or it is over."""
        call, state = self._call, self.state
        try:
            match call.state:
                case "complete":
                    if state == "sent":
                        self._begin(call)
                    self._end("ended")
                case "answering" if state == "sent":
                    self._begin(call)
                case "lost" if state == "sent" or state == "begun":
                    assert call.error is not None
                    self._lose(call.error)
                case "answering" if call.head.is_event_stream or state == "lost":
                    return  # nobody waits for single pieces of a stream
            if self.on_change is None or self.on_change():
                self._changes.tell()
        except Exception as error:
            # The edge: a fault of ours is this request's, and not its connection's.
            logger.exception("a leg to %s is given up", self.instance)
            self.error = PeerLost(f"the answer of {self.instance} cannot be taken: {error}")
            self._end("lost")
            self._changes.fail(error)

    def _begin(self, call: Call) -> None:
        self.state, self.head, status = "begun", call.head, call.head.status
        self.first_byte_at = now = self._legs.now()
        self.patience.answer_began(self._legs.between_bytes_s, now)
        self.work.answered()
        self.verdict = verdict(status)
        if self.verdict == "busy" and (self.work.computes or self.work.decodes):
            self.instance.pauses(now + min(retry_after_s(self.head.headers), MAX_BUSY_S))

    def _lose(self, error: TransferError) -> None:
        instance = self.instance
        match error:
            case LegTimedOut():
                self.error = error
                instance.is_silent()
            case Overloaded():
                self.error = Unreachable(f"{instance} takes no connection: {error}")
                instance.pauses(self._legs.now() + _USUAL_PAUSE_S)
            case Unreachable() | AnswerTimeout():  # only connecting has a deadline of the client's own
                self.error = Unreachable(f"{instance} cannot be reached: {error}")
                instance.is_down(str(error))
            case _:
                self.error = PeerLost(f"the answer of {instance} is incomplete: {error}")
                if not isinstance(error, UnreadableStream):
                    instance.invalidate()
        self._end("lost")

    def _end(self, state: LegState) -> None:
        if self.state == "ended" or self.state == "lost":
            return
        self.state, self.ended_at = state, self._legs.now()
        self._legs.open.pop(self, None)
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
        self.patience.movable = movable
        try:
            await relay(self._call, response, reader)
        except TransferError as error:
            raise self.error or PeerLost(f"the answer of {self.instance} cannot be read: {error}") from error

    def look(self, now: float) -> None:
        """Note what has come since the last look; give it up if that took too long."""
        patience = self.patience
        patience.look(self._call, now)
        if patience.is_over(self._legs.total_s, now):
            waited_s = patience.waited_for(now)
            self._call.fail(LegTimedOut(f"{self.instance} was given up after {waited_s:.1f} s without an answer"))

    def close(self) -> None:
        """End it: nobody wants it any more, or all of it was used. May be called several times."""
        self.on_change = None  # which may refer to whoever has this leg
        if self.state != "ended":
            self._call.close()
            self._end("lost")


class Legs:
    """The legs of all requests."""

    def __init__(self, config: RouterConfig, clock: Clock, connections: Connections) -> None:
        self._connections, self.now = connections, clock.monotonic
        self._first_byte_s, self.between_bytes_s = config.first_byte_timeout_s, config.between_bytes_timeout_s
        self.total_s = config.answer_timeout_s
        self._silence_s = min(self._first_byte_s, self.between_bytes_s)
        self.open: dict[Leg, None] = {}
        """The legs that are under way, in the order in which they were sent."""
        self._steps: dict[Instance, bytes] = {}
        self._asking: set[Instance] = set()

    @property
    def num_open(self) -> int:
        """How many legs wait for bytes."""
        return len(self.open)

    def send(
        self,
        instance: Instance,
        method: str,
        target: str,
        headers: bytes,
        body: bytes | None,
        changes: LegChanges,
        *,
        uncached: int = 0,
        computes: bool = False,
        decodes: bool = False,
        beside: Leg | None = None,
    ) -> Leg:
        """Send a leg, with these lines of headers; `changes` is told whenever its state changes. `uncached`,
        `computes`, `decodes`: as in `Work`; `beside`: as in `ProgressTimeout`. Raises `InvalidRequest` for what
        cannot be sent."""
        try:
            call = self._connections.http.start(
                instance.address.origin, method, instance.address.base_path + target, headers, body, repeatable=True
            )  # repeatable if nothing has come of it
        except ValueError as error:
            raise InvalidRequest(f"the request cannot be sent on: {error}") from error
        now = self.now()
        work = Work(instance.load, uncached, now, computes=computes, decodes=decodes)
        silence_s = self._first_byte_s + (0 if body is None else len(body) / _SLOWEST_PREFILL)
        leg = Leg(self, call, instance, work, changes, ProgressTimeout(instance, silence_s, now, beside), now)
        self.open[leg] = None
        return leg

    # Legs that wait too long.

    async def watch(self) -> None:
        """Give up legs that have waited too long; runs until it is cancelled."""
        sweep_s = min(_MAX_SWEEP_S, self._silence_s / 4)
        async with asyncio.TaskGroup() as group:
            before = self.now()
            while True:
                await asyncio.sleep(sweep_s)
                late_s = self.now() - before - sweep_s
                self.look(missed_s=late_s if late_s > sweep_s else 0.0)
                before = self.now()
                for instance in self._quiet() - self._asking:
                    self._asking.add(instance)
                    group.create_task(self._look_for_steps(instance))

    def look(self, missed_s: float = 0.0) -> None:
        """Give up what has waited too long. `missed_s`: how long this process itself stood still, and could not see any
        progress: what came meanwhile has not been read yet."""
        now = self.now()
        if missed_s:
            for leg in self.open:
                leg.patience.stood_still(missed_s, now)
            for instance in self._waited_for():
                instance.last_sign = min(now, instance.last_sign + missed_s)
        for leg in tuple(self.open):
            leg.look(now)

    def _waited_for(self) -> OrderedSet[Instance]:
        return _instances_of(self.open)

    def _quiet(self) -> OrderedSet[Instance]:
        """The instances whose step counter to read: those that have shown no progress for a while."""
        now, waited_for = self.now(), self._waited_for()
        quiet = [leg for leg in self.open if leg.patience.silent_for(now) > self._silence_s / 4]
        self._steps = {one: steps for one, steps in self._steps.items() if one in waited_for}
        return _instances_of(quiet)

    async def _look_for_steps(self, instance: Instance) -> None:
        try:
            status, text = await self._connections.metrics(instance, self._silence_s / 2)
        except TransferError:
            return
        except Exception:
            # The edge of this room: the router goes on, whatever an instance calls its metrics.
            logger.exception("%s: its metrics could not be read", instance)
            return
        finally:
            self._asking.discard(instance)
        steps = b" ".join(_STEPS.findall(text)) if status == 200 else b""
        if self._steps.get(instance, steps) != steps:
            instance.last_sign = self.now()
        self._steps[instance] = steps


def _instances_of(legs: Iterable[Leg]) -> OrderedSet[Instance]:
    """The instances that the legs wait for."""
    return OrderedSet(one for leg in legs for one in leg.patience.waits_for)
