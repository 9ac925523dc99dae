"""Legs that run at once: P's while D's is waited for, and while D's answer is already on its way to the client.

Where all goes well, P's answer is taken in the very call in which its last byte comes from the socket, and no task
waits for it. Whatever else becomes of the leg (lost, given up, an answer that has to be read first) is for its owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

from kvferry.router.legs import PrefillDone, PrefillOutcome
from kvferry.router.upstream import SentLeg


class PrefillBeside:
    """Watches `leg` from `watch` until `over` is done. `take` makes the outcome of an answer that is whole; `turned` is
    called when there is one, and whenever the leg is `in_trouble`.

    Both are called from the event loop's callbacks, though in the context of whoever began to watch, so that log lines
    name the request; neither may wait.
    """

    __slots__ = ("_take", "leg", "outcome", "over", "turned")

    def __init__(
        self,
        leg: SentLeg,
        take: Callable[[SentLeg], PrefillOutcome],
        turned: Callable[[PrefillBeside], None],
    ) -> None:
        self.leg, self._take, self.turned = leg, take, turned
        self.outcome: PrefillOutcome | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when there is an outcome, or nobody waits for one any more. Has the error of a `take` that failed."""

    @property
    def in_trouble(self) -> bool:
        """Whether no whole answer of status 200 will come by itself."""
        leg = self.leg
        return leg.is_lost or (leg.has_begun and not leg.will_be_whole)

    def watch(self) -> None:
        """Begin, with what is here already."""
        context, look = copy_context(), self.look
        self.leg.on_change(lambda: context.run(look))
        look()

    def look(self) -> None:
        """Something has changed."""
        if self.over.done():
            return
        leg = self.leg
        if leg.is_whole and leg.status == 200:
            try:
                self.outcome = self._take(leg)
            except Exception as error:  # noqa: BLE001 - raised by who waits for `over`, not in the event loop
                self.over.set_exception(error)
            else:
                self.over.set_result(None)
            self.turned(self)
        elif self.in_trouble:
            self.turned(self)

    def stop(self) -> None:
        """From here on the leg is its owner's, who has its outcome or waits for it in another way."""
        self.over.cancel()


def can_wait_for(outcome: PrefillOutcome | None, early: dict[str, Any]) -> bool:
    """Whether D, which was told `early`, has only to fetch what P keeps."""
    return isinstance(outcome, PrefillDone) and outcome.params is not None and asked_there(outcome, early)


def asked_there(outcome: PrefillDone, early: dict[str, Any]) -> bool:
    """Whether P's ticket is from the address where D was told to ask."""
    return outcome.origin is None or outcome.origin.engine_id == early["remote_engine_id"]


async def ended(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until all tasks, which have been cancelled, are done; also if this wait is itself cancelled."""
    cancelled: asyncio.CancelledError | None = None
    left = set(tasks)
    while left:
        try:
            _, left = await asyncio.wait(left)
        except asyncio.CancelledError as error:
            cancelled = error
            left = {task for task in left if not task.done()}
    if cancelled is not None:
        raise cancelled


async def either(*tasks: asyncio.Task[Any]) -> None:
    """Wait until one of them is done. Like `asyncio.wait`, which takes several times as long to set up."""
    woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: asyncio.Task[Any]) -> None:
        if not woken.done():
            woken.set_result(None)

    for task in tasks:
        task.add_done_callback(wake)
    try:
        await woken
    finally:
        for task in tasks:
            task.remove_done_callback(wake)
