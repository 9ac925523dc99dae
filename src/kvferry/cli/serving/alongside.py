"""A fleet that is started for one job, and stopped when that is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from kvferry.cli.serving.attended import AttendedFleet
from kvferry.core.errors import Unavailable
from kvferry.core.keys import fleet_token
from kvferry.fleet.display import Display, make_display
from kvferry.fleet.processes.recipe import recipe_of
from kvferry.fleet.spec.fleet_settings import FleetSettings, fleet_of
from kvferry.models.digest_cache import DigestCache

ENDPOINT = ""
"""The key of the fleet's own endpoint among the URLs of its instances."""

Job = Callable[[Mapping[str, str]], Coroutine[Any, Any, None]]
"""A job that gets the URLs of the instances by name, and the fleet's URL under `ENDPOINT`."""


async def run_alongside(name: str, settings: FleetSettings, job: Job) -> None:
    """Run a fleet and a job beside it, which begins when the fleet is up; whichever is done ends the other. Raises what
    the job raises, and `Unavailable` if the fleet ends first."""
    DigestCache()  # logs what is wrong with it, if anything
    up: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
    token = fleet_token()
    fleet = AttendedFleet(
        fleet_of(name, settings),
        partial(recipe_of, token=token),
        _Quiet(make_display(settings.log), up),
        token=token,
        grace_s=settings.listen.grace_s,
    )
    serving = asyncio.create_task(fleet.run())
    working = asyncio.create_task(_run_when_up(up, job))
    try:
        await asyncio.wait([serving, working], return_when=asyncio.FIRST_COMPLETED)
        if fleet.stop_requested or not working.done():  # instances that end let a job fail
            if await serving in (0, 130):
                raise KeyboardInterrupt
            raise Unavailable("the engine exited; its last log lines give the reason")
        working.result()
    finally:
        working.cancel()
        fleet.stop()
        await asyncio.wait([serving, working])


async def _run_when_up(up: asyncio.Future[Mapping[str, str]], job: Job) -> None:
    await job(await up)


class _Quiet:
    """A display that does not show that requests are answered; it sets `up` instead."""

    def __init__(self, inner: Display, up: asyncio.Future[Mapping[str, str]]) -> None:
        self._inner, self._up = inner, up
        self._urls: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def ready(self, name: str, url: str) -> None:
        self._urls[name] = url
        self._inner.ready(name, url)

    def up(self, url: str) -> None:
        self._inner.close()
        if not self._up.done():
            self._up.set_result({**self._urls, ENDPOINT: url})
