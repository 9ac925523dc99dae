"""A virtual clock, and event loops of asyncio that run on it: one for each simulated thread.

`Simulation` owns the time, everything that waits for it, and the one generator of random numbers from which every
choice comes. Time stands still while callbacks run, and jumps to the next timer when none is ready. The callbacks of
one loop run in the order that asyncio promises. Which of several loops goes on is drawn, and so is the order of timers
that are due at the same time. So the same seed gives the same events, bit for bit, which `EventLog` shows.

A `SimProcess` has one loop for each of its threads. When it crashes, nothing of it runs any more, and its connections
break (`sim.network`). There are no real sockets, no files and no threads: what code gives to an executor runs at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from kvferry.core.clock import simulated_time
from kvferry.core.entropy import simulated_entropy

if TYPE_CHECKING:
    from kvferry.engine.core import EngineCore
    from kvferry.sim.network import SimHost

Result = TypeVar("Result")
EPOCH_S = 1_700_000_000.0
"""The wall clock's time at the beginning of a simulation."""
_LAST_EVENTS = 256
_LINES_AT_ONCE = 64
_FEW_TIMERS = 256
_FEW_TASKS = 256
_LAST_WORDS = 8
"""How often a coroutine is closed that waits for something when it is to end."""


class Deadlock(Exception):
    """Something waits, and nothing will ever happen."""


class EventLog:
    """What happens, in order. Owns a digest of all of it, the last events as text, and the whole text if it is kept."""

    def __init__(self, *, keep: bool = False) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self.num_events = self._num_digested = 0
        self.last: deque[str] = deque(maxlen=None if keep else _LAST_EVENTS)

    def note(self, now: float, what: str) -> None:
        """Note something that has happened."""
        self.num_events += 1
        self.last.append(f"{now!r} {what}")
        if self.num_events % _LINES_AT_ONCE == 0:
            self._digest_last(_LINES_AT_ONCE)

    def _digest_last(self, number: int) -> None:
        lines = self.last if len(self.last) == number else list(self.last)[len(self.last) - number :]
        self._digest.update("\n".join(lines).encode())
        self._num_digested = self.num_events

    def digest(self) -> str:
        """Equal for two runs exactly if all events were the same, at the same times, in the same order. Ask at the
        end: what is noted afterwards counts as another run's would that was asked at the same place."""
        if self._num_digested != self.num_events:
            self._digest_last(self.num_events - self._num_digested)
        return self._digest.hexdigest()


