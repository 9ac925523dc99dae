"""Waits of requests for instances: for a start, if a fleet's controller has stopped all of them, and for the first
probe of a new instance."""

from __future__ import annotations

import asyncio

from kvferry.http.server.response import Response
from kvferry.router.instances.instance import Instance, InstanceState
from kvferry.router.request.services import Services

_POLL_INTERVAL_S, _COMMENT_INTERVAL_S = 0.1, 5.0
_FIRST_PROBE_POLL_S = 0.01
_MAX_START_RATIO, _EXTRA_START_S = 3.0, 60.0
"""Maximum wait for a start: this many usual starts, plus this many seconds."""


async def wait_for_instances(services: Services, response: Response, *, streams: bool) -> None:
    """Return once an instance is alive, or when it has taken too long. Meanwhile a client that `streams` gets comments,
    and the controller sees the number of waiting requests in `Traffic`."""
    pools, clock = services.pools, services.clock
    starts_s = pools.shared_plan.starts_s
    if starts_s <= 0:
        return
    traffic, begun = services.chooser.traffic, clock.monotonic()
    comment_at = begun
    traffic.num_waiting += 1
    try:
        while not pools.decode.alive() and pools.shared_plan.starts_s > 0:
            waited_s = clock.monotonic() - begun
            if waited_s > _MAX_START_RATIO * starts_s + _EXTRA_START_S:
                return
            if streams and begun + waited_s >= comment_at:
                comment_at += _COMMENT_INTERVAL_S
                response.comment(f"an instance is started: {waited_s:.0f} s so far, about {starts_s:.0f} s in all")
            await asyncio.sleep(_POLL_INTERVAL_S)
    finally:
        traffic.num_waiting -= 1


async def wait_for_first_probe(services: Services, prefill: Instance) -> None:
    """Return once `Health` has probed a new instance, which takes milliseconds, or when it has taken too long. Until
    then its protocol is unknown."""
    deadline = services.clock.monotonic() + services.config.health_timeout_s
    while prefill.state is InstanceState.NEW and services.clock.monotonic() < deadline:  # noqa: ASYNC110 - rare
        await asyncio.sleep(_FIRST_PROBE_POLL_S)
