"""Which legs are given up, and which are not: what this process itself was kept from seeing counts against nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvferry.core.clock import Clock, ManualClock, SystemClock
from kvferry.router.config import RouterConfig
from kvferry.router.errors import LegTimedOut
from kvferry.router.instances.connections import Connections
from kvferry.router.instances.instance import Instance, InstanceState
from kvferry.router.request.leg import Leg, LegChanges, Legs
from router.peers import Peer, answer_late, instances

BODY = b'{"model":"m","prompt":"Hello"}'


@asynccontextmanager
async def waiting(clock: Clock, silence_s: float) -> AsyncIterator[tuple[Legs, Leg, Peer]]:
    """A leg that waits for an instance that does not answer yet."""
    peer = Peer("decode", answer_late)
    config = RouterConfig(decode_url=("http://d:1",), first_byte_timeout_s=silence_s, between_bytes_timeout_s=silence_s)
    async with instances(peer), Connections() as connections:
        legs = Legs(config, clock, connections)
        instance = Instance("decode", peer.url, name="decode-0")
        head = b"content-type: application/json\r\n"
        leg = legs.send(instance, "POST", "/v1/completions", head, BODY, LegChanges())
        await peer.called.wait()
        legs.check_timeouts()  # that it was connected
        try:
            yield legs, leg, peer
        finally:
            leg.close()
            assert legs.num_open == 0
            assert instance.load.num_legs == 0


async def test_who_is_silent_for_too_long_is_given_up() -> None:
    clock = ManualClock()
    async with waiting(clock, 10.0) as (legs, leg, peer):
        clock.advance(9.0)
        legs.check_timeouts()
        assert leg.error is None
        clock.advance(2.0)
        legs.check_timeouts()
        assert isinstance(leg.error, LegTimedOut)
        assert leg.instance.state is InstanceState.UNRESPONSIVE
        await peer.disconnected.wait()


async def test_time_that_this_process_stood_still_is_nobodys_silence() -> None:
    clock = ManualClock()
    async with waiting(clock, 10.0) as (legs, leg, _):
        clock.advance(4.0)
        leg.instance.last_progress = clock.monotonic()
        clock.advance(500.0)
        legs.check_timeouts(missed_s=497.0)
        assert leg.error is None
        clock.advance(6.9)
        legs.check_timeouts()
        assert leg.error is None
        clock.advance(0.2)
        legs.check_timeouts()
        assert leg.error is not None


async def test_an_answer_that_came_while_the_process_stood_still_is_read() -> None:
    """As after SIGSTOP and SIGCONT: it is here, but not read yet, when the limits are looked at."""
    async with waiting(SystemClock(), 0.2) as (legs, leg, _):
        running = asyncio.create_task(legs.watch())
        await asyncio.sleep(0)  # it has begun to wait for its next look
        looked, look = asyncio.Event(), legs.check_timeouts

        def look_and_tell(missed_s: float = 0.0) -> None:
            look(missed_s)
            looked.set()

        legs.check_timeouts = look_and_tell  # type: ignore[method-assign]
        time.sleep(1.0)  # noqa: ASYNC251 - the process stands still
        await looked.wait()
        assert leg.error is None
        running.cancel()
        await asyncio.wait([running])
