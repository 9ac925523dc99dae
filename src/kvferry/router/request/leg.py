"""One leg: a request to one instance, from when it is sent until it has ended or is lost.

    sent    no byte of the answer's body has come; another instance may answer instead
    begun   the answer has begun
    ended   all of the answer has come, or was forwarded
    lost    no (more) answer will come; `error` gives the reason

From `Legs.send` until it is over, a leg owns its connection and its share in the instance's load. `close` releases
both, and cuts an unfinished answer so that the instance stops. A leg reports the state of its instance (down, silent,
busy) to the `Instance`.

A `ProgressTimeout` limits the wait for a leg, by the progress of its instance. A long prefill, or a long queue before
it, is no reason to give up a leg; an instance that hangs is. Progress is any byte of an answer, or a change of the
instance's step counter, which is read if no bytes have arrived for a while (`Legs.watch`).
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
from kvferry.core.runtime.tasks import WakeUp
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
from kvferry.router.instances.instance import MAX_LATE_CHECKS, Instance
from kvferry.router.instances.load import Work

logger = logging.getLogger(__name__)

_STEPS = re.compile(rb"^(?:kvferry:engine_steps_total|vllm:iteration_tokens_total_count)(?:\{[^\n]*\})? (\S+)$", re.M)
"""Number of steps of an engine, in the metrics of kvferry and of vLLM."""

MAX_RETRY_AFTER_S = 60.0
"""Maximum seconds for which a busy instance is avoided, even if its `Retry-After` is longer."""
_MIN_RETRY_AFTER_S, _DEFAULT_RETRY_AFTER_S = 0.1, 1.0
"""Seconds to wait after `Retry-After: 0`, so that an instance does not get requests without a pause; and seconds after
a missing or invalid `Retry-After`."""

Verdict = Literal["served", "busy", "fault"]
"""The meaning of an answer's status. `served`: the request succeeded or is the client's error, and the answer is the
client's; `busy`: the instance is overloaded, and another one may not be; `fault`: the instance failed."""


def verdict(status: int) -> Verdict:
    """The meaning of an answer's status. A redirect is a fault, because it leads around the router."""
    if 200 <= status < 300:
        return "served"
    if status in (429, 503):
        return "busy"
    return "fault" if status >= 500 or 300 <= status < 400 else "served"


def retry_after_s(headers: RawHeaders) -> float:
    """Seconds to wait after a 429 or 503, by `Retry-After`; a date, or a value that cannot be read, counts as
    missing."""
    value = find_header(headers, b"retry-after") or b""
    return max(_MIN_RETRY_AFTER_S, float(value) if value.isdigit() and len(value) < 9 else _DEFAULT_RETRY_AFTER_S)


class ProgressTimeout:
    """Ends the wait for a leg after `silence_s` without progress, or earlier if its instance seems dead and the leg is
    `movable`: another instance can give the rest. Progress of the `partner` leg, for which the instance waits, counts
    too until that leg has ended."""

    __slots__ = ("_instance", "_partner", "_progress_at", "_seen_bytes", "_silence_s", "movable")

    def __init__(self, instance: Instance, silence_s: float, now: float, partner: Leg | None) -> None:
        self._instance, self._silence_s, self._progress_at, self._partner = instance, silence_s, now, partner
        self._seen_bytes, self.movable = 0, True

    def answer_began(self, between_bytes_s: float, now: float) -> None:
        """Record that the answer has begun: from now on it may pause for `between_bytes_s`."""
        self._progress_at = self._instance.last_progress = now
        self._silence_s, self.movable, self._partner = between_bytes_s, False, None

    @property
    def watched_instances(self) -> tuple[Instance, ...]:
        """The instances whose progress counts."""
        partner = self._partner
        if partner is None or partner.state == "ended":
            return (self._instance,)
        return (self._instance, partner.instance)

    def silent_for(self, now: float) -> float:
        """Seconds without progress."""
        partner, partner_progress_at = self._partner, 0.0
        if partner is not None:
            partner_progress_at = partner.ended_at if partner.state == "ended" else partner.instance.last_progress
        return now - max(self._progress_at, self._instance.last_progress, partner_progress_at)

    def waited_for(self, now: float) -> float:
        """Seconds without a byte of the answer."""
        return now - self._progress_at

    def add_pause(self, missed_s: float, now: float) -> None:
        """Record that this process could not see any progress for `missed_s`."""
        self._progress_at = min(now, self._progress_at + missed_s)

    def observe(self, call: Call, now: float) -> None:
        """Record the bytes that have come since the last call."""
        num_bytes = call.num_received_so_far
        if num_bytes != self._seen_bytes:
            self._seen_bytes, self._progress_at, self._instance.last_progress = num_bytes, now, now
        elif call.paused:
            self._progress_at = now  # the client does not read

    def is_over(self, total_s: float, now: float) -> bool:
        """True if the leg should be given up. `total_s`: maximum seconds without a byte, even with other progress."""
        is_stalled = self.movable and self._instance.checks.num_late >= MAX_LATE_CHECKS
        waits_too_long = self.waited_for(now) > max(total_s, self._silence_s)
        return is_stalled or waits_too_long or self.silent_for(now) > self._silence_s


