"""Which legs have waited too long. Owns the open waits; does not know what is waited for.

A long prefill, or a long queue before it, is no reason to give a request up: an instance that makes progress is waited
for, one that hangs is not. Progress is shown by bytes of any answer, and by the instance's step counter, which is read
when there have been no bytes for a while.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import TransferError
from kvferry.router.errors import Silent
from kvferry.router.instance import Instance

logger = logging.getLogger(__name__)

LATE_BEFORE_DEAD = 3
"""How often in a row an instance may be too late with its health: one that computes hard is busy, not dead."""

_LONGEST_SWEEP_S = 1.0
_STEPS = re.compile(rb"^(?:kvferry:engine_steps_total|vllm:iteration_tokens_total_count)(?:\{[^\n]*\})? (\S+)$", re.M)
"""How many steps an engine has made, in the metrics of kvferry and of vLLM."""

AskForMetrics = Callable[[Instance, float], Awaitable[bytes]]
"""Gets an instance's metrics within so many seconds; raises `TransferError`."""

T = TypeVar("T")


class Wait(msgspec.Struct, eq=False):
    """One leg that waits for bytes; seconds. `silence_s`: how long without progress; `total_s`: in any case.

    `movable`: another instance can give the rest, so an instance that seems dead is not waited for. `beside`: another
    instance whose work this one waits for, so that its progress counts too. `received`: how many bytes have come, and
    whether the client is what holds them up. Ended by cancelling `task`, or by calling `wake`.
    """

    instance: Instance
    silence_s: float
    total_s: float
    movable: bool = True
    beside: Instance | None = None
    received: Callable[[], tuple[int, bool]] | None = None
    num_received: int = 0
    since: float = 0.0
    task: asyncio.Task[Any] | None = None
    wake: Callable[[], None] | None = None
    given_up: bool = False

    def restart(self, now: float) -> None:
        """The instance that it waited for beside its own is done; from here on only its own counts."""
        self.since, self.beside = max(self.since, now), None

    def silent_for(self, now: float) -> float:
        """Seconds without progress."""
        beside = self.beside.last_sign if self.beside is not None else 0.0
        return now - max(self.since, self.instance.last_sign, beside)

    def note_bytes(self, now: float) -> None:
        """If bytes have come since the last check, the wait begins again."""
        if self.received is None:
            return
        num_received, held_up = self.received()
        if num_received != self.num_received:
            self.num_received, self.instance.last_sign = num_received, now
            self.since = now
        elif held_up:
            self.since = now

    def give_up(self) -> None:
        """End it, with `Silent`."""
        if self.given_up:
            return
        if self.task is not None:
            self.given_up = True
            self.task.cancel()
        elif self.wake is not None:
            self.given_up = True
            self.wake()

    def is_over(self, now: float) -> bool:
        """Whether it has lasted too long."""
        stands_still = self.movable and self.instance.num_late >= LATE_BEFORE_DEAD
        return stands_still or self.silent_for(now) > self.silence_s or now - self.since > self.total_s


class Watchdog:
    """Ends waits that have lasted too long."""

    def __init__(self, clock: Clock, silence_s: float) -> None:
        self._clock, self._silence_s = clock, silence_s
        self._sweep_s = min(_LONGEST_SWEEP_S, silence_s / 4)
        self._waits: set[Wait] = set()
        self._steps: dict[Instance, bytes] = {}
        self._asking: set[Instance] = set()

    @property
    def num_waits(self) -> int:
        """How many waits are open."""
        return len(self._waits)

    def begin(self, wait: Wait) -> None:
        """Watch a wait that ends by its `wake`, until `end`."""
        wait.since = self._clock.monotonic()
        self._waits.add(wait)

    def end(self, wait: Wait, *, answered: bool = False) -> None:
        """What was waited for is here (`answered`), or no longer wanted."""
        self._waits.discard(wait)
        wait.wake = None
        if answered:
            wait.instance.last_sign = self._clock.monotonic()

    async def within(self, wait: Wait, read: Awaitable[T], since: float | None = None) -> T:
        """The result of `read`, waited for since `since`, or now. Raises `Silent` if the wait is given up, and what
        `read` raises."""
        task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        wait.since = self._clock.monotonic() if since is None else since
        wait.task, wait.given_up = task, False
        self._waits.add(wait)
        try:
            result = await read
        except asyncio.CancelledError as error:
            # As `asyncio.timeout` does it, which takes longer to set up than the rest of this, five times a request.
            if not wait.given_up or task.uncancel() > cancelling:
                raise
            waited = self._clock.monotonic() - wait.since
            raise Silent(f"{wait.instance} was given up after {waited:.1f} s without an answer") from error
        except BaseException:
            if wait.given_up:
                task.uncancel()
            raise
        finally:
            self._waits.discard(wait)
            wait.task = None
        if wait.given_up:
            task.uncancel()
        wait.instance.last_sign = self._clock.monotonic()
        return result

    async def run(self, ask: AskForMetrics) -> None:
        """Check all waits periodically; runs until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            before = self._clock.monotonic()
            while True:
                await asyncio.sleep(self._sweep_s)
                late_s = self._clock.monotonic() - before - self._sweep_s
                self.look(missed_s=late_s if late_s > self._sweep_s else 0.0)
                before = self._clock.monotonic()
                for instance in self._quiet() - self._asking:
                    self._asking.add(instance)
                    group.create_task(self._look_for_steps(instance, ask))

    def look(self, missed_s: float = 0.0) -> None:
        """End the waits that are over. `missed_s`: how long this process itself stood still, and could not see any
        progress: what came meanwhile has not been read yet."""
        now = self._clock.monotonic()
        if missed_s:
            self._postpone(now, missed_s)
        for wait in tuple(self._waits):
            wait.note_bytes(now)
            if wait.is_over(now):
                wait.give_up()

    def _postpone(self, now: float, missed_s: float) -> None:
        for wait in self._waits:
            wait.since = min(now, wait.since + missed_s)
        for instance in {one for wait in self._waits for one in (wait.instance, wait.beside) if one is not None}:
            instance.last_sign = min(now, instance.last_sign + missed_s)

    def _quiet(self) -> set[Instance]:
        """The instances whose step counter to read: those that have shown no progress for a while."""
        now, waits = self._clock.monotonic(), list(self._waits)
        asked = {one for wait in waits for one in (wait.instance, wait.beside) if one is not None}
        quiet = {wait.instance for wait in waits if wait.silent_for(now) > self._silence_s / 4}
        quiet |= {wait.beside for wait in waits if wait.beside and wait.silent_for(now) > self._silence_s / 4}
        self._steps = {one: steps for one, steps in self._steps.items() if one in asked}
        return quiet

    async def _look_for_steps(self, instance: Instance, ask: AskForMetrics) -> None:
        try:
            found = _STEPS.findall(await ask(instance, self._silence_s / 2))
        except TransferError:
            return
        except Exception:
            # The edge of this room: the router goes on, whatever an instance calls its metrics.
            logger.exception("%s: its metrics could not be read", instance)
            return
        finally:
            self._asking.discard(instance)
        steps = b" ".join(found)
        if self._steps.get(instance, steps) != steps:
            instance.last_sign = self._clock.monotonic()
        self._steps[instance] = steps
