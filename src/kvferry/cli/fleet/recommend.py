"""`kvferry fleet recommend`: how many instances a fleet needs if something else starts them."""

from __future__ import annotations

import asyncio
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.core.keys import http_secret
from kvferry.core.process_exit import run_async, shutdown_signals
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.control.recommender import Recommender, read_recommended
from kvferry.fleet.control.router_client import RouterClient
from kvferry.fleet.places import fleets_folder
from kvferry.fleet.spec.spec_file import SpecFile
from kvferry.http.client.origin import Origin
from kvferry.observe.logs import TEXT, set_up_logging


def add_to(fleet: App) -> None:
    """Give `kvferry fleet` this command."""
    fleet.command(recommend)


def recommend(
    spec: Annotated[
        Path, Parameter(help="The fleet's file (TOML), with a table [scale]. It is followed when it changes.")
    ],
    *,
    router: Annotated[tuple[str, ...], Parameter(help="URL of a router; repeat it for all of them.", negative=())],
) -> int:
    """Say how many instances a fleet needs, for an autoscaler that starts them: the routers' metrics then have
    `kvferry_fleet_desired_instances`.

        kvferry fleet recommend chat.toml --router http://chat-router-0.chat-routers:8000

    `kvferry fleet render` writes a Deployment of it. Nothing is started or stopped; SIGTERM ends the command.
    """
    for url in router:
        Origin.parse(url, "--router")
    set_up_logging(TEXT, "recommender")
    run_async(_recommend(SpecFile(spec, read_recommended), tuple(url.rstrip("/") for url in router)))
    return 0


async def _recommend(spec: SpecFile, routers: tuple[str, ...]) -> None:
    folder = fleets_folder() / "recommended" / spec.fleet.name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}") from error
    ledger = Ledger(folder)
    lease = ledger.try_acquire()
    if lease is None:
        other = ledger.controller
        who = "another process" if other is None else f"process {other.pid}"
        raise ConfigError(f"{who} recommends for {spec.fleet.name} on this machine already; end it first")
    with closing(lease):
        await _run_until_signal(spec, routers, ledger)


async def _run_until_signal(spec: SpecFile, routers: tuple[str, ...], ledger: Ledger) -> None:
    async with RouterClient(http_secret()) as front:
        running = asyncio.create_task(Recommender(spec, routers, ledger, front, SYSTEM_CLOCK).run())
        for number in shutdown_signals():
            asyncio.get_running_loop().add_signal_handler(number, running.cancel)
        with suppress(asyncio.CancelledError):
            await running