class SimProcess:
    """A simulated process on a host: its loops live and die together. `name` is for the log."""

    def __init__(self, simulation: Simulation, host: SimHost, name: str) -> None:
        self.simulation, self.host, self.name = simulation, host, name
        self.number = len(simulation.processes)
        self.is_alive = True
        self.stalled_until = 0.0
        self._tasks: dict[SimTask, None] = {}
        self._num_tasks_kept = _FEW_TASKS
        self.on_end: dict[object, Callable[[], None]] = {}
        """What ends with it, its connections and listeners, and how."""

        simulation.processes.append(self)

    def keep_task(self, task: SimTask) -> None:
        """Keep a task for `SimLoop.create_task` until it is done, and then until many are."""
        self._tasks[task] = None
        if len(self._tasks) > self._num_tasks_kept:
            self._num_tasks_kept = _FEW_TASKS + 2 * len(self.tasks())

    def tasks(self) -> list[SimTask]:
        """All tasks that are not done, in the order in which they began. The others are forgotten, and so an error of
        theirs that nobody has asked for is told to their loop."""
        living = [task for task in self._tasks if not task.done()]
        self._tasks = dict.fromkeys(living)
        return living

    def end_tasks(self) -> None:
        """End all tasks, for `Simulation` at its end."""
        for task in reversed(self.tasks()):
            _close(task)
        self._tasks.clear()

    def thread(self, name: str) -> SimLoop:
        """A new thread, with a loop that runs from now on."""
        return SimLoop(self.simulation, self, f"{self.name}/{name}")  # type: ignore[abstract]

    def crash(self) -> None:
        """End at once. Nothing of it runs any more, not even what was to be done last."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.simulation.note(f"{self.name} ends")
        for end in tuple(self.on_end.values()):
            end()
        self.on_end.clear()

    def stall(self, seconds: float) -> None:
        """Run nothing for this long, as a process that is stopped, or whose machine is busy."""
        self.stalled_until = max(self.stalled_until, self.simulation.now + seconds)
        self.simulation.note(f"{self.name} stands still for {seconds:.6f} s")


class Simulation:
    """Owns the virtual time, the timers, the ready callbacks of all loops, and the random numbers."""

    def __init__(self, seed: int, *, keep_log: bool = False, has_log: bool = True) -> None:
        self.seed = seed
        self.is_noting = has_log
        """Whether what happens is noted: a long simulation goes without."""
        self.random = Random(f"kvferry {seed}")
        self.log = EventLog(keep=keep_log)
        self.now = 0.0
        self.num_callbacks = self.num_tasks = 0
        self.errors: list[dict[str, Any]] = []
        """What loops were told by `call_exception_handler`: errors that nobody waits for."""
        self._timers: list[tuple[float, float, int, SimHandle]] = []
        self._num_timers = self._num_cancelled = 0
        self._ready: list[SimLoop] = []
        self.processes: list[SimProcess] = []
        self.token_times: dict[str, deque[tuple[float, list[float]]]] = {}
        """When each batch of an answer's tokens has left the engine, and when each token was computed, by the id of an
        answer whose client measures it."""
        self.after_callbacks: Callable[[], None] | None = None
        """Called each time that the time is about to move: for checks that are cheap."""
        self.after_step: Callable[[EngineCore], None] | None = None
        """Called with an engine between two of its steps."""

    # Time, as `core.clock.Clock`.

    def monotonic(self) -> float:
        """Virtual seconds."""
        return self.now

    def wall(self) -> float:
        """Seconds since the epoch, as the machine has them whose code runs."""
        loop = asyncio._get_running_loop()
        return EPOCH_S + self.now + (loop.process.host.clock_s if isinstance(loop, SimLoop) else 0.0)

    def note(self, what: str) -> None:
        """Note something that has happened: see `EventLog`."""
        if self.is_noting:
            self.log.note(self.now, what)

    # What is to run.

    def add_timer(self, when: float, handle: SimHandle) -> None:
        """Add a timer for `SimLoop.call_at`. Timers that are due at the same time run in an order that is drawn."""
        self._num_timers += 1
        heappush(self._timers, (when, self.random.random(), self._num_timers, handle))

    def timer_cancelled(self) -> None:
        """Count a cancelled timer. When most timers are cancelled, these are dropped: some are far in the future."""
        self._num_cancelled += 1
        if self._num_cancelled > _FEW_TIMERS and 2 * self._num_cancelled > len(self._timers):
            self._timers = [one for one in self._timers if not one[3]._cancelled]
            heapify(self._timers)
            self._num_cancelled = 0

    def is_ready(self, loop: SimLoop) -> None:
        """Record that this loop has something to run, and had nothing before."""
        self._ready.append(loop)

    def run_until(self, done: Callable[[], bool], *, until: float = float("inf"), max_callbacks: int = 2**62) -> bool:
        """Run until it is `done`, which is checked when the time is about to move, or the time is `until`, or so many
        callbacks have run, which is when it returns True. Raises `Deadlock` if nothing more happens, and there is no
        `until`."""
        last = self.num_callbacks + max_callbacks
        while not self._run_ready(last):
            if done() or self.now >= until:
                return False
            if not self._advance(until):
                raise Deadlock("nothing more happens, and something is still waited for")
        return True

    def _run_ready(self, last: int) -> bool:
        """Run all callbacks that are ready, the next one of a loop that is drawn each time. True: `num_callbacks` is
        `last` now. The innermost loop of a simulation, and so all in one place."""
        ready, draw, set_running, now = self._ready, self.random.random, asyncio._set_running_loop, self.now
        number = self.num_callbacks
        running: SimLoop | None = None
        try:
            while ready:
                place = int(draw() * num_ready) if (num_ready := len(ready)) > 1 else 0
                loop = ready[place]
                process = loop.process
                if process.stalled_until > now or not process.is_alive:
                    ready[place] = ready[-1]
                    ready.pop()
                    loop.park()
                    continue
                handle = loop.ready.popleft()
                if not handle._cancelled:
                    if loop is not running:
                        running = loop
                        set_running(loop)
                    try:
                        handle._context.run(handle._callback, *handle._args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:  # noqa: BLE001 - as in asyncio
                        loop.call_exception_handler({"message": f"a callback failed: {error!r}", "exception": error})
                    number += 1
                if not (loop.ready and process.is_alive):
                    loop.is_listed = False
                    place = place if ready[place] is loop else ready.index(loop)
                    ready[place] = ready[-1]
                    ready.pop()
                if number >= last:
                    return True
            return False
        finally:
            self.num_callbacks = number
            set_running(None)

    def _advance(self, until: float) -> bool:
        """Move the time to the next timer; what is due then becomes ready. False: there is none."""
        if self.after_callbacks is not None:
            self.after_callbacks()
        timers = self._timers
        while timers and timers[0][3]._cancelled:
            heappop(timers)
        if not timers and until == float("inf"):
            return False
        if not timers or timers[0][0] > until:
            self.now = until
            return True
        now = self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= now:
            handle = heappop(timers)[3]
            if not handle._cancelled:
                handle._loop.add_ready(handle)
        return True

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the body runs, all time and all randomness of kvferry are this simulation's. At the end, nothing is
        left of its loops."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=None, finalizer=_finalize)
        try:
            with simulated_time(self), simulated_entropy(Random(f"kvferry entropy {self.seed}")):
                try:
                    yield
                finally:
                    self._forget()
        finally:
            sys.set_asyncgen_hooks(*hooks)

    def _forget(self) -> None:
        """End all processes, those that have crashed too: drop their timers and callbacks, close their coroutines. Code
        that waits for something on its way out is closed there again, at most `_LAST_WORDS` times; what it would
        begin does not begin, and what it would log is not logged. The newest end first, because older ones own the
        groups in which they run."""
        for process in self.processes:
            process.is_alive = False
        were_disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            for process in self.processes:
                process.end_tasks()
        finally:
            logging.disable(were_disabled)
        self.processes.clear()
        self._timers.clear()
        self._ready.clear()


def _finalize(generator: AsyncGenerator[Any, Any]) -> None:
    """An asynchronous generator was dropped: close it, as asyncio does."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        loop.create_task(generator.aclose())


