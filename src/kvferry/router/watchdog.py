"""Which legs have waited too long. Owns the waits that are open; does not know what is waited for.

A long prefill, or a long queue before it, is no reason to give a request up: an instance that works is waited for, one
that stands still is not. Its signs of work are bytes of any answer, and its step counter, which is asked for when it
has shown nothing for a while.
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
    """One leg that waits for bytes; seconds. `silence_s`: how long without a sign of work; `total_s`: in any case.

    `movable`: another instance can give what is yet to come, so that one that seems dead is not waited for.
    `beside`: another instance whose work this one waits for, so that its signs count too. `received`: how many bytes
    have come, and whether it is the client who holds them up.
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
    given_up: bool = False

    def restart(self, now: float) -> None:
        """Whom it waited for beside is done; from here on only its own instance counts."""
        self.since, self.beside = max(self.since, now), None

    def silent_for(self, now: float) -> float:
        """Seconds without a sign of work."""
        beside = self.beside.last_sign if self.beside is not None else 0.0
        return now - max(self.since, self.instance.last_sign, beside)

    def note_bytes(self, now: float) -> None:
        """When bytes have come since the last look, the wait begins anew."""
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
        if self.task is not None and not self.given_up:
            self.given_up = True
            self.task.cancel()

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

    async def within(self, wait: Wait, read: Awaitable[T]) -> T:
        """What `read` gives. Raises `Silent` when it has to be given up, and what `read` raises."""
        task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        wait.since, wait.task, wait.given_up = self._clock.monotonic(), task, False
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
        """Look at all waits again and again; ends by cancellation."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._sweep_s)
                self._end_what_is_over()
                for instance in self._quiet() - self._asking:
                    self._asking.add(instance)
                    group.create_task(self._look_for_steps(instance, ask))

    def _end_what_is_over(self) -> None:
        now = self._clock.monotonic()
        for wait in self._waits:
            wait.note_bytes(now)
            if wait.is_over(now):
                wait.give_up()

    def _quiet(self) -> set[Instance]:
        """Whom to ask for its steps: those whose signs of work are getting old."""
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
