"""Sends legs, and gives up those that have waited too long.

A long prefill, or a long queue before it, is no reason to give a request up: an instance that makes progress is waited
for, one that hangs is not. Progress is shown by bytes of any answer, and by the instance's step counter, which is read
when there have been no bytes for a while.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable

from kvferry.core.clock import Clock
from kvferry.core.errors import InvalidRequest, TransferError
from kvferry.core.ordered_set import OrderedSet
from kvferry.router.choice.work import Work
from kvferry.router.config import RouterConfig
from kvferry.router.instances.connections import Connections
from kvferry.router.instances.instance import Instance
from kvferry.router.request.leg import Leg, LegChanges, OpenLegs, Patience

logger = logging.getLogger(__name__)

_SLOWEST_PREFILL = 1000
"""Bytes of a request's body for which an instance has one second more to begin its answer: not every engine computes a
prompt in steps that can be counted."""

_LONGEST_SWEEP_S = 1.0
_STEPS = re.compile(rb"^(?:kvferry:engine_steps_total|vllm:iteration_tokens_total_count)(?:\{[^\n]*\})? (\S+)$", re.M)
"""How many steps an engine has made, in the metrics of kvferry and of vLLM."""


class Legs:
    """The legs of all requests."""

    def __init__(self, config: RouterConfig, clock: Clock, connections: Connections) -> None:
        self._connections = connections
        self._first_byte_s, self._total_s = config.first_byte_timeout_s, config.answer_timeout_s
        silence_s = config.between_bytes_timeout_s
        self._silence_s = min(config.first_byte_timeout_s, silence_s)
        self._open = OpenLegs(clock, Patience(silence_s, max(self._total_s, silence_s), movable=False))
        self._steps: dict[Instance, bytes] = {}
        self._asking: set[Instance] = set()

    @property
    def num_open(self) -> int:
        """How many legs wait for bytes."""
        return len(self._open.legs)

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
        beside: Instance | None = None,
    ) -> Leg:
        """Send a leg, with these lines of headers; `changes` is told whenever its state changes. `uncached`,
        `computes`, `decodes`: as in `Work`; `beside`: as in `Patience`. Raises `InvalidRequest` for what cannot be
        sent."""
        silence_s = self._first_byte_s + (0 if body is None else len(body) / _SLOWEST_PREFILL)
        patience = Patience(silence_s, max(self._total_s, silence_s), beside=beside)
        try:
            call = self._connections.start(instance, method, target, headers, body)
        except ValueError as error:
            raise InvalidRequest(f"the request cannot be sent on: {error}") from error
        work = Work(instance.load, uncached, self._open.now(), computes=computes, decodes=decodes)
        return Leg(self._open, instance, call, patience, work, changes)

    # Legs that wait too long.

    async def watch(self) -> None:
        """Give up legs that have waited too long; runs until it is cancelled."""
        sweep_s = min(_LONGEST_SWEEP_S, self._silence_s / 4)
        async with asyncio.TaskGroup() as group:
            before = self._open.now()
            while True:
                await asyncio.sleep(sweep_s)
                late_s = self._open.now() - before - sweep_s
                self.look(missed_s=late_s if late_s > sweep_s else 0.0)
                before = self._open.now()
                for instance in self._quiet() - self._asking:
                    self._asking.add(instance)
                    group.create_task(self._look_for_steps(instance))

    def look(self, missed_s: float = 0.0) -> None:
        """Give up what has waited too long. `missed_s`: how long this process itself stood still, and could not see any
        progress: what came meanwhile has not been read yet."""
        now = self._open.now()
        if missed_s:
            for leg in self._open.legs:
                leg.progress_at = min(now, leg.progress_at + missed_s)
            for instance in self._waited_for():
                instance.last_sign = min(now, instance.last_sign + missed_s)
        for leg in tuple(self._open.legs):
            leg.look(now)

    def _waited_for(self) -> OrderedSet[Instance]:
        return _instances_of(self._open.legs)

    def _quiet(self) -> OrderedSet[Instance]:
        """The instances whose step counter to read: those that have shown no progress for a while."""
        now, waited_for = self._open.now(), self._waited_for()
        quiet = [leg for leg in self._open.legs if leg.silent_for(now) > self._silence_s / 4]
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
            instance.last_sign = self._open.now()
        self._steps[instance] = steps


def _instances_of(legs: Iterable[Leg]) -> OrderedSet[Instance]:
    """Those that the legs wait for."""
    return OrderedSet(one for leg in legs for one in (leg.instance, leg.patience.beside) if one is not None)
