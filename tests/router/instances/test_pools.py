"""Addresses, whose turn it is, and who is left out."""

from __future__ import annotations

import pytest

from kvferry.core.clock import ManualClock
from kvferry.core.errors import ConfigError
from kvferry.router.config import RouterConfig
from kvferry.router.instances.instance import Instance, normalise_url
from kvferry.router.instances.pools import Pools, RolePool


def a_pool(num: int = 3) -> RolePool:
    pool = RolePool("decode")
    for index in range(num):
        pool.add(f"http://d{index}:1")
    return pool


def test_everyone_in_turn() -> None:
    pool = a_pool()
    picked = [pool.pick() for _ in range(6)]
    assert picked == pool.instances * 2


def test_who_was_away_comes_first_and_nobody_is_skipped() -> None:
    pool = a_pool()
    first, second, third = pool.instances
    second.mark_down("it is off")
    assert [pool.pick() for _ in range(3)] == [first, third, first]
    second.mark_healthy()
    assert [pool.pick() for _ in range(4)] == [second, third, first, second]


def test_excluded_are_never_picked() -> None:
    pool = a_pool(2)
    first, second = pool.instances
    assert {pool.pick({first}) for _ in range(3)} == {second}
    assert pool.pick({first, second}) is None


def test_who_asked_to_be_left_alone_is_passed_over_while_others_are_there() -> None:
    clock = ManualClock(100.0)
    pool = RolePool("decode", clock)
    pool.add("http://d0:1")
    pool.add("http://d1:1")
    first, second = pool.instances
    first.pause_until(107.0)
    assert pool.alive() == [second]
    assert pool.alive({second}) == [first]
    second.pause_until(103.0)
    assert pool.alive() == [first, second]
    clock.advance(3.0)
    assert pool.alive() == [second]
    clock.advance(4.0)
    assert pool.alive() == [first, second]


def test_when_all_seem_dead_one_is_tried_all_the_same() -> None:
    pool = a_pool(2)
    for instance in pool.instances:
        instance.mark_down("it is off")
    assert pool.alive() == []
    assert pool.pick() in pool.instances
    assert pool.num_usable == 0


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://a:1/", "http://a:1"),
        ("a:1", "http://a:1"),
        ("https://a/base/", "https://a/base"),
        ("[::1]:80", "http://[::1]:80"),
    ],
)
def test_urls(url: str, normal: str) -> None:
    assert normalise_url(url) == normal


@pytest.mark.parametrize("url", ["ftp://a:1", "http://", "http://a:notaport", "http://a:1/?x=1", "http://a:99999"])
def test_wrong_urls_are_named(url: str) -> None:
    with pytest.raises(ConfigError, match=url.split("?", maxsplit=1)[0]):
        Instance("decode", url)


def test_a_router_needs_decode_instances_and_each_once() -> None:
    with pytest.raises(ConfigError, match="--decode-url"):
        Pools.from_config(RouterConfig())
    with pytest.raises(ConfigError, match=r"--prefill-url http://p:1 is given twice"):
        Pools.from_config(RouterConfig(prefill_url=("p:1", "http://p:1/"), decode_url=("d:1",)))
    with pytest.raises(ConfigError, match=r"--prefill-url http://d:1 is a --decode-url too"):
        Pools.from_config(RouterConfig(prefill_url=("p:1", "http://d:1/"), decode_url=("d:1",)))


@pytest.mark.parametrize("url", ["http://d:1/v1", "d:1/v1/", "http://d:1/behind/v1"])
def test_the_url_that_clients_have_is_not_a_base_url(url: str) -> None:
    with pytest.raises(ConfigError, match="leave out /v1"):
        Instance("decode", url)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"max_in_flight": 0}, "--max-in-flight"),
        ({"retries": -1}, "--retries"),
        ({"health_timeout_s": 0}, "--health-timeout-s"),
        ({"max_body": "2GiB"}, "--max-buffered"),
        ({"max_body": "much"}, "--max-body"),
    ],
)
def test_wrong_settings_name_their_flag(settings: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        RouterConfig(**settings)  # type: ignore[arg-type]


def test_who_joins_has_taken_in_as_much_as_the_least_of_the_others() -> None:
    """Or all prompts would go to an instance that was started, or is back, until its cache has taken in as much."""
    pool = a_pool(2)
    first, second = pool.instances
    for instance, num_tokens in ((first, 3e6), (second, 2e6)):
        instance.load.add_recent(num_tokens, 0.0)
    assert list(pool.alive().weighed(recent_tokens=1.0)) == [3e6, 2e6], "they begin together"
    new = pool.add("http://new:1")
    assert list(pool.alive().weighed(recent_tokens=1.0)) == [3e6, 2e6, 2e6]
    new.mark_down("it is off")
    assert len(pool.alive()) == 2
    for instance in (first, second):
        instance.load.add_recent(5e6, 0.0)
    new.mark_healthy()
    assert list(pool.alive().weighed(recent_tokens=1.0)) == [8e6, 7e6, 7e6]
