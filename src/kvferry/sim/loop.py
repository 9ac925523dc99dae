"""A virtual clock, and event loops of asyncio that run on it: one for each simulated thread.

`Simulation` owns the time, all timers, and the only random generator, which makes every choice. Time stands still while
callbacks run, and jumps to the next timer when none is ready. The callbacks of one loop run in the order that asyncio
promises. The next of several ready loops is random, and so is the order of timers that are due at the same time. So the
same seed gives the same events, bit for bit, which `EventLog` shows.

A `SimProcess` has one loop for each of its threads. When it crashes, none of its code runs any more, and its
connections break (`sim.network`). There are no real sockets, no files and no threads: executor jobs run at once.
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
"""Number of events that are digested together."""


class Deadlock(Exception):
    """Code waits, and no event is left."""


class EventLog:
    """The events, in order. Owns a digest of all of them, the last ones as text, and all text with `keep`."""

    def __init__(self, *, keep: bool = False) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self.num_events = self._num_digested = 0
        self.last: deque[str] = deque(maxlen=None if keep else _LAST_EVENTS)

    def note(self, now: float, event: str) -> None:
        """Record an event."""
        self.num_events += 1
        self.last.append(f"{now!r} {event}")
        if self.num_events % _LINES_AT_ONCE == 0:
            self._digest_last(_LINES_AT_ONCE)

    def _digest_last(self, number: int) -> None:
        lines = self.last if len(self.last) == number else list(self.last)[len(self.last) - number :]
        self._digest.update("\n".join(lines).encode())
        self._num_digested = self.num_events

    def digest(self) -> str:
        """Equal for two runs exactly if all events were the same, at the same times, in the same order. Call it at the
        same points of both runs, best at the end."""
        if self._num_digested != self.num_events:
            self._digest_last(self.num_events - self._num_digested)
        return self._digest.hexdigest()


class SimProcess:
    """A simulated process on a host; its loops end together. `name` is for the log."""

    min_tasks = 256

    def __init__(self, simulation: Simulation, host: SimHost, name: str) -> None:
        self.simulation, self.host, self.name = simulation, host, name
        self.number = len(simulation.processes)
        self.is_alive = True
        self.stalled_until = 0.0
        self._tasks: dict[SimTask, None] = {}
        self._num_tasks_kept = self.min_tasks
        self.on_end: dict[object, Callable[[], None]] = {}
        """Callbacks at its end, by owner: its connections and listeners."""

        simulation.processes.append(self)

    def add_task(self, task: SimTask) -> None:
        """Keep a task for `SimLoop.create_task` until it is done, and then until many are."""
        self._tasks[task] = None
        if len(self._tasks) > self._num_tasks_kept:
            self._num_tasks_kept = self.min_tasks + 2 * len(self.tasks())

    def tasks(self) -> list[SimTask]:
        """All tasks that are not done, in the order of their start. The others are dropped, so that their unretrieved
        errors are reported to their loop."""
        living = [task for task in self._tasks if not task.done()]
        self._tasks = dict.fromkeys(living)
        return living

    def end_tasks(self) -> None:
        """End all tasks, for `Simulation` at its end."""
        for task in reversed(self.tasks()):
            _close(task)
        self._tasks.clear()

    def thread(self, name: str) -> SimLoop:
        """A new thread, with a running loop."""
        return SimLoop(self.simulation, self, f"{self.name}/{name}")  # type: ignore[abstract]

    def crash(self) -> None:
        """End at once. None of its code runs any more, not even `finally` blocks."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.simulation.note(f"{self.name} ends")
        for end in tuple(self.on_end.values()):
            end()
        self.on_end.clear()

    def stall(self, seconds: float) -> None:
        """Run nothing for this long, like a stopped process, or one on a busy machine."""
        self.stalled_until = max(self.stalled_until, self.simulation.now + seconds)
        self.simulation.note(f"{self.name} stands still for {seconds:.6f} s")


