"""The threads of a store, for calls that block, such as those to a network file system whose server is gone.

Owns the threads. A call that does not return cannot be ended: its caller continues without it, its thread is abandoned,
and another thread replaces the thread. The threads are daemons, so that the process can end while they run.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvferry.core.errors import StoreError
from kvferry.core.runtime.threads import Thread

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class Stop:
    """Signals to a function on a thread that its result is no longer needed. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._requested = threading.Lock(), False

    def request(self) -> None:
        """Ask the function to stop. After this has returned, `write` does not write any more."""
        with self._lock:
            self._requested = True

    @property
    def requested(self) -> bool:
        """True if the function should stop."""
        return self._requested

    def write(self, function: Callable[[], object]) -> bool:
        """Call a function that writes to the caller's memory, and that must not block, unless the caller has stopped
        waiting. Returns True if it was called."""
        with self._lock:
            if not self._requested:
                function()
            return not self._requested


class ThreadCall:
    """A function that waits to be called, runs, or was abandoned."""

    def __init__(self, function: Callable[[Stop], Any]) -> None:
        self.function, self.stop = function, Stop()
        self.future: Future[Any] = Future()
        self.is_done = self.is_abandoned = False

    def make(self) -> None:
        """Call the function, unless the caller has stopped waiting."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function(self.stop))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
            self.future.set_exception(error)


class Threads:
    """At most `number` threads for calls that are awaited. Threads are started when they are needed; their names begin
    with `name`. While `max_abandoned` threads are abandoned in calls, no other call is made."""

    close_s = 2.0
    """Maximum seconds that `close` waits for running calls."""

    def __init__(self, number: int, name: str, max_abandoned: int = 16) -> None:
        self._number, self._name, self._max_abandoned = number, name, max_abandoned
        self._condition = threading.Condition()
        self._calls: deque[ThreadCall] = deque()
        self._num_threads = self._num_idle = self._num_abandoned = 0
        self._is_closed = False

    async def run(self, function: Callable[[Stop], Result]) -> Result:
        """Run a function on a thread. On cancellation, the function is asked to stop and is abandoned: it must write to
        the caller's memory by `Stop.write` only, and may read the memory until it ends. Raises `StoreError` if too many
        calls do not return, and the exceptions of the function."""
        call = ThreadCall(function)
        with self._condition:
            self._require_open()
            self._calls.append(call)
            self._wake()
        try:
            result: Result = await asyncio.wrap_future(call.future)
            return result
        except asyncio.CancelledError:
            self._abandon(call)
            raise

    def close(self) -> None:
        """Accept no further calls, and end the threads when all calls have returned, or after `close_s` seconds."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._num_threads <= self._num_abandoned, self.close_s)
            while self._calls:
                self._calls.popleft().future.cancel()
            if self._num_threads:
                logger.warning("%d calls of a store do not return; their threads are left behind", self._num_threads)

    def _require_open(self) -> None:
        """Raise `StoreError` if no further call may be made."""
        if self._is_closed or self._num_abandoned >= self._max_abandoned:
            state = "is closed" if self._is_closed else f"has {self._num_abandoned} calls that do not return"
            raise StoreError(f"the store {state}")

    def _wake(self) -> None:
        """Wake or start a thread for the newest call."""
        if len(self._calls) <= self._num_idle:
            self._condition.notify()
        elif self._num_threads - self._num_abandoned < self._number:
            self._num_threads += 1
            Thread(self._work, name=self._name).start()

    def _abandon(self, call: ThreadCall) -> None:
        call.stop.request()
        with self._condition:
            if call in self._calls:
                self._calls.remove(call)
            elif not call.is_done:
                call.is_abandoned = True
                self._num_abandoned += 1
                if self._calls:
                    self._wake()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            call.make()
            with self._condition:
                call.is_done = True
                self._num_abandoned -= call.is_abandoned

    def _next(self) -> ThreadCall | None:
        """The next call; None: the thread is no longer needed."""
        with self._condition:
            self._num_idle += 1
            self._condition.wait_for(lambda: self._calls or self._is_closed or self._has_excess_thread)
            self._num_idle -= 1
            if self._calls and not self._has_excess_thread:
                return self._calls.popleft()
            self._num_threads -= 1
            self._condition.notify_all()
            return None

    @property
    def _has_excess_thread(self) -> bool:
        return self._num_threads - self._num_abandoned > self._number
