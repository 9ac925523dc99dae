"""The process of a rank other than rank 0: executes rank 0's commands, and exits with it.

It was started by rank 0 (`main`), or by a user on this machine or another one (`run_rank`).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue

import msgspec
from transformers.utils import logging as transformers_logging

from kvferry.connectors.report_codec import encode_report
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConnectorLost, LeakError, PeerLost, ProtocolError
from kvferry.core.messages.wire import Pipe
from kvferry.core.runtime.threads import Thread
from kvferry.core.settings.environment import AUTH_TOKEN
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.executor import group
from kvferry.engine.executor.failure_wait import failure_wait_s
from kvferry.engine.executor.link import Link, join
from kvferry.engine.executor.messages import (
    Check,
    Checked,
    Close,
    Command,
    Done,
    GetStatistics,
    LoadModel,
    ModelLoaded,
    OpenCache,
    Opened,
    Ping,
    Pong,
    Proceed,
    RankFailed,
    RankStep,
    Reported,
    Started,
    Statistics,
    TableAnswer,
    TableRequest,
    rank_end,
)
from kvferry.engine.executor.rank_process import LOOPBACK
from kvferry.engine.executor.store import RendezvousStore
from kvferry.engine.model.rank_placement import RankPlacement
from kvferry.engine.worker import Worker
from kvferry.observe.logs import follow_parent

logger = logging.getLogger(__name__)

JOIN_S = 300.0
"""Max seconds for which a rank that rank 0 has not started tries to reach it."""


class _Woken:
    """Queued in place of a command: the worker side has something to report."""


class _Gone:
    """Queued in place of a command: rank 0 is gone."""


class Inbox:
    """Received commands. A thread reads the pipe continuously, so that the end of rank 0 is detected at once."""

    exit_delay_s = 3.0
    """Max seconds for this process to exit by itself once rank 0 is gone or has sent `Close`."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._queue: SimpleQueue[Command | _Woken | _Gone] = SimpleQueue()  # bounded: each command waits for its answer
        self._stored: SimpleQueue[TableAnswer | None] = SimpleQueue()  # bounded: one answer a request
        self._request_lock = threading.Lock()
        self._is_woken = threading.Event()
        Thread(self._read, name="kvferry-rank-inbox").start()

    def take(self, timeout_s: float | None = None) -> Command | _Woken | _Gone:
        """Wait for the next command, by default without a limit, since rank 0 may be idle for a long time. Raises
        `Empty` if none came in time."""
        item = self._queue.get(timeout=timeout_s)
        if isinstance(item, _Woken):
            self._is_woken.clear()
        return item

    def request_store(self, request: TableRequest) -> TableAnswer:
        """Send a request to rank 0's table. May be called from any thread. Raises `PeerLost`."""
        with self._request_lock:
            self._pipe.send(request)
            answer = self._stored.get()
            if answer is None:
                self._stored.put(None)
                raise PeerLost("rank 0 is gone")
            return answer

    def wake(self) -> None:
        """Put a `_Woken` into the queue unless it has one. May be called from any thread."""
        if not self._is_woken.is_set():
            self._is_woken.set()
            self._queue.put(_Woken())

    def wait_for_proceed(self, timeout_s: float) -> bool:
        """True if rank 0 has left the step too, and so has run the same collectives. Otherwise it may be blocked in a
        collective that this rank never reaches, and that fails when this process exits."""
        end = SYSTEM_CLOCK.monotonic() + timeout_s
        is_woken = False
        try:
            while isinstance(command := self.take(max(0.0, end - SYSTEM_CLOCK.monotonic())), _Woken):
                is_woken = True
        except Empty:
            return False
        if is_woken:
            self.wake()  # for the reports of the wake-ups taken above
        return isinstance(command, Proceed)

    def _read(self) -> None:
        try:
            command: Command | TableAnswer | Ping | _Gone = self._pipe.receive()
            while not isinstance(command, Close):
                match command:
                    case TableAnswer():
                        self._stored.put(command)
                    case Ping():
                        self._pipe.send(Pong())
                    case _:
                        self._queue.put(command)
                command = self._pipe.receive()
        except (PeerLost, ProtocolError):
            command = _Gone()
        self._stored.put(None)
        self._queue.put(command)
        threading.Event().wait(self.exit_delay_s)  # then exit: the process may be in a step that the others have left
        os._exit(1)


