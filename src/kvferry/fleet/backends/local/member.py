"""One member on this machine, while a controller runs: reads its messages and its log, and detects its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress

import msgspec

from kvferry.core.errors import ProtocolError
from kvferry.fleet.backends.local.child import ChildProcess
from kvferry.fleet.backends.local.folder import FileTail, MemberFolder, MemberRecord
from kvferry.fleet.control.backend import Member, MemberState, Watcher
from kvferry.fleet.processes.exit_reason import Ended, LogTail
from kvferry.fleet.processes.health_check import serves
from kvferry.fleet.processes.process import ExternalServer
from kvferry.fleet.processes.ready import InstanceReady, StartProgress, start_messages

logger = logging.getLogger(__name__)

_LOOK_STARTING_S, _LOOK_SERVING_S = 0.02, 0.2
"""Seconds between reads of its files."""


class LocalMember:
    """Owns the process, once it is known, and the reading ends of the member's files. `changed`: called when its state
    changes. `watch` runs until the member has ended."""

    kill_timeout_s = 5.0
    """Maximum seconds to wait for the end of a killed process."""
    drain_s = 1.0
    """Seconds in which the rest of its process group must finish after its end."""
    keep_interval_s = 2.0
    """Seconds between checks that its folder still exists."""
    ask_interval_s = 0.25

    def __init__(
        self,
        folder: MemberFolder,
        record: MemberRecord,
        foreign: ExternalServer | None,
        watcher: Watcher,
        changed: Callable[[], None],
    ) -> None:
        self.folder, self.record, self._foreign, self._watcher = folder, record, foreign, watcher
        self.child: ChildProcess | None = None
        self.ended: Ended | None = None
        self.is_stopping = False
        self.settled = asyncio.Event()
        """Set once the member has a process, or is known to get none."""
        self.gone = asyncio.Event()
        """Set when none of its processes runs any more."""
        self._log_tail = LogTail()
        self._changed = changed
        self._log, self._messages = FileTail(folder.log, bounded=True), FileTail(folder.messages)
        self._frames = start_messages()
        self._is_serving = False

    @property
    def view(self) -> Member:
        """The member as the controller sees it."""
        record, ended = self.record, self.ended
        state = MemberState.SERVING if self._is_serving else MemberState.STARTING
        url = record.url if self._is_serving else ""
        return Member(
            name=record.name,
            role=record.role,
            revision=record.revision,
            unit=record.unit,
            state=state if ended is None else MemberState.ENDED,
            url=url,
            health_url=record.health_url or (url if record.role != "router" else ""),
            bootstrap_port=record.bootstrap_port,
            reason="" if ended is None else ended.reason,
            is_misconfigured=ended is not None and ended.is_misconfigured,
            last_lines=tuple(self._log_tail.lines) if ended is not None else (),
        )

    def adopt(self) -> None:
        """Adopt a member that an earlier controller started; its earlier log lines are not shown again."""
        self._log.skip()
        self._is_serving = bool(self.record.url) and not self.record.is_foreign

    def assign(self, **changes: object) -> None:
        """Change its record."""
        self.record = msgspec.structs.replace(self.record, **changes)
        try:
            self.folder.write(self.record)
        except OSError as error:
            logger.warning("the next controller will not know that %s is %s: %s", self.record.name, changes, error)

    def set_process(self, child: ChildProcess | None) -> None:
        """Set its process; None: it gets none, or has none any more."""
        self.child = child
        if child is None:
            self.gone.set()
        self.settled.set()

    async def watch(self, child: ChildProcess) -> None:
        """Read its messages and its log, until it and its whole group have ended. If this is cancelled, the member
        keeps running unwatched."""
        try:
            await self._follow(child)
        except asyncio.CancelledError:
            child.detach()
            self._close()
            raise
        except ProtocolError as error:
            self.ended = Ended(f"its start messages cannot be read: {error}")
        except Exception:
            # Any error in one member's output or display ends only the watch of this member.
            logger.exception("what %s writes cannot be read; it is ended", self.record.name)
            self.ended = self.ended or Ended("what it wrote could not be read")
        child.kill()
        await child.wait(self.kill_timeout_s)
        child.reap_group()
        self._close()
        self.gone.set()
        self._changed()

    async def _follow(self, child: ChildProcess) -> None:
        loop = asyncio.get_running_loop()
        asks_at, keeps_at = 0.0, loop.time() + self.keep_interval_s
        while not await child.wait(_LOOK_SERVING_S if self._is_serving else _LOOK_STARTING_S):
            self._read()
            if loop.time() >= keeps_at:
                with suppress(OSError):  # no free descriptor, or it has just ended
                    self.folder.keep(self.record, child.pid)
                keeps_at = loop.time() + self.keep_interval_s
            if self.record.is_foreign and not self._is_serving and loop.time() >= asks_at:
                if await serves(self.record.url):
                    self._mark_serving(InstanceReady(self.record.url))
                asks_at = loop.time() + self.ask_interval_s
        await self._drain_group(child)
        self._read(to_the_end=True)
        self.ended = self._exit_cause(child)

    async def _drain_group(self, child: ChildProcess) -> None:
        """Processes of its group may finish their work, but not for long."""
        deadline = asyncio.get_running_loop().time() + self.drain_s
        while asyncio.get_running_loop().time() < deadline and _group_lives(child.pid):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_STARTING_S)

    async def stop(self, grace_s: float) -> None:
        """End it; returns when it is gone. If its process is being started, waits for that first."""
        self.is_stopping = True
        await self.settled.wait()
        if self.child is not None and not self.gone.is_set():
            if grace_s:
                self.child.terminate()
            if not grace_s or not await self._is_gone(grace_s):
                self.child.kill()
                await self._is_gone(self.kill_timeout_s)

    async def _is_gone(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self.gone.wait()
        except TimeoutError:
            return False
        return True

    def _close(self) -> None:
        self._log.close()
        self._messages.close()

    # Its messages and its log.

    def _read(self, *, to_the_end: bool = False) -> None:
        for line in self._log.lines(to_the_end=to_the_end):
            self._on_line(line.decode(errors="replace").rstrip())
        for chunk in self._messages.chunks():
            for message in self._frames.feed(chunk):
                match message:
                    case StartProgress(progress, what):
                        self._watcher.progress(self.record.name, what, progress)
                    case InstanceReady() if not self._is_serving:
                        self._mark_serving(message)

    def _on_line(self, text: str) -> None:
        self._log_tail.add(text, has_served=self._is_serving)
        self._watcher.line(self.record.name, text)
        if not self._is_serving:
            progress = None if self._foreign is None else self._foreign.progress_of(text)
            if progress is not None:
                self._watcher.progress(self.record.name, progress.what, progress.progress)

    def _mark_serving(self, ready: InstanceReady) -> None:
        self._is_serving = True
        self.assign(url=ready.url, health_url=ready.health_url)
        self._watcher.ready(self.record.name, ready.url)
        self._changed()

    def _exit_cause(self, child: ChildProcess) -> Ended:
        """The reason of its end."""
        code = child.returncode
        if code is None:
            cause = "ended"
        elif code < 0:
            cause = f"was killed by {signal.Signals(-code).name}"
        else:
            cause = f"ended with exit code {code}"
        return self._log_tail.explain(code, cause, has_served=self._is_serving)


def _group_lives(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
