"""What a router remembers of an instance ends with its process, also of one that does not name it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvferry.core.clock import ManualClock
from kvferry.router.body import RequestBody
from kvferry.router.choice.chooser import Chooser
from kvferry.router.config import RouterConfig
from kvferry.router.instances.connections import Connections
from kvferry.router.instances.health import Health
from kvferry.router.instances.pools import Pools
from router.peers import CONCURRENT, DECODE, Peer, answer, instances, ticket

PATH = "/v1/completions"
BODY = RequestBody.parse(msgspec.json.encode({"model": "m", "prompt": "lorem ipsum " * 500}))


class Place:
    """A router, and its only decode instance, whose process ends and is followed by another."""

    def __init__(self, config: RouterConfig, connections: Connections, decode: Peer) -> None:
        clock, self.pools, self.peer = ManualClock(), Pools.from_config(config), decode
        self.health, self.chooser = Health(self.pools, connections, config, clock), Chooser(config, clock, self.pools)
        [self.decode], self.num_requests = self.pools.decode.instances, 0

    async def look(self) -> None:
        await self.health.probe(self.pools)

    def cached_tokens(self) -> dict[str, int]:
        """What a request that comes now finds cached, as its decision says; it is placed then."""
        asked = self.chooser.read(PATH, BODY, {})
        decision = self.chooser.record(PATH, asked, b"%d" % self.num_requests, 0.0)
        self.num_requests += 1
        self.chooser.choose(asked, self.pools.prefill.alive(), self.pools.decode.alive())
        return {one.name: tokens for one, tokens in decision.cached.items()}

    async def go_down(self) -> None:
        self.peer.healthy = False
        await self.look()
        self.peer.healthy = True


@asynccontextmanager
async def remembered(decode: Peer, **settings: Any) -> AsyncIterator[Place]:
    """A router that has sent a prompt to `decode`."""
    p = Peer("prefill", ticket, facts=CONCURRENT if decode.facts else None, vllm=decode.vllm)
    async with instances(p, decode), Connections() as connections:
        config = RouterConfig(prefill_url=(p.url,), decode_url=(decode.url,), policy="round_robin", **settings)
        place = Place(config, connections, decode)
        await place.look()
        assert place.cached_tokens() == {}
        assert "decode-0" in place.cached_tokens()
        yield place


def started(seconds: float) -> Any:
    """Metrics with the time at which a process started."""

    async def metrics(peer: Peer) -> str:
        return f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {seconds}e+09\n"

    return metrics


@pytest.mark.parametrize("protocol", ["auto", "nixl"])
async def test_a_server_without_a_name_that_was_down_has_nothing_cached(protocol: str) -> None:
    async with remembered(Peer("decode", answer, vllm="0.32.0"), protocol=protocol) as place:
        await place.go_down()
        await place.look()
        assert "decode-0" not in place.cached_tokens()


@pytest.mark.parametrize("protocol", ["auto", "nixl"])
async def test_the_time_at_which_a_vllm_server_started_names_its_process(protocol: str) -> None:
    decode = Peer("decode", answer, vllm="0.32.0", metrics=started(1.7))
    async with remembered(decode, protocol=protocol) as place:
        await place.go_down()
        await place.look()
        assert "decode-0" in place.cached_tokens(), "it was only unreachable for a while"
        decode.metrics = started(1.8)
        place.decode.invalidate()  # as when a connection breaks off between two looks
        await place.look()
        assert "decode-0" not in place.cached_tokens()


async def test_a_process_of_kvferrys_is_told_from_its_successor_with_the_same_engine_id() -> None:
    decode = Peer("decode", answer, facts={**DECODE, "process": "a"})
    async with remembered(decode) as place:
        await place.go_down()
        await place.look()
        assert "decode-0" in place.cached_tokens()
        assert decode.facts is not None
        decode.facts = {**decode.facts, "process": "b"}
        await place.go_down()
        await place.look()
        assert "decode-0" not in place.cached_tokens()


async def test_speed_and_pauses_end_with_the_process() -> None:
    async with remembered(Peer("decode", answer, vllm="0.32.0")) as place:
        estimates, prefill = place.chooser.estimates, place.pools.prefill
        for number in range(16):
            estimates.prefilled("another", 1000.0 * number, 0.1 * number)
            estimates.prefilled("decode-0", 1000.0 * number, 10.0 * number)
        assert estimates.prefill_s("decode-0", 9000) > 1.2 * estimates.any_prefill.at(9000)
        place.decode.pause_until(100.0)
        prefill.exclude_from_hand_off(prefill.instances[0], 100.0)
        await place.go_down()
        await place.look()
        place.cached_tokens()
        assert estimates.prefill_s("decode-0", 9000) == estimates.any_prefill.at(9000)
        assert place.decode.paused_until == 0.0
        assert not prefill.hand_off(prefill.instances), "another instance's process goes on"


async def test_a_prefill_instance_that_was_left_out_is_used_again_in_its_next_process() -> None:
    async with remembered(Peer("decode", answer, vllm="0.32.0")) as place:
        pool = place.pools.prefill
        [prefill] = pool.instances
        pool.exclude_from_hand_off(prefill, 100.0)
        prefill.mark_down("killed")
        await place.look()
        assert pool.hand_off([prefill]) == [prefill]


async def test_an_instance_that_takes_the_name_of_one_that_left_starts_without_its_speed() -> None:
    async with remembered(Peer("decode", answer, vllm="0.32.0")) as place:
        estimates, pool = place.chooser.estimates, place.pools.decode
        estimates.prefilled("decode-0", 100.0, 100.0)
        place.pools.retire(place.decode)
        place.decode.set_drained(True)
        place.pools.forget(place.decode)
        pool.add("http://127.0.0.1:1", name="decode-0")
        place.cached_tokens()
        assert estimates.prefill_s("decode-0", 9000) == estimates.any_prefill.at(9000)
