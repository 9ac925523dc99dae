"""`kvferry fleet recommend`: publishes how many instances a fleet needs, for another program that starts them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.dependencies import require_library
from kvferry.core.errors import ConfigError
from kvferry.core.folders.state_folder import state_folder
from kvferry.core.keys import http_secret
from kvferry.core.runtime.process_exit import shutdown_signals
from kvferry.core.runtime.threads import run_async
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.control.recommender import Recommender, read_recommended
from kvferry.fleet.control.router_client import RouterClient
from kvferry.fleet.spec.fleet_spec import DesiredFleet
from kvferry.fleet.spec.spec_file import SpecFile
from kvferry.http.client.origin import Origin
from kvferry.observe.logs import TEXT, set_up_logging


def add_to(fleet: App) -> None:
    """Give `kvferry fleet` this command."""
    fleet.command(recommend)


def recommend(
    spec: Annotated[
        Path, Parameter(help="The fleet's file (TOML), with a table [scale]. Changes to it are carried out.")
    ],
    *,
    router: Annotated[tuple[str, ...], Parameter(help="URL of a router; repeat it for all of them.", negative=())],
    patch_replicas: Annotated[
        bool,
        Parameter(
            help="Set the replicas of the Deployments that `kvferry fleet render` wrote to these counts. Of several"
            " such processes, the one that holds the fleet's Lease does so.",
            negative=(),
        ),
    ] = False,
) -> int:
    r"""Compute how many instances a fleet needs, for an autoscaler that starts them. The metrics of the routers then
    have `kvferry_fleet_desired_instances`.

    In the cluster of a fleet, beside its routers:

        kvferry fleet recommend chat.toml \
          --router http://chat-router-0.chat-routers:8000

    `kvferry fleet render` writes a Deployment of this command. SIGTERM ends the command; the last counts stay in the
    metrics.
    """
    for url in router:
        Origin.parse(url, "--router")
    set_up_logging(TEXT, "recommender")
    file = SpecFile(spec, read_recommended)
    run_async(_recommend(file, tuple(url.rstrip("/") for url in router), patches=patch_replicas))
    return 0


async def _recommend(spec: SpecFile, routers: tuple[str, ...], *, patches: bool) -> None:
    folder = state_folder() / "recommended" / spec.fleet.name
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
        async with RouterClient(http_secret()) as front:

            def make_recommender() -> Recommender:
                return Recommender(spec, routers, ledger, front, SYSTEM_CLOCK)

            run = _scale_workloads(spec.fleet, make_recommender) if patches else make_recommender().run()
            running = asyncio.gather(run, lease.heartbeat())
            for number in shutdown_signals():
                asyncio.get_running_loop().add_signal_handler(number, running.cancel)
            with suppress(asyncio.CancelledError):
                await running


async def _scale_workloads(fleet: DesiredFleet, make_recommender: Callable[[], Recommender]) -> None:
    if fleet.backend.kubernetes is None:
        raise ConfigError("--patch-replicas: there is no table [backend.kubernetes] in the fleet's file")
    require_library("--patch-replicas", "kubernetes", "kubernetes", ["kubernetes"])
    from kvferry.fleet.backends.kubernetes.cluster import Cluster
    from kvferry.fleet.backends.kubernetes.leadership import KubernetesLeadership
    from kvferry.fleet.backends.kubernetes.manifests.controller_objects import controller_name
    from kvferry.fleet.backends.kubernetes.replicas import ReplicaController

    kubernetes = fleet.backend.kubernetes
    cluster = await Cluster.connect(kubernetes.namespace, kubernetes.context)
    try:
        leadership = KubernetesLeadership(cluster, controller_name(fleet))
        await ReplicaController(fleet, make_recommender, cluster, leadership).run()
    finally:
        await cluster.close()