class RankProcessMain:
    """Runs one rank until it exits."""

    def __init__(self, link: Link, auth_token: str) -> None:
        self._link, self._pipe, self._inbox, self._auth_token = link, link.pipe, Inbox(link.pipe), auth_token
        self._worker: Worker | None = None
        self._load: LoadModel | None = None

    def run(self) -> int:
        """Execute commands until `Close`, the end of rank 0, or an error on this rank. Returns the exit code."""
        try:
            while self._execute(self._inbox.take()):
                pass
            return 0
        except PeerLost:
            return 1
        except Exception as error:
            logger.debug("this rank ends", exc_info=True)
            with suppress(PeerLost):
                self._pipe.send(RankFailed(type(error).__name__, str(error) or repr(error)))
            return 1
        finally:
            if self._worker is not None:
                self._worker.close()

    def _execute(self, command: Command | _Woken | _Gone) -> bool:
        """Execute one command. Returns False after the last one."""
        match command:
            case LoadModel():
                self._load_model(command)
            case Close() | _Gone():
                return False
            case _:
                if self._worker is None:
                    raise ProtocolError(f"{type(command).__name__} came before LoadModel")
                self._serve(command, self._worker)
        return True

    def _load_model(self, load: LoadModel) -> None:
        self._load = load
        transformers_logging.set_verbosity_error()  # rank 0 logs the same
        placement, store = RankPlacement.of_rank(load.rank, load.config), RendezvousStore(self._inbox.request_store)
        self._pipe.send(Started())
        with group.rendezvous(placement, placement.choose_device(load.config.device), store, self._link.address):
            self._worker = Worker(load.config, placement, lambda phase, share: None)
        self._pipe.send(ModelLoaded(self._worker.model.fingerprint, self._worker.max_num_blocks()))

    def _serve(self, command: OpenCache | RankStep | Proceed | GetStatistics | Check | _Woken, worker: Worker) -> None:
        match command:
            case OpenCache(num_blocks):
                address = worker.open(num_blocks, self._transfer(), self._auth_token)
                worker.on_report(self._inbox.wake)
                self._pipe.send(Opened(address))
            case RankStep():
                self._step(command, worker)
            case GetStatistics():
                self._pipe.send(Statistics(worker.statistics()))
            case Check():
                self._pipe.send(Checked(_leak(worker)))
            case _Woken():
                if report := worker.poll():
                    self._pipe.send(Reported(encode_report(report)))

    def _transfer(self) -> KVTransferConfig | None:
        """The transfer configuration, with this rank's own address if rank 0 may be on another machine."""
        assert self._load is not None
        transfer = self._load.transfer
        if transfer is None or self._load.config.ranks_at is None:
            return transfer
        return msgspec.structs.replace(transfer, kv_ip=self._link.address)

    def _step(self, step: RankStep, worker: Worker) -> None:
        begun_at = SYSTEM_CLOCK.monotonic()
        try:
            worker.step(step.inputs, step.plans, step.first_plan, step.num_late)
        except ConnectorLost:
            raise
        except Exception as error:
            logger.exception("this rank failed in a step")
            failure = f"{type(error).__name__}: {error}"
            self._pipe.send(Done(encode_report(worker.poll()), worker.num_begun, failure))
            if not self._inbox.wait_for_proceed(failure_wait_s(SYSTEM_CLOCK.monotonic() - begun_at)):
                raise
        else:
            self._pipe.send(Done(encode_report(worker.poll()), worker.num_begun))


def _leak(worker: Worker) -> str:
    try:
        worker.check()
    except LeakError as error:
        return str(error)
    return ""


def main(descriptor: int) -> int:
    """Serve rank 0, which has started this process, at the other end of the pipe. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 acts on a Ctrl-C
    follow_parent()
    return RankProcessMain(Link(rank_end(descriptor), "rank 0", LOOPBACK), os.environ.get(AUTH_TOKEN, "")).run()


def run_rank(address: str, auth_token: str, timeout_s: float = JOIN_S) -> int:
    """Join rank 0 at `address`, `HOST:PORT`, and serve it until it ends. Returns the exit code. Raises `ConfigError` if
    rank 0 refuses this rank, and `RankLost` if it cannot be reached."""
    group.require_no_process_group()
    logger.info("waiting up to %g s for the instance at %s", timeout_s, address)
    link = join(address, auth_token, timeout_s)
    logger.info("this rank has joined %s", link.name)
    code = RankProcessMain(link, auth_token).run()
    logger.info(
        "the instance has ended, and this rank with it" if code == 0 else "this rank failed; the instance says why"
    )
    return code