class Timers:
    """The timers of all loops, by their time. Those that are due at the same time come in random order."""

    min_cancelled = 256
    """Cancelled timers are dropped only if there are more than this many."""

    def __init__(self, random: Random) -> None:
        self._draw = random.random
        self._heap: list[tuple[float, float, int, SimHandle]] = []
        self._num_added = self._num_cancelled = 0

    def add(self, when: float, handle: SimHandle) -> None:
        """Add a timer for `SimLoop.call_at`."""
        self._num_added += 1
        heappush(self._heap, (when, self._draw(), self._num_added, handle))

    def on_cancelled(self) -> None:
        """Count a cancelled timer. When most timers are cancelled, these are dropped: some are far in the future."""
        self._num_cancelled += 1
        if self._num_cancelled > self.min_cancelled and 2 * self._num_cancelled > len(self._heap):
            self._heap = [timer for timer in self._heap if not timer[3]._cancelled]
            heapify(self._heap)
            self._num_cancelled = 0

    def next_time(self) -> float | None:
        """The time of the next timer; None if there is none."""
        heap = self._heap
        while heap and heap[0][3]._cancelled:
            heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now: float) -> Iterator[SimHandle]:
        """Remove the timers that are due, and yield their callbacks, which must not run meanwhile."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            handle = heappop(heap)[3]
            if not handle._cancelled:
                yield handle

    def clear(self) -> None:
        """Drop all."""
        self._heap.clear()


class Simulation:
    """Owns the virtual time, the timers, the ready callbacks of all loops, and the random numbers."""

    def __init__(self, seed: int, *, keep_log: bool = False, logs_events: bool = True) -> None:
        self.seed = seed
        self.is_logging = logs_events
        """True if events are logged; False for long simulations."""
        self.random = Random(f"kvferry {seed}")
        self.log = EventLog(keep=keep_log)
        self.now = 0.0
        self.num_callbacks = self.num_tasks = 0
        self.errors: list[dict[str, Any]] = []
        """Unhandled errors, reported by `call_exception_handler`."""
        self.timers = Timers(self.random)
        self._ready: list[SimLoop] = []
        self.processes: list[SimProcess] = []
        self.token_times: dict[str, deque[tuple[float, list[float]]]] = {}
        """(time at which a batch of tokens left the engine, times at which its tokens were computed), by the id of an
        answer whose client measures it."""
        self.after_callbacks: Callable[[], None] | None = None
        """Called each time before the clock advances: for cheap checks."""
        self.after_step: Callable[[EngineCore], None] | None = None
        """Called with an engine between two of its steps."""

    # Time, as `core.clock.Clock`.

    def monotonic(self) -> float:
        """Virtual seconds."""
        return self.now

    def wall(self) -> float:
        """Seconds since the epoch, on the clock of the machine whose code runs."""
        loop = asyncio._get_running_loop()
        return EPOCH_S + self.now + (loop.process.host.clock_s if isinstance(loop, SimLoop) else 0.0)

    def note(self, event: str) -> None:
        """Record an event: see `EventLog`."""
        if self.is_logging:
            self.log.note(self.now, event)

    # Callbacks.

    def add_ready_loop(self, loop: SimLoop) -> None:
        """Add a loop that has become ready."""
        self._ready.append(loop)

    def run_until(self, done: Callable[[], bool], *, until: float = float("inf"), max_callbacks: int = 2**62) -> bool:
        """Run until `done`, which is checked before the clock advances, or until the time `until`. Returns True if it
        stopped after `max_callbacks` instead. Raises `Deadlock` if no event is left, and there is no `until`."""
        last = self.num_callbacks + max_callbacks
        while not self._run_ready(last):
            if done() or self.now >= until:
                return False
            if not self._advance(until):
                raise Deadlock("no event is left, and code is still waiting")
        return True

    def _run_ready(self, last: int) -> bool:
        """Run all ready callbacks, each time the next one of a random loop. Returns True when `num_callbacks` reaches
        `last`. The innermost loop of a simulation, and so inlined."""
        ready, draw, set_running, now = self._ready, self.random.random, asyncio._set_running_loop, self.now
        number = self.num_callbacks
        running: SimLoop | None = None
        try:
            while ready:
                index = int(draw() * num_ready) if (num_ready := len(ready)) > 1 else 0
                loop = ready[index]
                process = loop.process
                if process.stalled_until > now or not process.is_alive:
                    ready[index] = ready[-1]
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
                    index = index if ready[index] is loop else ready.index(loop)
                    ready[index] = ready[-1]
                    ready.pop()
                if number >= last:
                    return True
            return False
        finally:
            self.num_callbacks = number
            set_running(None)

    def _advance(self, until: float) -> bool:
        """Advance the clock to the next timer, and make due callbacks ready. Returns False if there is none."""
        if self.after_callbacks is not None:
            self.after_callbacks()
        next_time = self.timers.next_time()
        if next_time is None and until == float("inf"):
            return False
        if next_time is None or next_time > until:
            self.now = until
            return True
        self.now = max(self.now, next_time)
        for handle in self.timers.pop_due(self.now):
            handle._loop.add_ready(handle)
        return True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Use this simulation's time and randomness for all of kvferry while the body runs. At the end, all its loops
        are dropped."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=None, finalizer=_finalize)
        try:
            with simulated_time(self), simulated_entropy(Random(f"kvferry entropy {self.seed}")):
                try:
                    yield
                finally:
                    self._end_all()
        finally:
            sys.set_asyncgen_hooks(*hooks)

    def _end_all(self) -> None:
        """End all processes, also crashed ones: drop their timers and callbacks, close their coroutines. Code that
        awaits something while it is closed is closed again, a few times; it cannot start tasks or log.
        The newest tasks end first, because older ones own the groups in which they run."""
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
        self.timers.clear()
        self._ready.clear()


def _finalize(generator: AsyncGenerator[Any, Any]) -> None:
    """Close a dropped asynchronous generator, as asyncio does."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        loop.create_task(generator.aclose())


