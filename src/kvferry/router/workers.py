"""Several router processes on one port: the kernel spreads connections among them.

The parent, in this module, serves nothing. It starts the workers, forwards the messages between them, replaces workers
that die or hang, and stops all of them at the end. Owns their processes and the last known list of members.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, ClassVar

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.http.config import HttpConfig, InstanceAccess
from kvferry.http.listen import authority, hold
from kvferry.observe.logs import helper_environment
from kvferry.router.config import RouterConfig
from kvferry.router.file_copies import FileCopies
from kvferry.router.worker_messages import (
    LONGEST_LINE,
    Begin,
    Follow,
    HeldTicket,
    KeptNews,
    Members,
    Peers,
    ReleaseTickets,
    Report,
    StopWorker,
    Stored,
    ToWorker,
    WorkerFailed,
    WorkerReady,
    from_worker,
    to_line,
)

logger = logging.getLogger(__name__)

_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.2, 10.0
_LIVED_LONG_S = 60.0
SILENT_S = 30.0
"""A worker reports every second; one that has been silent for so long stands still, and is ended for another."""
START_S = 120.0
"""What it is given to begin to serve, instead."""
_LOOK_S = 0.05
_CLOSE_S = 15.0
"""What a worker is given beyond the grace of its requests."""


@dataclass(eq=False)
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    begun: float
    heard: float
    port: int | None = None

    def tell(self, message: ToWorker) -> None:
        """It may be gone."""
        if not self.writer.is_closing():
            self.writer.write(to_line(message))


def divided(config: RouterConfig) -> RouterConfig:
    """One worker's share of the limits of the whole router."""
    num = config.workers
    return replace(
        config,
        max_in_flight=ceil(config.max_in_flight / num),
        max_waiting=ceil(config.max_waiting / num),
        max_buffered=str(max(config.max_body_bytes, config.max_buffered_bytes // num)),
    )


class KeptByWorkers:
    """The tickets that each worker keeps, of which the parent hears, so that they can be released when it is lost."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, HeldTicket]] = {}
        self._orphans: dict[str, HeldTicket] = {}

    def note(self, number: int, transfer_id: str, ticket: HeldTicket | None) -> None:
        """A worker keeps this ticket now, or (None) no more."""
        here = self._kept.setdefault(number, {})
        if ticket is None:
            here.pop(transfer_id, None)
        else:
            here[transfer_id] = ticket

    def lose(self, number: int) -> None:
        """The worker is lost."""
        self._orphans |= self._kept.pop(number, {})

    def hand_over(self, number: int, now: float) -> dict[str, HeldTicket]:
        """The tickets of lost workers whose time is not over at `now`. They are this worker's until it says that it has
        begun to release them, as it may be lost itself."""
        found = {name: ticket for name, ticket in self._orphans.items() if ticket.until > now}
        self._orphans = {}
        self._kept.setdefault(number, {}).update(found)
        return found


@dataclass
class Workers:
    """Runs `config.workers` worker processes until told to stop."""

    config: RouterConfig
    http: HttpConfig
    access: InstanceAccess
    on_ready: Callable[[dict[str, Any]], None]
    silent_s: ClassVar[float] = SILENT_S
    _secret: str = field(default_factory=secrets.token_hex)
    _running: dict[int, _Worker] = field(default_factory=dict)
    _members: Members | None = None
    _copies: FileCopies = field(default_factory=FileCopies)
    _kept: KeptByWorkers = field(default_factory=KeptByWorkers)
    _told_ready: bool = False
    _failed: str = ""
    _ending: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> int:
        """Run until SIGINT or SIGTERM; a second one ends running requests. Raises `ConfigError` as a router with one
        process does."""
        # Read once: after a change of a file, one worker would know other keys than the next.
        self.http = replace(self.http, api_key=self.http.api_keys(), api_key_file=None)
        self.config, self.http, self.access = self._copies.fix(self.config, self.http, self.access)
        held = [hold(self.http.host, self.http.port)]
        try:
            self.http = replace(self.http, port=held[0].getsockname()[1], reuse_port=True)
            if self.http.admin_port is not None:
                held.append(hold(self.http.admin_host, self.http.admin_port))
                self.http = replace(self.http, admin_port=held[1].getsockname()[1])
            with _signals(self._stop):
                async with asyncio.TaskGroup() as group:
                    kept = [group.create_task(self._keep(number)) for number in range(self.config.workers)]
                    watching = group.create_task(self._watch())
                    await asyncio.wait(kept)
                    watching.cancel()
        finally:
            for one in held:
                one.close()
            self._copies.close()
        if self._failed:
            raise ConfigError(self._failed)
        return 0

    def _stop(self) -> None:
        now = self._ending.is_set()
        self._ending.set()
        for worker in self._running.values():
            worker.tell(StopWorker(now=now))

    async def _keep(self, number: int) -> None:
        """Start one worker after the other, until the end."""
        pause_s = _LEAST_PAUSE_S
        while not self._ending.is_set():
            lived_s = await self._live(number)
            if self._ending.is_set():
                return
            pause_s = _LEAST_PAUSE_S if lived_s > _LIVED_LONG_S else min(2 * pause_s, _MOST_PAUSE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._ending.wait()

    async def _live(self, number: int) -> float:
        """Run one worker from its start to its end; returns how long it ran, in seconds."""
        try:
            worker = await self._start(number)
        except OSError as error:  # no process, memory or descriptor is to be had
            self._cannot_serve(number, f"its process cannot be started: {error.strerror or error}")
            return 0.0
        try:
            await self._listen_to(worker)
        except (ValueError, msgspec.MsgspecError) as error:  # a line too long, or none of ours
            logger.error("worker %d sent an invalid message and is stopped: %s", number, error)
            worker.process.kill()
        finally:
            self._running.pop(number, None)
            await self._reap(worker)
        if not self._ending.is_set():
            logger.error("worker %d is lost (%s); starting another", number, worker.process.returncode)
            self._forget(number)
        return asyncio.get_running_loop().time() - worker.begun

    def _cannot_serve(self, number: int, reason: str) -> None:
        """At the start, this ends the whole router. Later, the other workers continue to serve, and it is tried
        again."""
        if self._told_ready:
            logger.error("worker %d cannot serve; trying again: %s", number, reason)
        elif not self._ending.is_set():
            self._failed = reason
            self._stop()

    async def _start(self, number: int) -> _Worker:
        process, ours = _spawned(number, self._copies.descriptors)
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=LONGEST_LINE)
        except BaseException:
            ours.close()
            process.kill()
            await _ended(process)
            raise
        now = asyncio.get_running_loop().time()
        worker = self._running[number] = _Worker(number, process, reader, writer, now, now)
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
        worker.tell(Begin(number, self._secret, level, divided(self.config), self.http, self.access, self._members))
        self._tell_peers()
        if self._ending.is_set():
            worker.tell(StopWorker())
        return worker

    async def _listen_to(self, worker: _Worker) -> None:
        while line := await _line(worker.reader):
            worker.heard = asyncio.get_running_loop().time()
            match from_worker(line):
                case WorkerReady(port):
                    worker.port = port
                    self._tell_peers()
                    self._release_orphans()
                    self._tell_ready()
                case WorkerFailed(reason):
                    self._cannot_serve(worker.number, reason)
                case KeptNews(transfer_id, ticket):
                    self._kept.note(worker.number, transfer_id, ticket)
                case Report() as report:
                    self._pass_on(worker.number, report)

    def _pass_on(self, number: int, report: Report) -> None:
        if report.members is not None:
            self._members = report.members
            self._running[number].tell(Stored(report.members.version))
        said = Report(number, report.counts, report.placed, report.members, report.followed)
        for other in self._running.values():
            if other.number != number and other.port is not None:
                other.tell(said)
            elif other.number != number and report.members is not None:
                other.tell(Follow(report.members))  # it may take requests before it says that it serves

    def _forget(self, number: int) -> None:
        """The work that it had given to instances is over."""
        self._tell_peers()
        for other in self._running.values():
            other.tell(Report(number))
        self._kept.lose(number)
        self._release_orphans()

    def _release_orphans(self) -> None:
        """One that serves frees at the instances what lost workers kept there for next turns."""
        for worker in self._running.values():
            if worker.port is not None:
                if held := self._kept.hand_over(worker.number, asyncio.get_running_loop().time()):
                    worker.tell(ReleaseTickets(held))
                return

    def _tell_peers(self) -> None:
        ports = {one.number: one.port for one in self._running.values() if one.port is not None}
        peers = Peers(ports, [one.number for one in self._running.values() if one.port is None])
        for worker in self._running.values():
            worker.tell(peers)
            if self._members is not None and worker.number:
                worker.tell(Follow(self._members))

    def _tell_ready(self) -> None:
        ready = [one for one in self._running.values() if one.port is not None]
        if not self._told_ready and len(ready) == self.config.workers:
            self._told_ready = True
            url = f"{self.http.scheme}://{authority(self.http.host, self.http.port)}"
            self.on_ready({"url": url, "workers": [one.process.pid for one in ready]})

    async def _watch(self) -> None:
        """Stop workers that hang, also while all are stopping; runs until it is cancelled."""
        while True:
            await asyncio.sleep(self.silent_s / 10)
            now = asyncio.get_running_loop().time()
            for worker in self._running.values():
                if now - worker.heard > (self.silent_s if worker.port is not None else START_S):
                    logger.error("worker %d has hung for %d s and is stopped", worker.number, now - worker.heard)
                    worker.process.kill()

    async def _reap(self, worker: _Worker) -> None:
        """The worker's end of the socket is closed: it is gone, or will be at once."""
        worker.writer.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await _ended(worker.process)
        except TimeoutError:
            worker.process.kill()
            await _ended(worker.process)


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process to end. Polls, instead of waiting in a thread: where no process can be started, often no
    thread can be either."""
    while process.poll() is None:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(_LOOK_S)


def _spawned(number: int, copies: Iterable[int]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A worker's process, and the parent's end of the socket pair."""
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.router.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno(), *copies],
            env={**os.environ, **helper_environment(f"worker {number}")},
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line; empty at the end."""
    try:
        return await reader.readline()
    except OSError:
        return b""


class _signals:  # noqa: N801 - used as a statement
    """SIGINT and SIGTERM call `stop`."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)

    def __exit__(self, *error: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
