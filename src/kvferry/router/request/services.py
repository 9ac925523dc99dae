"""Services that all requests of a router share."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.clock import Clock
from kvferry.router.choice.chooser import Chooser
from kvferry.router.config import RouterConfig
from kvferry.router.instances.connections import Connections
from kvferry.router.instances.pools import Pools
from kvferry.router.metrics import Metrics
from kvferry.router.request.leg import Legs
from kvferry.router.request.next_turn import NextTurns
from kvferry.router.request.relay import Relay
from kvferry.router.request.releases import Releases


@dataclass(frozen=True)
class Services:
    """Services that all requests share; created once, by `build_router`."""

    config: RouterConfig
    clock: Clock
    pools: Pools
    connections: Connections
    legs: Legs
    releases: Releases
    metrics: Metrics
    chooser: Chooser
    relay: Relay
    next_turns: NextTurns | None = None
    """Tickets for next turns, with --keep-for-next-turn."""