def _close(task: SimTask, max_closes: int = 8) -> None:
    """End the coroutine of a task that never runs again, and which may await something until it is closed for the last
    time. Its errors are ignored: its process has ended."""
    asyncio._set_running_loop(task.get_loop())
    try:
        for _ in range(max_closes):
            with suppress(BaseException):
                task.context.run(task.get_coro().close)
                return
    finally:
        asyncio._set_running_loop(None)


class SimTask(asyncio.Task[Any]):
    """A task whose hash is its number: asyncio iterates over sets of tasks, and their order must not depend on
    addresses."""

    def __init__(self, number: int, coro: Any, loop: SimLoop, name: str | None, context: Context) -> None:
        self.number, self.context = number, context  # first, because asyncio uses the hash at once
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


def _noop() -> None:
    """Do nothing, in place of a cancelled callback."""


class SimHandle(asyncio.TimerHandle):
    """A callback of a loop. Simpler than asyncio's, because callbacks take most of a simulation's time."""

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
            self._callback, self._args = _noop, ()
            self._loop.simulation.timers.on_cancelled()


class SimLoop(asyncio.AbstractEventLoop):
    """The event loop of one simulated thread, with the methods that asyncio and kvferry need; any other raises
    `AttributeError` or `NotImplementedError`, and has to be added."""

    def __init__(self, simulation: Simulation, process: SimProcess, name: str) -> None:
        self.simulation, self.process, self.name = simulation, process, name
        self.ready: deque[SimHandle] = deque()
        """Ready callbacks; the simulation runs them."""
        self.is_listed = self._is_parked = False
        """True if it is in the simulation's list of ready loops."""
        self.wake_s = 0.0
        """Seconds until this thread runs a call from another one."""
        self._pending_calls: deque[SimHandle] = deque()
        self._closed = False
        self._on_exception: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None

    # Running.

    def add_ready(self, handle: SimHandle) -> None:
        """Append a callback to the ready ones."""
        if not self.process.is_alive:
            return
        self.ready.append(handle)
        if not (self.is_listed or self._is_parked):
            self.is_listed = True
            self.simulation.add_ready_loop(self)

    def park(self) -> None:
        """Run nothing, because the process is stalled, or has ended."""
        self.is_listed = False
        if not self.process.is_alive:
            self.ready.clear()
            return
        self._is_parked = True
        until = self.process.stalled_until
        wake = SimHandle(until, self._unpark, (), self.simulation_loop, Context())
        self.simulation.timers.add(until, wake)

    @property
    def simulation_loop(self) -> SimLoop:
        """The loop for events from outside of this one's process."""
        return self.process.host.network.loop

    def _unpark(self) -> None:
        self._is_parked = False
        if self.ready and self.process.is_alive:
            self.is_listed = True
            self.simulation.add_ready_loop(self)

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
        self._pending_calls.append(SimHandle(0.0, callback, args, self, copy_context() if context is None else context))
        self.call_later(self.wake_s, self._run_pending, context=Context())
        return self._pending_calls[-1]

    def _run_pending(self) -> None:
        """Run the oldest pending call, for any timer."""
        self.add_ready(self._pending_calls.popleft())

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        simulation = self.simulation  # as `call_at`, without another frame
        handle = SimHandle(simulation.now + delay, callback, args, self, copy_context() if context is None else context)
        if self.process.is_alive:
            simulation.timers.add(handle._when, handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        handle = SimHandle(when, callback, args, self, copy_context() if context is None else context)
        if self.process.is_alive:
            self.simulation.timers.add(when, handle)
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
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # tasks of crashed processes are always pending
        self.process.add_task(task)
        return task

    def get_task_factory(self) -> None:
        return None

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        """Run the function now: an executor's threads would take no virtual time."""
        done: asyncio.Future[Result] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the waiter's
            done.set_exception(error)
        return done

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record an unhandled error, and pass it to the handler if there is one."""
        self.simulation.errors.append({**context, "loop": self.name})
        self.simulation.note(f"{self.name} has an unhandled error: {context.get('message')}")
        if self._on_exception is not None:
            self._on_exception(self, context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        pass  # `call_exception_handler` has recorded it

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
        fd.add_watcher(self, callback, args)

    def remove_reader(self, fd: Any) -> bool:
        """Stop watching it."""
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
        return sock.attach(self, protocol), protocol