LegState = Literal["sent", "begun", "ended", "lost"]
"""State of a leg, as the module's docstring defines it."""


class LegChanges(msgspec.Struct, eq=False):
    """Wakes the request that waits for its legs. A change between two waits is not missed."""

    _is_set: bool = False
    _waiter: WakeUp = msgspec.field(default_factory=WakeUp)
    _error: Exception | None = None

    def notify(self) -> None:
        """Wake the task that waits, because a leg has changed."""
        self._is_set = True
        self._waiter.wake()

    def fail(self, error: Exception) -> None:
        """Record a fault of the router, which becomes the request's error, and wake the waiter."""
        self._error = error
        self.notify()

    async def wait(self) -> None:
        """Wait for the next change. Raises the error of `fail`."""
        if not self._is_set:
            await self._waiter.wait()
        self._is_set = False
        if self._error is not None:
            raise self._error


class Leg:
    """Made by `Legs.send`."""

    __slots__ = (
        "_call", "_changes", "_legs", "begun_at", "ended_at", "error", "first_byte_at", "head", "instance", "on_change",
        "progress_timeout", "span", "state", "verdict", "work",
    )  # fmt: skip

    def __init__(
        self, legs: Legs, call: Call, instance: Instance, work: Work, changes: LegChanges,
        progress_timeout: ProgressTimeout, now: float,
    ) -> None:  # fmt: skip
        self._legs, self._call, self._changes, self.progress_timeout = legs, call, changes, progress_timeout
        self.instance, self.work = instance, work
        self.on_change: Callable[[], bool] | None = None
        """Called before the task that waits for the request's legs is woken; it is not woken if this returns False."""
        self.state: LegState = "sent"
        self.head = NO_HEAD
        """Status and headers of the answer, once it has begun."""
        self.verdict: Verdict | None = None
        """The meaning of the status; None before the answer has begun."""
        self.error: PeerLost | None = None
        self.span: Span | None = None
        self.begun_at = now
        self.first_byte_at = self.ended_at = 0.0
        """Times of the first byte and of the leg's end, on the router's monotonic clock; 0 before."""
        call.watch(self._on_call_change)

    # Outcome.

    @property
    def failure(self) -> str:
        """Reason of the failure, as a label for metrics; empty if the instance has not failed."""
        if self.verdict in ("busy", "fault"):
            return str(self.head.status)
        return "" if self.error is None else failure(self.error)

    @property
    def has_served(self) -> bool:
        """True if an answer for the client has begun."""
        return self.verdict == "served" and self.state != "lost"

    @property
    def has_failed(self) -> bool:
        """True if it was lost, or the answer reports load or a fault."""
        return self.state == "lost" or self.verdict in ("busy", "fault")

    @property
    def was_unreachable(self) -> bool:
        """True if the instance has received nothing of it."""
        return isinstance(self.error, Unreachable)

    @property
    def is_marked(self) -> bool:
        """True if the answer's events have progress marks (`core.messages.continuation`)."""
        return self.head.is_event_stream and self.head.status == 200 and PROGRESS in self.head.first

    def _on_call_change(self) -> None:
        """Called by the call when more of the answer has come, or the call is over."""
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
                    return  # the task of the request does not wait for single chunks of a stream
            if self.on_change is None or self.on_change():
                self._changes.notify()
        except Exception as error:
            # A fault of the router ends this request, but not its connection.
            logger.exception("a leg to %s is given up", self.instance)
            self.error = PeerLost(f"the answer of {self.instance} cannot be taken: {error}")
            self._end("lost")
            self._changes.fail(error)

    def _begin(self, call: Call) -> None:
        self.state, self.head, status = "begun", call.head, call.head.status
        self.first_byte_at = now = self._legs.now()
        self.progress_timeout.answer_began(self._legs.between_bytes_s, now)
        self.work.on_answered()
        self.verdict = verdict(status)
        if self.verdict == "busy" and (self.work.computes or self.work.decodes):
            self.instance.pause_until(now + min(retry_after_s(self.head.headers), MAX_RETRY_AFTER_S))

    def _lose(self, error: TransferError) -> None:
        instance = self.instance
        match error:
            case LegTimedOut():
                self.error = error
                instance.mark_unresponsive()
            case Overloaded():
                self.error = Unreachable(f"{instance} takes no connection: {error}")
                instance.pause_until(self._legs.now() + _DEFAULT_RETRY_AFTER_S)
            case Unreachable() | AnswerTimeout():  # only the connection has a deadline in the HTTP client
                self.error = Unreachable(f"{instance} cannot be reached: {error}")
                instance.mark_down(str(error))
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

    # The answer's body.

    def take(self) -> bytes:
        """The bytes of the body that have come since the last call."""
        return self._call.take()

    async def read(self, max_bytes: int) -> bytes:
        """The whole body. Raises `PeerLost` if it is longer than `max_bytes`, or incomplete."""
        try:
            return await self._call.read(max_bytes)
        except TransferError as error:
            raise self.error or PeerLost(f"the answer of {self.instance} cannot be read: {error}") from error

    def collect(self, max_bytes: int) -> None:
        """Buffer the whole answer until it is taken. If the answer is longer than that, the leg is lost."""
        self._call.collect(max_bytes)

    async def relay(self, response: Response, reader: Reader, *, movable: bool = False) -> None:
        """Write the output of `reader` for the body to a response that has begun, and leave the response open.
        `movable`: another instance can give the rest. Raises `PeerLost`."""
        self.progress_timeout.movable = movable
        try:
            await relay(self._call, response, reader)
        except TransferError as error:
            raise self.error or PeerLost(f"the answer of {self.instance} cannot be read: {error}") from error

    def check_timeout(self, now: float) -> None:
        """Record the progress since the last check; give the leg up if it took too long."""
        timeout = self.progress_timeout
        timeout.observe(self._call, now)
        if timeout.is_over(self._legs.total_s, now):
            waited_s = timeout.waited_for(now)
            self._call.fail(LegTimedOut(f"{self.instance} was given up after {waited_s:.1f} s without an answer"))

    def close(self) -> None:
        """End the leg, and cut off an unfinished answer. May be called several times."""
        self.on_change = None  # breaks a reference cycle with the owner of this leg
        if self.state != "ended":
            self._call.close()
            self._end("lost")