def _close(task: SimTask) -> None:
    """End the coroutine of a task that never runs again. Its last words are heard by nobody: its process has ended."""
    asyncio._set_running_loop(task.get_loop())
    try:
        for _ in range(_LAST_WORDS):
            with suppress(BaseException):
                task.context.run(task.get_coro().close)
                return
    finally:
        asyncio._set_running_loop(None)


class SimTask(asyncio.Task[Any]):
    """asyncio keeps tasks in sets, and iterates over them: their order must not follow from addresses."""

    def __init__(self, number: int, coro: Any, loop: SimLoop, name: str | None, context: Context) -> None:
        self.number, self.context = number, context  # first: asyncio asks for the hash at once
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


def _nothing() -> None:
    """What a cancelled callback does."""


class SimHandle(asyncio.TimerHandle):
    """A callback of a loop. As asyncio's, with less around it: most of a simulation's time goes into callbacks."""

    __slots__ = ()
    _loop: SimLoop

    def __init__(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], loop: SimLoop, context: Context
    ) -> None:
        self._when, self._callback, self._args, self._loop, self._context = when, callback, args, loop, context
        self._cancelled = False

    def __repr__(self) -> str:
        return f"<SimHandle at {self._when} of {self._callback}>"

    def cancel(self) -> None:
        """Cancel, as asyncio's handles do."""
        if not self._cancelled:
            self._cancelled = True
            self._callback, self._args = _nothing, ()
            self._loop.simulation.timer_cancelled()


