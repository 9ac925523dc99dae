"""Where requests wait for instances: until one is started, if a fleet's controller has stopped all of them; and until
one that has just come has said what it is."""

from __future__ import annotations

import asyncio

from kvferry.http.server.response import Response
from kvferry.router.instances.instance import Instance, InstanceState
from kvferry.router.request.services import Services

_LOOK_AGAIN_S, _TELL_AGAIN_S = 0.1, 5.0
_LOOK_SOON_S = 0.01
_STARTS, _MORE_S = 3.0, 60.0
"""How many times as long as a start usually takes it is waited for, and how many seconds more."""


async def wait_for_instances(services: Services, response: Response, *, streams: bool) -> None:
    """Return once an instance answers, or when it has taken too long. A client that `streams` is told meanwhile; the
    controller sees how many wait in `Traffic`."""
    pools, clock = services.pools, services.clock
    starts_s = pools.directions.starts_s
    if starts_s <= 0:
        return
    traffic, begun = services.chooser.traffic, clock.monotonic()
    tell_at = begun
    traffic.num_waiting += 1
    try:
        while not pools.decode.alive() and pools.directions.starts_s > 0:
            waited_s = clock.monotonic() - begun
            if waited_s > _STARTS * starts_s + _MORE_S:
                return
            if streams and begun + waited_s >= tell_at:
                tell_at += _TELL_AGAIN_S
                response.comment(f"an instance is started: {waited_s:.0f} s so far, about {starts_s:.0f} s in all")
            await asyncio.sleep(_LOOK_AGAIN_S)
    finally:
        traffic.num_waiting -= 1


async def wait_for_first_look(services: Services, prefill: Instance) -> None:
    """Return once `Health` has looked at an instance that has just come, which takes milliseconds, or when it has taken
    too long. Until then nobody knows which protocol it speaks."""
    deadline = services.clock.monotonic() + services.config.health_timeout_s
    while prefill.state is InstanceState.NEW and services.clock.monotonic() < deadline:  # noqa: ASYNC110 - as rare
        await asyncio.sleep(_LOOK_SOON_S)