class Legs:
    """The legs of all requests."""

    max_sweep_s = 1.0
    min_prefill_bytes_per_s = 1000
    """Bytes of a request's body per additional second until its answer must begin: not every engine computes a
    prompt in steps that can be counted."""

    def __init__(self, config: RouterConfig, clock: Clock, connections: Connections) -> None:
        self._connections, self.now = connections, clock.monotonic
        self._first_byte_s, self.between_bytes_s = config.first_byte_timeout_s, config.between_bytes_timeout_s
        self.total_s = config.answer_timeout_s
        self._silence_s = min(self._first_byte_s, self.between_bytes_s)
        self.open: dict[Leg, None] = {}
        """The open legs, in the order in which they were sent."""
        self._steps: dict[Instance, bytes] = {}
        self._probing: set[Instance] = set()

    @property
    def num_open(self) -> int:
        """Number of open legs."""
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
        partner: Leg | None = None,
    ) -> Leg:
        """Send a leg, with these lines of headers; `changes` is notified whenever its state changes. `uncached`,
        `computes`, `decodes`: as in `Work`; `partner`: as in `ProgressTimeout`. Raises `InvalidRequest` if it cannot
        be sent."""
        try:
            call = self._connections.http.start(
                instance.address.origin, method, instance.address.base_path + target, headers, body, repeatable=True
            )  # repeatable as long as nothing of the answer has come
        except ValueError as error:
            raise InvalidRequest(f"the request cannot be sent on: {error}") from error
        now = self.now()
        work = Work(instance.load, uncached, now, computes=computes, decodes=decodes)
        silence_s = self._first_byte_s + (0 if body is None else len(body) / self.min_prefill_bytes_per_s)
        leg = Leg(self, call, instance, work, changes, ProgressTimeout(instance, silence_s, now, partner), now)
        self.open[leg] = None
        return leg

    # Timeouts.

    async def watch(self) -> None:
        """Give up legs that have waited too long. Runs until cancelled."""
        sweep_s = min(self.max_sweep_s, self._silence_s / 4)
        async with asyncio.TaskGroup() as group:
            checked_at = self.now()
            while True:
                await asyncio.sleep(sweep_s)
                lag_s = self.now() - checked_at - sweep_s
                self.check_timeouts(missed_s=lag_s if lag_s > sweep_s else 0.0)
                checked_at = self.now()
                for instance in self._silent_instances() - self._probing:
                    self._probing.add(instance)
                    group.create_task(self._probe_steps(instance))

    def check_timeouts(self, missed_s: float = 0.0) -> None:
        """Give up legs that have waited too long. `missed_s`: seconds that this process itself was stopped and could
        not see any progress; bytes that arrived in this time have not been read yet."""
        now = self.now()
        if missed_s:
            for leg in self.open:
                leg.progress_timeout.add_pause(missed_s, now)
            for instance in self._awaited_instances():
                instance.last_progress = min(now, instance.last_progress + missed_s)
        for leg in tuple(self.open):
            leg.check_timeout(now)

    def _awaited_instances(self) -> OrderedSet[Instance]:
        return _instances_of(self.open)

    def _silent_instances(self) -> OrderedSet[Instance]:
        """The instances without progress for a while, whose step counter is to be read."""
        now, waited_for = self.now(), self._awaited_instances()
        quiet = [leg for leg in self.open if leg.progress_timeout.silent_for(now) > self._silence_s / 4]
        self._steps = {instance: steps for instance, steps in self._steps.items() if instance in waited_for}
        return _instances_of(quiet)

    async def _probe_steps(self, instance: Instance) -> None:
        try:
            status, text = await self._connections.metrics(instance, self._silence_s / 2)
        except TransferError:
            return
        except Exception:
            # Metrics come from other processes: the router continues, whatever they contain.
            logger.exception("%s: its metrics could not be read", instance)
            return
        finally:
            self._probing.discard(instance)
        steps = b" ".join(_STEPS.findall(text)) if status == 200 else b""
        if self._steps.get(instance, steps) != steps:
            instance.last_progress = self.now()
        self._steps[instance] = steps


def _instances_of(legs: Iterable[Leg]) -> OrderedSet[Instance]:
    """The instances that the legs wait for."""
    return OrderedSet(instance for leg in legs for instance in leg.progress_timeout.watched_instances)
