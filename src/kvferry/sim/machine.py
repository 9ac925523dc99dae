"""The machine of one simulated process, and a core that several processes share.

The machine's threads are event loops of the simulation, its blocking calls take virtual time, and its files and shared
memory are in `sim.storage`.
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
from kvferry.store.threads import Stop, ThreadCall, Threads
from kvferry.transport.transfer_loop import TransferLoop

Result = TypeVar("Result")
_Computation = tuple[float, int, Callable[[], object]]
"""`SimCore._served_s` at its end, its number, and the callback."""


class SimTransferLoop(TransferLoop):
    """A `TransferLoop` whose thread is a loop of the simulation. Where the real class blocks its caller, this one
    returns at once and delays later calls: a job of `run` or `close` begins when all earlier jobs have ended."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop: SimLoop = loop
        self._last: asyncio.Task[None] | None = None
        self.num_errors = 0

    def start(self) -> None:
        """Does nothing: the loop runs already."""

    def run(self, job: Coroutine[Any, Any, object], timeout_s: float) -> None:
        self._last = self._loop.create_task(self._after(self._last, job, timeout_s))

    def wait_for(self, changed: threading.Condition, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Return the condition at once: no virtual time can pass in this call."""
        return condition()

    def close(self, timeout_s: float = 0.0) -> None:
        self._last = self._loop.create_task(self._after(self._last, self._cancel_all(), timeout_s))

    async def _after(
        self, before: asyncio.Task[None] | None, job: Coroutine[Any, Any, object], timeout_s: float
    ) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            async with asyncio.timeout(timeout_s or None):
                await job
        except TimeoutError:
            pass
        except Exception as error:  # noqa: BLE001 - the caller has returned
            self._loop.call_exception_handler({"message": f"a job failed: {error!r}", "exception": error})
        finally:
            job.close()

    async def _cancel_all(self) -> None:
        for task in self._loop.process.tasks():
            if task.get_loop() is self._loop and task is not asyncio.current_task():
                task.cancel()


class SimCore:
    """A core that several threads share: if `n` of them compute, each takes `n` times as long. `loop`: a loop that
    belongs to no process."""

    epsilon_s = 1e-9

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._ends: list[_Computation] = []
        """A heap of all computations."""
        self._number = 0
        self._served_s, self._at = 0.0, 0.0
        """Virtual service time of the core: the seconds of computing that a computation from the beginning on would
        have got. And the time of its last update."""
        self._timer: SimHandle | None = None

    @property
    def num_computing(self) -> int:
        """Number of running computations."""
        return len(self._ends)

    async def compute(self, seconds: float) -> None:
        """Compute for `seconds`, on the current loop. Ends early if the loop's process ends."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        done, on_end = loop.create_future(), loop.process.on_end
        entry = self.spend(seconds, lambda: loop.call_soon_threadsafe(_end, done))
        on_end[done] = lambda: self._cancel(entry)
        try:
            await done
        finally:
            on_end.pop(done, None)

    def spend(self, seconds: float, on_done: Callable[[], object]) -> _Computation:
        """Occupy the core for `seconds`, and then call `on_done` on the core's loop, which belongs to no process."""
        self._update_served()
        self._number += 1
        entry = (self._served_s + seconds, self._number, on_done)
        heappush(self._ends, entry)
        self._set_timer()
        return entry

    def _cancel(self, entry: _Computation) -> None:
        self._update_served()
        if entry in self._ends:
            self._ends.remove(entry)
            heapify(self._ends)
            self._set_timer()

    def _update_served(self) -> None:
        """Update the service time."""
        now = self._loop.time()
        if self._ends:
            self._served_s += (now - self._at) / len(self._ends)
        self._at = now

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._ends:
            remaining_s = max(0.0, self._ends[0][0] - self._served_s) * len(self._ends)
            self._timer = self._loop.call_later(remaining_s, self._on_timer, context=Context())

    def _on_timer(self) -> None:
        """End finished computations."""
        self._timer = None
        self._update_served()
        finished = []
        while self._ends and self._ends[0][0] <= self._served_s + self.epsilon_s:
            finished.append(heappop(self._ends)[2])
        self._set_timer()
        for on_done in finished:
            on_done()


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Ended(BaseException):
    """The simulation has ended, and ends the call."""


_CURRENT = threading.local()
"""`.call`: the `_PausableCall` that this thread runs, if any."""


def _closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


class _Thread:
    """A thread that runs one call after the other: starting a thread takes longer than most calls."""

    idle: ClassVar[list[_Thread]] = []

    def __init__(self) -> None:
        self.resumed, self.paused = _closed_gate(), _closed_gate()
        self.call: _PausableCall | None = None
        """The next call."""
        _thread.start_new_thread(self._work, ())

    def _work(self) -> None:
        while True:
            self.resumed.acquire()
            _CURRENT.call, self.call = self.call, None
            _CURRENT.call.run()
            del _CURRENT.call  # an idle thread must not reference a simulation
            self.idle.append(self)
            self.paused.release()


os.register_at_fork(after_in_child=_Thread.idle.clear)


class _PausableCall:
    """A plain function on its own thread. The thread runs only while the simulation waits for it, so that the function
    can pause in the middle, for virtual time."""

    def __init__(self, function: Callable[[], Any], loop: SimLoop) -> None:
        self._function, self._loop = function, loop
        self._thread = _Thread.idle.pop() if _Thread.idle else _Thread()
        self._thread.call = self
        self._pause_s: float | None = 0.0
        self._is_cancelled = self._is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def resume(self) -> float | None:
        """Let the function run until it pauses. Returns the seconds of the pause; None: the function has ended."""
        self._thread.resumed.release()
        self._thread.paused.acquire()
        return self._pause_s

    def end(self) -> None:
        """End the call, if it has not ended. The function gets an exception in its pause."""
        if not self._is_done:
            self._is_cancelled = True
            self.resume()

    # On the thread.

    def pause(self, seconds: float) -> None:
        """Called by the function, to let virtual time pass."""
        self._pause_s = seconds
        self._thread.paused.release()
        self._thread.resumed.acquire()
        if self._is_cancelled:
            raise _Ended

    def run(self) -> None:
        """Call the function."""
        asyncio._set_running_loop(self._loop)
        try:
            if not self._is_cancelled:
                self.result = self._function()
        except BaseException as error:  # noqa: BLE001 - any error belongs to the caller
            self.error = error
        asyncio._set_running_loop(None)
        self._pause_s, self._is_done = None, True


class SimThreads(Threads):
    """At most `number` calls at a time. Each takes the virtual time of its bytes. As in the real class, an abandoned
    call continues, but no longer counts. `pauses` False: a call runs at once, and its time passes afterwards."""

    def __init__(self, machine: SimMachine, number: int, name: str, *, pauses: bool) -> None:
        super().__init__(number, name)
        self._machine, self._pauses = machine, pauses
        self._sim_loop = machine.process.thread(name)
        self._slots = asyncio.Semaphore(number)

    async def run(self, function: Callable[[Stop], Result]) -> Result:
        self._require_open()
        call = ThreadCall(function)
        self._sim_loop.call_soon(lambda: self._sim_loop.create_task(self._run_call(call)))
        try:
            result: Result = await asyncio.wrap_future(call.future)
            return result
        except asyncio.CancelledError:
            call.stop.request()
            if call.future.running():
                call.is_abandoned = True
                self._num_abandoned += 1
                self._slots.release()
            raise

    async def _run_call(self, call: ThreadCall) -> None:
        await self._slots.acquire()
        try:
            if call.future.set_running_or_notify_cancel():
                call.future.set_result(await self._execute(call))
        except Exception as error:  # noqa: BLE001 - any error belongs to the caller
            # A real store waits for its calls when it closes; simulated calls get an error instead.
            call.future.set_exception(StoreError("the store is closed") if self._is_closed else error)
        finally:
            if call.is_abandoned:
                self._num_abandoned -= 1
            else:
                self._slots.release()

    async def _execute(self, call: ThreadCall) -> Any:
        if not self._pauses:
            machine, now = self._machine, self._sim_loop.time()
            machine.ends_at = now
            try:
                return call.function(call.stop)
            finally:
                await asyncio.sleep(machine.ends_at - now)
        pausable = _PausableCall(lambda: call.function(call.stop), self._sim_loop)
        try:
            while (seconds := pausable.resume()) is not None:  # noqa: ASYNC110 - the call sets the pause
                await asyncio.sleep(seconds)
        finally:
            pausable.end()
        if pausable.error is not None:
            raise pausable.error
        return pausable.result

    def close(self) -> None:
        self._is_closed = True


class SimMachine(Machine):
    """The machine for the connector of one simulated process. `true_bytes`: as in `SimDisk`. `pauses`: time passes
    within blocking calls. False, which is cheaper: they run at once, and their time passes afterwards. `wake_s`:
    seconds until a transfer loop runs a call from another thread."""

    def __init__(
        self, storage: Storage, process: SimProcess, true_bytes: float, *, pauses: bool = True, wake_s: float = 0.0
    ) -> None:
        self._storage, self.process, self._true_bytes, self._pauses = storage, process, true_bytes, pauses
        self._wake_s = wake_s
        self.disk = SimDisk(storage, process, true_bytes, self)
        self.ends_at = 0.0
        """The virtual time at which a call that runs at once ends."""

    def threads(self, number: int, name: str, *, moves_blocks: bool = True) -> Threads:
        return SimThreads(self, number, name, pauses=moves_blocks and self._pauses)

    def transfer_loop(self, name: str) -> TransferLoop:
        loop = self.process.thread(name)
        loop.wake_s = self._wake_s
        return SimTransferLoop(loop)

    def arena(self, name: str, num_bytes: int) -> SimArena:
        return SimArena(self._storage, self.process, name, num_bytes, self._true_bytes, self)

    def now(self) -> float:
        """The virtual time within a call (`CallTime`)."""
        return self.process.simulation.now if hasattr(_CURRENT, "call") else self.ends_at

    def wait_until(self, when: float) -> None:
        """Let virtual time pass within a call, until `when` (`CallTime`)."""
        call = getattr(_CURRENT, "call", None)
        if call is not None:
            call.pause(when - self.process.simulation.now)
        else:
            self.ends_at = max(self.ends_at, when)
