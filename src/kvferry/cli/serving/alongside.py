"""Runs a fleet for one job, and stops the fleet when the job is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from kvferry.cli.serving.attended import AttendedFleet
from kvferry.cli.terminal.display import open_display
from kvferry.cli.terminal.summary import summary_of
from kvferry.core.errors import Unavailable
from kvferry.core.keys import fleet_token
from kvferry.fleet.display import Display
from kvferry.fleet.processes.recipe import recipe_of
from kvferry.fleet.spec.fleet_settings import FleetSettings, fleet_of
from kvferry.fleet.spec.fleet_spec import DesiredFleet
from kvferry.models.digest_cache import DigestCache
from kvferry.observe.logs import set_up_logging

ENDPOINT = ""
"""The key of the fleet's own endpoint among the URLs of its instances."""

Job = Callable[[Mapping[str, str]], Coroutine[Any, Any, None]]
"""A job that gets the URLs of the instances by name, and the fleet's URL under `ENDPOINT`."""


async def run_alongside(name: str, settings: FleetSettings, job: Job) -> None:
    """Run a fleet and a job of command `name`. The job begins when the fleet is up. When one of them ends, the other
    one is ended. Raises the exceptions of the job, and `Unavailable` if the fleet ends first."""
    display = open_display(settings.log, summary_of(name, settings.listen, settings.access, has_block=False), name)
    try:
        await _run(fleet_of(name, settings), settings.listen.grace_s, job, display)
    finally:
        display.close()
        set_up_logging(settings.log, name)


async def _run(desired: DesiredFleet, grace_s: float, job: Job, display: Display) -> None:
    DigestCache()  # logs problems with it once, for all processes
    up: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
    token = fleet_token()
    watched = _Watched(display, up)
    fleet = AttendedFleet(
        desired,
        partial(recipe_of, token=token),
        watched,
        token=token,
        grace_s=grace_s,
    )
    serving = asyncio.create_task(fleet.run())
    working = asyncio.create_task(_run_when_up(up, job))
    try:
        await asyncio.wait([serving, working], return_when=asyncio.FIRST_COMPLETED)
        if fleet.stop_requested or not working.done():  # the job fails because the instances have ended
            if await serving in (0, 130):
                raise KeyboardInterrupt
            raise Unavailable(watched.reason or "the engine exited; --verbose shows its log")
        working.result()
    finally:
        working.cancel()
        fleet.stop()
        await asyncio.wait([serving, working])


async def _run_when_up(up: asyncio.Future[Mapping[str, str]], job: Job) -> None:
    await job(await up)


class _Watched:
    """A display that also sets `up` when the fleet is up, and stays open after the fleet has ended. `reason`: the error
    that ended the fleet; empty: there was none."""

    def __init__(self, inner: Display, up: asyncio.Future[Mapping[str, str]]) -> None:
        self._inner, self._up = inner, up
        self._urls: dict[str, str] = {}
        self.reason = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def ready(self, name: str, url: str) -> None:
        self._urls[name] = url
        self._inner.ready(name, url)

    def up(self, url: str) -> None:
        self._inner.up(url)
        if not self._up.done():
            self._up.set_result({**self._urls, ENDPOINT: url})

    def error(self, text: str) -> None:
        self.reason = text

    def stopping(self, text: str) -> None:
        """Ignored: the job is done."""

    def close(self) -> None:
        """Does nothing: `run_alongside` closes the display."""
