"""The engine on its own thread, for asyncio callers. Owns the thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence

from kvferry.core.runtime.threads import Thread
from kvferry.engine.engine import Engine
from kvferry.engine.stepped import SteppedEngine

log = logging.getLogger(__name__)


class AsyncEngine(SteppedEngine):
    """One engine and its thread."""

    join_s = 10.0
    """Max seconds that `close` waits for a step to end."""

    def __init__(self, engine: Engine, model_names: Sequence[str]) -> None:
        super().__init__(engine, model_names)
        self._wakeup = threading.Event()
        self._thread = Thread(self._run, name="kvferry-engine")

    def start(self) -> None:
        """Begin stepping. Call from the event loop that will listen."""
        super().start()
        self.engine.on_transfer(self.wake)
        self._thread.start()

    async def close(self) -> None:
        """End all requests, the thread and the engine. The engine stays open if its thread does not return from a
        step."""
        self._closing = True
        self.wake()
        await asyncio.to_thread(self._thread.join, self.join_s)
        if self._thread.is_alive():
            log.error("a step of the engine does not end; the engine is left as it is")
        else:
            self.engine.close()

    @property
    def is_stepping(self) -> bool:
        """True if the thread is alive."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Wake the thread if it waits between two steps."""
        self._wakeup.set()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wakeup.clear()
                self._serve_calls()
                self._deliver(self.engine.step())
                if (rest_s := self._idle_timeout_s()) != 0.0:
                    self._wakeup.wait(rest_s)
        except BaseException as failure:  # noqa: BLE001 - the thread's outermost edge: all waiters must be woken
            self._on_failure(failure)
        finally:
            self._on_end()
