"""Helpers for tests that step engines in their own process."""

from __future__ import annotations

import threading

from kvferry.engine.engine import Engine


class IdleWait:
    """Waits between steps. Call it after a step of each engine: while all of them only wait for transfers, it waits
    too, because steps that find nothing to do would take the time that the transfers need."""

    idle_s = 0.005
    """Max seconds between two steps of waiting engines, because leases and deadlines depend on the clock."""

    def __init__(self, *engines: Engine) -> None:
        self._engines, self._moved = engines, threading.Event()
        for engine in engines:
            engine.on_transfer(self._moved.set)

    def __call__(self) -> None:
        if all(engine.idle for engine in self._engines):
            self._moved.wait(self.idle_s)
        self._moved.clear()
