"""Rank 0's view of the other ranks and their losses.

Owns the connections to the ranks, the processes that rank 0 has started itself, and the reasons of losses. A thread for
each rank detects its end at once.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError, KvferryError, PeerLost, ProtocolError, RankLost, UnsupportedModel
from kvferry.core.runtime.threads import Thread
from kvferry.core.settings.environment import AUTH_TOKEN
from kvferry.engine.executor.link import Link
from kvferry.engine.executor.messages import (
    Answer,
    Close,
    Command,
    Done,
    Message,
    Ping,
    Pong,
    Proceed,
    RankFailed,
    RankStep,
    Reported,
    TableRequest,
    engine_end,
)
from kvferry.engine.executor.store import StoreTable
from kvferry.engine.model.rank_placement import default_num_threads
from kvferry.observe.logs import helper_environment

CONSEQUENCE = 2
"""Minimum weight of a loss that may be the consequence of another one (`Losses.add`)."""
PING_INTERVAL_S = 5.0
"""Seconds between two pings of a rank."""
LOOPBACK = "127.0.0.1"
_USER_ERRORS = {kind.__name__: kind for kind in (ConfigError, UnsupportedModel)}
A = TypeVar("A", bound=Answer)


class Losses:
    """The reasons why ranks were lost. A rank that fails makes others fail, so the error that is raised is the loss
    that is closest to the cause."""

    cause_s = 2.0
    """Maximum seconds by which the cause of a loss may become known later than its consequences."""

    def __init__(self) -> None:
        self.on_loss: Callable[[], None] = lambda: None
        self._first, self._cause = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._reasons: list[tuple[int, KvferryError]] = []

    def add(self, weight: int, error: KvferryError) -> None:
        """Record a loss. `weight`: how far the loss is from the cause, from 0; from `CONSEQUENCE` on, it may be the
        consequence of another loss."""
        with self._lock:
            self._reasons.append((weight, error))
        self._first.set()
        if weight < CONSEQUENCE:
            self._cause.set()
        self.on_loss()

    def require_none(self) -> None:
        """If a rank is lost, raise the reason. Waits up to `cause_s` seconds for the cause to become known."""
        if self._first.is_set():
            self._cause.wait(self.cause_s)
            with self._lock:
                raise min(self._reasons, key=lambda reason: reason[0])[1]

    def wait(self, seconds: float) -> None:
        """Raise a loss that is known, or becomes known within these seconds."""
        self._first.wait(seconds)
        self.require_none()

    def raise_cause(self, error: Exception) -> None:
        """Raise the loss that explains an error of rank 0, if there is one. Waits up to `cause_s` seconds for it to
        become known."""
        try:
            self.wait(self.cause_s)
        except KvferryError as cause:
            raise cause from error
        if "timed out" in str(error).lower():  # gloo's message
            raise RankLost(f"a rank did not take part in time: {error}") from error


class Process(Protocol):
    """The part of `subprocess.Popen` that is used."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def returncode(self) -> int | None:
        """Its exit code, minus the number of the signal that ended it; None while it is not known to have ended."""

    def wait(self, timeout: float) -> int:
        """Wait for its end, and return its exit code. Raises `subprocess.TimeoutExpired`."""

    def kill(self) -> None:
        """Send it SIGKILL."""


StartProcess = Callable[[int, int, str], Process]
"""Starts the process of a rank. Called with the rank's number, the descriptor of its pipe, and the instance's
secret."""


def start_rank(rank: int, auth_token: str, start: StartProcess | None = None) -> tuple[Link, Process]:
    """Start the process of a rank on this machine. The process waits for `LoadModel`. `start`: `start_process` by
    default."""
    own_end, rank_end = socket.socketpair()
    with own_end, rank_end:
        process = (start or start_process)(rank, rank_end.fileno(), auth_token)
        return Link(engine_end(own_end.detach()), f"process {process.pid}", LOOPBACK), process