class SimLoop(asyncio.AbstractEventLoop):
    """The event loop of one simulated thread. Runs what asyncio and kvferry need of a loop; anything else is an
    `AttributeError` or `NotImplementedError`, which then is to be written here."""

    def __init__(self, simulation: Simulation, process: SimProcess, name: str) -> None:
        self.simulation, self.process, self.name = simulation, process, name
        self.ready: deque[SimHandle] = deque()
        """Callbacks that are ready; the simulation runs them."""
        self.is_listed = self._is_parked = False
        """True if the simulation has it among the loops that have something to run."""
        self.wake_s = 0.0
        """Seconds until this thread runs what another one gives it."""
        self._given: deque[SimHandle] = deque()
        self._closed = False
        self._on_exception: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None

    # Running.

    def add_ready(self, handle: SimHandle) -> None:
        """Run this behind what is ready already."""
        if not self.process.is_alive:
            return
        self.ready.append(handle)
        if not (self.is_listed or self._is_parked):
            self.is_listed = True
            self.simulation.is_ready(self)

    def park(self) -> None:
        """Run nothing, as the process stands still, or has ended."""
        self.is_listed = False
        if not self.process.is_alive:
            self.ready.clear()
            return
        self._is_parked = True
        until = self.process.stalled_until
        wake = SimHandle(until, self._unpark, (), self.simulation_loop, Context())
        self.simulation.add_timer(until, wake)

    @property
    def simulation_loop(self) -> SimLoop:
        """The loop on which things happen to this one's process from outside."""
        return self.process.host.network.loop

    def _unpark(self) -> None:
        self._is_parked = False
        if self.ready and self.process.is_alive:
            self.is_listed = True
            self.simulation.is_ready(self)

    # What asyncio calls.

    def time(self) -> float:
        return self.simulation.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        handle = SimHandle(0.0, callback, args, self, copy_context() if context is None else context)
        self.add_ready(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        if not self.wake_s or asyncio._get_running_loop() is self:
            return self.call_soon(callback, *args, context=context)
        self._given.append(SimHandle(0.0, callback, args, self, copy_context() if context is None else context))
        self.call_later(self.wake_s, self._take, context=Context())
        return self._given[-1]

    def _take(self) -> None:
        """Run the oldest of what was given, whichever timer this is of."""
        self.add_ready(self._given.popleft())

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        simulation = self.simulation  # as `call_at`, without a frame more
        handle = SimHandle(simulation.now + delay, callback, args, self, copy_context() if context is None else context)
        if self.process.is_alive:
            simulation.add_timer(handle._when, handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        handle = SimHandle(when, callback, args, self, copy_context() if context is None else context)
        if self.process.is_alive:
            self.simulation.add_timer(when, handle)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, Result] | Coroutine[Any, Any, Result],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[Result]:
        if not self.process.is_alive:
            coro.close()  # it never runs
        if context is None:
            context = copy_context()
        self.simulation.num_tasks += 1
        task = SimTask(self.simulation.num_tasks, coro, self, name, context)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # of processes that crash, all are
        self.process.keep_task(task)
        return task

    def get_task_factory(self) -> None:
        return None

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        """Run it now: an executor's threads would take no virtual time."""
        done: asyncio.Future[Result] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the waiter's
            done.set_exception(error)
        return done

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An error that nobody waits for: it is noted, and told to the handler if there is one."""
        self.simulation.errors.append({**context, "loop": self.name})
        self.simulation.note(f"{self.name} has an error that nobody waits for: {context.get('message')}")
        if self._on_exception is not None:
            self._on_exception(self, context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        pass  # `call_exception_handler` has noted it

    def set_exception_handler(
        self, handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None
    ) -> None:
        self._on_exception = handler

    async def shutdown_asyncgens(self) -> None:
        pass

    def close(self) -> None:
        self._closed = True

    # The network: see `sim.network`.

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Watch a listening socket of the simulated network."""
        fd.watched_by(self, callback, args)

    def remove_reader(self, fd: Any) -> bool:
        """Watch it no more."""
        return bool(fd.unwatch())

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], host: str, port: int, *, ssl: Any = None
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        if ssl is not None:
            raise NotImplementedError("TLS is not simulated")
        return await self.process.host.network.connect(self, protocol_factory, host, port)

    async def connect_accepted_socket(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], sock: Any, *, ssl: Any = None, **_: Any
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        protocol = protocol_factory()
        return sock.adopted_by(self, protocol), protocol
