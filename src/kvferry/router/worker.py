"""One of several router processes on one port (`router.workers`): `python -m kvferry.router.worker FD`.

It serves clients like a router with one process. Only the parent ends it, and it ends when the parent is gone.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys

import uvloop

from kvferry.core.errors import ConfigError
from kvferry.http.config import HttpConfig
from kvferry.http.lifecycle import Lifecycle
from kvferry.http.server import HttpServer
from kvferry.observe.logs import LogConfig, log_format_of_parent, set_up_logging
from kvferry.router.app import build_router
from kvferry.router.server import spare_the_collector
from kvferry.router.siblings import Siblings
from kvferry.router.worker_messages import (
    LONGEST_LINE,
    Begin,
    Follow,
    Peers,
    ReleaseTickets,
    Report,
    StopWorker,
    Stored,
    WorkerFailed,
    WorkerReady,
    from_parent,
    to_line,
)
from kvferry.router.worker_turns import LONGEST_MESSAGE

logger = logging.getLogger(__name__)

_REPORT_S = 0.1
_QUIET_REPORTS = 10
"""Reports in a row that are left out while there is nothing new."""


def main() -> None:
    """Be a worker on the socket with this descriptor."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the parent, which tells its workers
    uvloop.run(_run(socket.socket(fileno=int(sys.argv[1]))))


async def _run(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=channel, limit=LONGEST_LINE)
    try:
        begin = from_parent(await reader.readline())
        assert isinstance(begin, Begin)
        set_up_logging(LogConfig(log_level=begin.log_level, log_format=log_format_of_parent()))  # type: ignore[arg-type]
        await RouterWorker(begin, reader, writer).run()
    except ConfigError as error:
        writer.write(to_line(WorkerFailed(str(error))))
        await writer.drain()
    finally:
        writer.close()


class RouterWorker:
    """Two servers of one router: the clients', and one on loopback for the other workers."""

    def __init__(self, begin: Begin, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._begin, self._reader, self._writer = begin, reader, writer
        members = begin.members
        file_text = None if members is None else members.file_text
        self._router = build_router(begin.router, begin.http, begin.access, file_text=file_text)
        self._siblings = Siblings(self._router, begin.number, begin.secret)
        if members is not None:
            self._siblings.follow(members)
        self._siblings.on_change = self._tell_news
        self._siblings.on_kept = lambda news: self._writer.write(to_line(news))
        guard = self._router.guard  # of both, so that no signed request is taken twice
        self._server = HttpServer(self._siblings.routes(), begin.http, Lifecycle("router"), guard)
        own = HttpConfig(port=0, max_body_bytes=LONGEST_MESSAGE)  # limits of clients are not the workers'
        self._own = HttpServer(self._siblings.own_routes(), own, Lifecycle("router"), guard)
        self._listening = {self._server: asyncio.Event(), self._own: asyncio.Event()}

    async def run(self) -> None:
        """Serve until the parent says stop, or is gone."""
        spare_the_collector()
        async with self._router.running(leads=self._siblings.leads) as group, self._siblings:
            own = group.create_task(self._own.run(lambda *_: self._listening[self._own].set()))
            beside = [group.create_task(one) for one in (self._hear(), self._announce(), self._report())]
            try:
                await self._server.run(lambda *_: self._listening[self._server].set())
                await self._end(own)  # what others would keep here, they release themselves
                await self._server.within_grace(self._router.leave())
            finally:
                await self._end(own)
                for task in beside:
                    task.cancel()

    async def _end(self, own: asyncio.Task[None]) -> None:
        self._own.abort()
        await asyncio.wait([own])

    async def _announce(self) -> None:
        for listening in self._listening.values():
            await listening.wait()
        await self._router.health.first_look()
        self._writer.write(to_line(WorkerReady(self._own.ports[0])))

    async def _hear(self) -> None:
        """Handle the parent's messages; when they end, the worker ends."""
        while line := await self._next():
            match from_parent(line):
                case Peers(ports, starting):
                    self._siblings.meet(ports, starting)
                case Report() as report:
                    self._siblings.hear(report)
                case ReleaseTickets(held):
                    self._siblings.release(held)
                case Follow(members):
                    self._siblings.follow(members)
                case Stored(version):
                    self._siblings.stored(version)
                case StopWorker(now):
                    (self._server.abort if now else self._server.stop)()
        self._server.abort()

    async def _next(self) -> bytes:
        try:
            return await self._reader.readline()
        except OSError:
            return b""

    def _tell_news(self) -> bool:
        report = self._siblings.report()
        if report is not None:
            self._writer.write(to_line(report))
        return report is not None

    async def _report(self) -> None:
        num_left_out = 0
        while True:
            await asyncio.sleep(_REPORT_S)
            num_left_out = 0 if self._tell_news() else num_left_out + 1
            if num_left_out > _QUIET_REPORTS:
                num_left_out = 0
                self._writer.write(to_line(self._siblings.last_report))  # so that the parent sees that it works
            await self._writer.drain()


if __name__ == "__main__":
    main()
