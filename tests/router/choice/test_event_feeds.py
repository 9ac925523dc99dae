"""KV events of instances reach the index, and a choice follows them."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import Any

import pytest

from kvferry.core.clock import ManualClock
from kvferry.core.errors import ConfigError
from kvferry.core.messages.instance_facts import EventsAddress
from kvferry.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored
from kvferry.kv_events.publisher import KVEventPublisher
from kvferry.router.app import Router
from kvferry.router.choice import event_feeds
from kvferry.router.choice.event_feeds import parse_events_address
from router.peers import CONCURRENT, DECODE, Peer, answer, instances, routing, ticket
from router.request.test_hand_off import post
from support.waiting import eventually

TOKENS = list(range(64))


@contextmanager
def publishing() -> Any:
    publisher = KVEventPublisher("tcp://127.0.0.1:*", None, ManualClock())
    try:
        yield publisher
    finally:
        publisher.close()


def stored(first: int, *names: int, medium: str = "GPU", parent: int | None = None, **more: Any) -> BlockStored:
    """Blocks of 16 of `TOKENS`, from `first` on."""
    return BlockStored(
        block_hashes=list(names),
        parent_block_hash=parent,
        token_ids=TOKENS[first : first + 16 * len(names)],
        block_size=16,
        medium=medium,
        **more,
    )


def cached(router: Router) -> dict[str, int]:
    """What each instance has of `TOKENS`, by the router's index."""
    from kvferry.router.choice.prompt import Prefix

    found = router.services.chooser.index.match(Prefix((), (), TOKENS))
    return {one.name: num_tokens for one, num_tokens in found.items()}


async def test_a_prompt_goes_to_the_instance_whose_events_tell_of_its_blocks() -> None:
    with publishing() as first, publishing() as second:
        peers = [
            Peer("prefill", ticket, facts={**CONCURRENT, "engine_id": name, "kv_events": vars(publisher.addresses)})
            for name, publisher in (("one", first), ("two", second))
        ]
        d = Peer("decode", answer, facts=DECODE)
        first.publish([stored(0, 1)])
        second.publish([stored(0, 1, 2, 3), BlockRemoved(block_hashes=[9])])
        urls = [one.url for one in peers]
        async with instances(*peers, d):
            urls = [one.url for one in peers]
            async with routing(urls, [d.url], policy="cost", hand_off="sequential") as (router, url):
                await eventually(lambda: cached(router) == {"prefill-0": 16, "prefill-1": 48})
                body = {"model": "m", "prompt": TOKENS, "max_tokens": 1}
                for _ in range(3):
                    assert (await post(url, body))[0] == 200
                assert (len(peers[0].calls), len(peers[1].calls)) == (0, 3)
                second.publish([AllBlocksCleared()])
                await eventually(lambda: cached(router).get("prefill-1") is None)


async def test_what_cannot_be_found_by_tokens_alone_is_passed_over() -> None:
    with publishing() as publisher:
        p = Peer("prefill", ticket, facts={**CONCURRENT, "kv_events": vars(publisher.addresses)})
        d = Peer("decode", answer, facts=DECODE)
        publisher.publish(
            [
                stored(0, 1, medium="CPU"),
                stored(0, 2, lora_name="adapter"),
                stored(0, 3, extra_keys=[["salt"]]),
                stored(0, 4, group_idx=1),
                stored(16, 5, parent=77),
            ]
        )
        publisher.publish([stored(0, 6)])
        async with instances(p, d), routing([p.url], [d.url]) as (router, _):
            await eventually(lambda: cached(router) == {"prefill-0": 16})


async def test_the_events_of_vllm_are_where_a_setting_says() -> None:
    with publishing() as publisher:
        p, d = Peer("prefill", ticket, vllm="0.32"), Peer("decode", answer, vllm="0.32")
        publisher.publish([stored(0, 1, 2)])
        async with instances(p, d):
            where = publisher.addresses
            setting = f"{p.url}={where.endpoint},{where.replay_endpoint}"
            async with routing([p.url], [d.url], instance_kv_events=(setting,)) as (router, _):
                await eventually(lambda: cached(router) == {"prefill-0": 32})


async def test_a_feed_that_ended_in_an_error_is_followed_again(monkeypatch: Any) -> None:
    real, ended = event_feeds.follow, asyncio.Event()

    async def follow(*where: Any) -> Any:
        async for told in real(*where):
            yield told
            if not ended.is_set():
                ended.set()
                raise OverflowError("nobody thought of this")

    monkeypatch.setattr(event_feeds, "follow", follow)
    monkeypatch.setattr(event_feeds.EventFeeds, "retry_delay_s", 0.01)
    with publishing() as publisher:
        p = Peer("prefill", ticket, facts={**CONCURRENT, "kv_events": vars(publisher.addresses)})
        d = Peer("decode", answer, facts=DECODE)
        publisher.publish([stored(0, 1)])
        async with instances(p, d), routing([p.url], [d.url]) as (router, _):
            async with asyncio.timeout(60):
                await ended.wait()
            publisher.publish([stored(16, 2, parent=1)])
            await eventually(lambda: cached(router) == {"prefill-0": 32})


@pytest.mark.parametrize(
    "setting", ["tcp://a:1", "http://a:1=a:1", "http://a:1=tcp://a", "ftp://a=tcp://a:1", "=tcp://a:1"]
)
def test_wrong_settings_are_told(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"not an|must be an"):
        parse_events_address(setting)


def test_who_listens_everywhere_is_reached_at_its_own_host() -> None:
    everywhere = EventsAddress(endpoint="tcp://0.0.0.0:5557", replay_endpoint="tcp://[::]:5558")
    assert everywhere.reachable_at("10.0.0.1").endpoint == "tcp://10.0.0.1:5557"
    assert everywhere.reachable_at("fe80::1").replay_endpoint == "tcp://[fe80::1]:5558"
