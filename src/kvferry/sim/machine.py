"""The machine of one simulated process: its threads are event loops of the simulation, its calls that block take
virtual time, and its files and shared memory are those of `sim.storage`; and a core that several processes share.
"""

from __future__ import annotations

import _thread
import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from contextvars import Context
from heapq import heapify, heappop, heappush
from typing import Any, ClassVar, TypeVar

from kvferry.core.errors import StoreError
from kvferry.sim.loop import SimHandle, SimLoop, SimProcess
from kvferry.sim.storage import SimArena, SimDisk, Storage
from kvferry.store.machine import Machine
from kvferry.store.threads import MAX_LEFT, Stop, ThreadCall, Threads
from kvferry.transport.transfer_loop import TransferLoop

Result = TypeVar("Result")
_NOTHING_S = 1e-9
_Computing = tuple[float, int, Callable[[], object]]
"""What `SimCore._served_s` will be at its end, its number, and what follows."""


class SimTransferLoop(TransferLoop):
    """A `TransferLoop` whose thread is a loop of the simulation. Where the real one has its caller wait, what is called
    later waits: `run` and `close` begin when all that was run before is over."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop: SimLoop = loop
        self._last: asyncio.Task[None] | None = None
        self.num_errors = 0

    def start(self) -> None:
        """Does nothing: the loop runs already."""

    def run(self, job: Coroutine[Any, Any, object], within_s: float) -> None:
        self._last = self._loop.create_task(self._after(self._last, job, within_s))

    def wait_for(self, changed: threading.Condition, condition: Callable[[], bool], within_s: float) -> bool:
        """No time can pass here."""
        return condition()

    def close(self, timeout_s: float = 0.0) -> None:
        self._last = self._loop.create_task(self._after(self._last, self._cancel_all(), timeout_s))

    async def _after(
        self, before: asyncio.Task[None] | None, job: Coroutine[Any, Any, object], within_s: float
    ) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            async with asyncio.timeout(within_s or None):
                await job
        except TimeoutError:
            pass
        except Exception as error:  # noqa: BLE001 - the caller, who would get it, is not there any more
            self._loop.call_exception_handler({"message": f"a job failed: {error!r}", "exception": error})
        finally:
            job.close()

    async def _cancel_all(self) -> None:
        for task in self._loop.process.tasks():
            if task.get_loop() is self._loop and task is not asyncio.current_task():
                task.cancel()


class SimCore:
    """A core that several threads share: where `n` of them compute, each takes `n` times as long. `loop`: one that is
    outside of all processes."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._ends: list[_Computing] = []
        """A heap of all that compute."""
        self._number = 0
        self._served_s, self._at = 0.0, 0.0
        """Seconds of computing that one that was always there has got, and when."""
        self._timer: SimHandle | None = None

    @property
    def num_computing(self) -> int:
        """How many compute now."""
        return len(self._ends)

    async def compute(self, seconds: float) -> None:
        """Compute for so long, on the loop that this is called on, or until its process ends."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        done, on_end = loop.create_future(), loop.process.on_end
        entry = self.spend(seconds, lambda: loop.call_soon_threadsafe(_end, done))
        on_end[done] = lambda: self._leave(entry)
        try:
            await done
        finally:
            on_end.pop(done, None)

    def spend(self, seconds: float, then: Callable[[], object]) -> _Computing:
        """Have somebody compute for so long, and call `then`, outside of all processes."""
        self._serve()
        self._number += 1
        entry = (self._served_s + seconds, self._number, then)
        heappush(self._ends, entry)
        self._set_timer()
        return entry

    def _leave(self, entry: _Computing) -> None:
        self._serve()
        if entry in self._ends:
            self._ends.remove(entry)
            heapify(self._ends)
            self._set_timer()

    def _serve(self) -> None:
        """Count what those that compute have got so far."""
        now = self._loop.time()
        if self._ends:
            self._served_s += (now - self._at) / len(self._ends)
        self._at = now

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._ends:
            left_s = max(0.0, self._ends[0][0] - self._served_s) * len(self._ends)
            self._timer = self._loop.call_later(left_s, self._look, context=Context())

    def _look(self) -> None:
        """End those that are done."""
        self._timer = None
        self._serve()
        over = []
        while self._ends and self._ends[0][0] <= self._served_s + _NOTHING_S:
            over.append(heappop(self._ends)[2])
        self._set_timer()
        for then in over:
            then()


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Ended(BaseException):
    """The simulation ends, and so does the call that is made beside it."""


_HERE = threading.local()
"""`.call`: the `_CallAside` that this thread makes, if it makes one."""


def _closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


class _Thread:
    """A thread that makes one call after the other: starting one takes longer than most calls."""

    idle: ClassVar[list[_Thread]] = []

    def __init__(self) -> None:
        self.may_go, self.has_stopped = _closed_gate(), _closed_gate()
        self.call: _CallAside | None = None
        """The next one."""
        _thread.start_new_thread(self._work, ())

    def _work(self) -> None:
        while True:
            self.may_go.acquire()
            _HERE.call, self.call = self.call, None
            _HERE.call.make()
            del _HERE.call  # an idle thread keeps nothing of a simulation
            self.idle.append(self)
            self.has_stopped.release()


os.register_at_fork(after_in_child=_Thread.idle.clear)


class _CallAside:
    """A plain function on a thread of its own, which runs only while the simulation stands still for it: so it can
    pause in the middle, for virtual time."""

    def __init__(self, function: Callable[[], Any], loop: SimLoop) -> None:
        self._function, self._loop = function, loop
        self._thread = _Thread.idle.pop() if _Thread.idle else _Thread()
        self._thread.call = self
        self._pause_s: float | None = 0.0
        self._is_ended = self._is_over = False
        self.result: Any = None
        self.error: BaseException | None = None

    def go_on(self) -> float | None:
        """Let it run until it pauses, and return for how many seconds; None: it has ended."""
        self._thread.may_go.release()
        self._thread.has_stopped.acquire()
        return self._pause_s

    def end(self) -> None:
        """The simulation goes on without it."""
        if not self._is_over:
            self._is_ended = True
            self.go_on()

    # On the thread.

    def pause(self, seconds: float) -> None:
        """Called by the function."""
        self._pause_s = seconds
        self._thread.has_stopped.release()
        self._thread.may_go.acquire()
        if self._is_ended:
            raise _Ended

    def make(self) -> None:
        """Call the function."""
        asyncio._set_running_loop(self._loop)
        try:
            if not self._is_ended:
                self.result = self._function()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
            self.error = error
        asyncio._set_running_loop(None)
        self._pause_s, self._is_over = None, True


class SimThreads(Threads):
    """At most `number` calls at a time, each in the virtual time that its bytes take. One that is left behind goes on,
    and another takes its place, as with real ones. `pauses` false: the time of a call passes behind it."""

    def __init__(self, machine: SimMachine, number: int, name: str, *, pauses: bool) -> None:
        self._machine, self._pauses = machine, pauses
        self._sim_loop = machine.process.thread(name)
        self._places = asyncio.Semaphore(number)
        self._sim_num_left = 0
        self._sim_closed = False

    async def run(self, function: Callable[[Stop], Result]) -> Result:
        if self._sim_closed or self._sim_num_left >= MAX_LEFT:
            state = "is closed" if self._sim_closed else f"has {self._sim_num_left} calls that do not return"
            raise StoreError(f"the store {state}")
        call = ThreadCall(function)
        self._sim_loop.call_soon(lambda: self._sim_loop.create_task(self._make(call)))
        try:
            found: Result = await asyncio.wrap_future(call.future)
            return found
        except asyncio.CancelledError:
            call.stop.now()
            if call.future.running():
                call.is_left = True
                self._sim_num_left += 1
                self._places.release()
            raise

    async def _make(self, call: ThreadCall) -> None:
        await self._places.acquire()
        try:
            if call.future.set_running_or_notify_cancel():
                call.future.set_result(await self._called(call))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the caller's
            # A real store waits for its calls when it closes; here they meet one that is closed.
            call.future.set_exception(StoreError("the store is closed") if self._sim_closed else error)
        finally:
            if call.is_left:
                self._sim_num_left -= 1
            else:
                self._places.release()

    async def _called(self, call: ThreadCall) -> Any:
        if not self._pauses:
            machine, now = self._machine, self._sim_loop.time()
            machine.ends_at = now
            try:
                return call.function(call.stop)
            finally:
                await asyncio.sleep(machine.ends_at - now)
        aside = _CallAside(lambda: call.function(call.stop), self._sim_loop)
        try:
            while (seconds := aside.go_on()) is not None:  # noqa: ASYNC110 - it says for how long
                await asyncio.sleep(seconds)
        finally:
            aside.end()
        if aside.error is not None:
            raise aside.error
        return aside.result

    def close(self) -> None:
        self._sim_closed = True


class SimMachine(Machine):
    """What the connector of one simulated process uses. `true_bytes`: see `SimDisk`. `pauses`: time passes in the
    middle of calls; if not, which is cheaper, they are made at once, and their time passes behind them. `wake_s`: until
    a transfer loop runs what another thread gives it."""

    def __init__(
        self, storage: Storage, process: SimProcess, true_bytes: float, *, pauses: bool = True, wake_s: float = 0.0
    ) -> None:
        self._storage, self.process, self._true_bytes, self._pauses = storage, process, true_bytes, pauses
        self._wake_s = wake_s
        self.disk = SimDisk(storage, process, true_bytes, self)
        self.ends_at = 0.0
        """How far the call has come that is made at once."""

    def threads(self, number: int, name: str, *, moves_blocks: bool = True) -> Threads:
        return SimThreads(self, number, name, pauses=moves_blocks and self._pauses)

    def transfer_loop(self, name: str) -> TransferLoop:
        loop = self.process.thread(name)
        loop.wake_s = self._wake_s
        return SimTransferLoop(loop)

    def arena(self, name: str, num_bytes: int) -> SimArena:
        return SimArena(self._storage, self.process, name, num_bytes, self._true_bytes, self)

    def now(self) -> float:
        """The time of the call, as `CallTime` has it."""
        return self.process.simulation.now if hasattr(_HERE, "call") else self.ends_at

    def wait_until(self, when: float) -> None:
        """Wait as `CallTime` does."""
        call = getattr(_HERE, "call", None)
        if call is not None:
            call.pause(when - self.process.simulation.now)
        else:
            self.ends_at = max(self.ends_at, when)