class RankProcess:
    """The process of one other rank. The engine's thread calls the methods, but for the listening thread's own ones and
    `ping`."""

    max_missed_pongs = 6
    """Maximum number of pings in a row that a rank may leave unanswered (`RankWatch`)."""
    exit_s = 10.0
    """Maximum seconds to wait for the exit of a process whose pipe has ended or that was killed."""

    def __init__(
        self,
        rank: int,
        link: Link,
        process: Process | None,
        losses: Losses,
        table: StoreTable,
        answers: SimpleQueue[Answer | None] | None = None,
    ) -> None:
        """`link`: the connection to a rank that waits for `LoadModel`. `process`: the process of the rank, if this
        process has started it. `table`: the store through which the ranks find each other. `answers`: queue of the
        rank's answers."""
        self.rank, self._losses, self._table = rank, losses, table
        self.on_report: Callable[[int, bytes], None] = lambda rank, report: None
        self._answers = answers or SimpleQueue[Answer | None]()  # bounded: one answer a command
        self._is_ending = False
        self._lock = threading.Lock()  # for `_has_left`, `_has_failed`, and the order of `RankStep` and `Proceed`
        self._has_left = self._has_failed = self._has_reported_failure = False
        self._num_missed_pongs = 0
        self._pipe, self._name, self._process = link.pipe, link.name, process
        self._listener = Thread(self._listen, name=f"kvferry-rank-{rank}")
        self._listener.start()

    @property
    def pid(self) -> int | None:
        """Its process id, if this process has started it."""
        return None if self._process is None else self._process.pid

    def send(self, command: Command) -> None:
        """Send a command. Raises `RankLost` if the rank is gone or does not read."""
        try:
            with self._lock:
                if isinstance(command, RankStep):
                    self._has_left = self._has_failed = False
                self._pipe.send(command)
        except PeerLost as error:
            self._losses.wait(self.exit_s)
            raise RankLost(f"rank {self.rank} does not accept commands: {error}") from error

    def leave_step(self) -> None:
        """Record that rank 0 has left the step, after as many collective operations as any rank that failed in it. A
        rank that has failed in it, or still fails, gets a `Proceed`."""
        with self._lock:
            self._has_left = True
            self._proceed()

    def answer(self, kind: type[A], timeout_s: float) -> A:
        """Wait for the answer to the last command. Raises `RankLost`, or the `ConfigError` or `UnsupportedModel` with
        which the rank failed."""
        try:
            answer = self._answers.get(timeout=timeout_s)
        except Empty:
            raise RankLost(f"rank {self.rank} ({self._name}) did not answer within {timeout_s:g} s") from None
        if answer is None:
            self._losses.wait(self.exit_s)
            raise RankLost(f"rank {self.rank} is gone")
        if not isinstance(answer, kind):
            raise RankLost(f"rank {self.rank} answered {type(answer).__name__}; {kind.__name__} was expected")
        return answer

    def ping(self, interval_s: float) -> None:
        """Send a ping. If the rank has left too many pings unanswered, also record its loss. `interval_s`: seconds
        between two pings, for the message. From any thread."""
        if self._num_missed_pongs == self.max_missed_pongs:
            pings = f"{self.max_missed_pongs} pings, one every {interval_s:g} s"
            self._losses.add(0, RankLost(f"rank {self.rank} ({self._name}) hangs: it did not answer {pings}"))
        self._num_missed_pongs += 1
        with suppress(PeerLost):  # the listening thread records it
            self._pipe.send(Ping())

    def wake_waiting(self) -> None:
        """End a wait in `answer`, because a rank is lost."""
        self._answers.put(None)

    # The end.

    def request_exit(self) -> None:
        """Request the exit of the rank."""
        self._is_ending = True
        with suppress(PeerLost), self._lock:
            self._pipe.send(Close())

    def end(self, deadline: float) -> None:
        """Wait for the rank to exit until `deadline`, a time of the monotonic clock. If it has not exited then, kill
        its process if this process has started it, or close the connection."""
        remaining_s = max(0.1, deadline - SYSTEM_CLOCK.monotonic())
        if self._process is None:
            self._listener.join(remaining_s)
            self._pipe.shut_down()
        else:
            self._end_process(self._process, remaining_s)
        self._listener.join(self.exit_s)
        self._pipe.close()

    def _end_process(self, process: Process, timeout_s: float) -> None:
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # in an uninterruptible call to a disk or a driver
                process.wait(self.exit_s)

    # The listening thread.

    def _listen(self) -> None:
        try:
            while True:
                self._on_message(self._pipe.receive())
        except PeerLost:
            self._record_exit()
        except ProtocolError as error:
            self._losses.add(1, RankLost(f"rank {self.rank}: {error}"))

    def _on_message(self, message: Message) -> None:
        match message:
            case Reported(report):
                self.on_report(self.rank, report)
            case Pong():
                self._num_missed_pongs = 0
            case TableRequest():
                with suppress(PeerLost):  # detected by the next `receive`
                    self._pipe.send(self._table.answer(message))
            case RankFailed(kind, text):
                self._has_reported_failure = True
                error: KvferryError
                if kind in _USER_ERRORS:
                    error = _USER_ERRORS[kind](text)
                else:
                    error = RankLost(f"rank {self.rank} ({self._name}) failed: {kind}: {text}")
                self._losses.add(1 if kind in _USER_ERRORS else CONSEQUENCE, error)
            case _:
                if isinstance(message, Done) and message.failure:
                    with self._lock:
                        self._has_failed = True
                        self._proceed()
                self._answers.put(message)  # last, since the receiver of the answer may send the next step at once

    def _proceed(self) -> None:
        if self._has_left and self._has_failed:
            self._has_failed = False
            with suppress(PeerLost):  # the listening thread records it
                self._pipe.send(Proceed())

    def _record_exit(self) -> None:
        if self._process is None:
            cause = "closed its connection: its process has ended, or its machine is gone"
            is_cause = not self._has_reported_failure
        else:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self.exit_s)
            cause = _describe_exit(self._process.returncode)
            is_cause = self._process.returncode != 1  # it sends `RankFailed` before that, or has lost rank 0
        if not self._is_ending:
            weight = 0 if is_cause else CONSEQUENCE + 1
            self._losses.add(weight, RankLost(f"rank {self.rank} ({self._name}) {cause}"))


class RankWatch:
    """Pings the other ranks periodically, so that a rank that hangs is also detected while there is no step. Owns the
    thread that pings. Pings are counted, not seconds, so that a pause of the whole machine is not a loss."""

    def __init__(self, ranks: Sequence[RankProcess], interval_s: float = PING_INTERVAL_S) -> None:
        self._ranks, self._interval_s, self._has_ended = ranks, interval_s, threading.Event()
        self._thread = Thread(self._ping_all, name="kvferry-rank-watch")
        self._thread.start()

    def end(self) -> None:
        """Stop the pings."""
        self._has_ended.set()
        self._thread.join(RankProcess.exit_s)

    def _ping_all(self) -> None:
        while not self._has_ended.wait(self._interval_s):
            for rank in self._ranks:
                rank.ping(self._interval_s)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def start_process(rank: int, pipe: int, auth_token: str) -> Process:
    """Start a rank in a new Python process. This is a `StartProcess`."""
    environment = {
        **os.environ,
        AUTH_TOKEN: auth_token,
        **helper_environment(f"rank-{rank}"),
        "OMP_NUM_THREADS": str(default_num_threads()),  # for all ranks: each takes its share
        "PYTHONPATH": os.pathsep.join(
            path for path in sys.path if path
        ),  # so that connectors of other packages are found
    }
    command = [sys.executable, "-m", "kvferry.engine.executor.rank_start", str(pipe)]
    with _sigint_blocked():
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=(pipe,))


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT for processes that are started in the body, so that Ctrl-C cannot end them before they ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
