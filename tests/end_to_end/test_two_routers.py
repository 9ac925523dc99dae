"""Two routers in front of one fleet at once: each sees a part of what instances do, and all answers are right; also
when one of them is killed in the middle of its work."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import httpx
import pytest

from support.processes import OPERATOR, Cluster, KvferryProcess, cluster, kvferry
from support.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.full(in_every_part=True)]

NUM_PROMPTS, NUM_ROUNDS = 12, 4
NUM_TOKENS = {False: 12, True: 64}
"""Of answers, whole and streamed."""
LEASED = {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"lease_s": 2.0}}
PATH = "/v1/completions"


@contextmanager
def two_routers(model: Path, folder: Path) -> Iterator[tuple[Cluster, KvferryProcess]]:
    """The cluster, whose router is the first, and the second."""
    with cluster(model, folder, num_prefill=2, num_decode=2, transfer=LEASED) as started:
        urls = [f"--prefill-url={one.url}" for one in started.prefill]
        urls += [f"--decode-url={one.url}" for one in started.decode]
        with kvferry("router", *urls, "--policy=round_robin", log=folder / "second.log", ends_cleanly=False) as second:
            yield started, second


def made_prompts() -> list[list[int]]:
    """They have beginnings in common."""
    rng = random.Random(3)
    stem = [rng.randrange(3, 900) for _ in range(200)]
    return [[*stem[: rng.randrange(1, 200)], number] for number in range(NUM_PROMPTS)]


def tokens(server: KvferryProcess, prompt: list[int], salt: str, stream: bool = False, **more: Any) -> list[int]:
    """Of an answer."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS[stream], "temperature": 0, "ignore_eos": True, "stream": stream}
    response = server.post(PATH, {**body, "return_token_ids": True, "cache_salt": salt, **more})
    assert response.status_code == 200, response.text
    parts = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert not stream or response.text.endswith("data: [DONE]\n\n")
    found = [choice for part in (parts if stream else [response.json()]) for choice in part["choices"]]
    return [token for choice in found for token in choice.get("token_ids") or []]


def in_flight(router: KvferryProcess) -> int:
    """Legs that it counts."""
    told = httpx.get(router.url + "/kvferry/instances", auth=OPERATOR, timeout=30).json()["instances"]
    return sum(one["in_flight"] for one in told)


def require_nothing_left(started: Cluster, *routers: KvferryProcess) -> None:
    """At any instance, or by any router's count."""
    started.require_clean(timeout_s=30)
    for one in started.prefill:
        until(lambda one=one: one.metric("kvferry:num_hand_offs_held") == 0, timeout_s=30)
    for router in routers:
        until(lambda router=router: in_flight(router) == 0, timeout_s=30)


@pytest.mark.full
def test_two_routers_before_one_fleet(model_maker: Any, tmp_path: Path) -> None:
    with two_routers(model_maker("llama"), tmp_path) as (started, second):
        routers, prompts = [started.router, second], made_prompts()
        expected = [tokens(started.decode[0], prompt, "alone") for prompt in prompts]
        asked = [(routers[number % 2], prompt) for number in range(2 * NUM_ROUNDS) for prompt in prompts]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda one: tokens(*one, "shared"), asked))
        assert found == expected * 2 * NUM_ROUNDS
        for router in routers:
            assert router.metric("kvferry_router_requests_total", path=PATH, status="200") == len(asked) / 2
            assert router.metric("kvferry_router_requests_total") == len(asked) / 2
            assert router.metric("kvferry_router_hand_offs_total") == len(asked) / 2
        require_nothing_left(started, *routers)
        assert second.stop() == 0


def test_one_of_two_routers_is_killed(model_maker: Any, tmp_path: Path) -> None:
    """What it had under way ends everywhere; the other's requests do not notice."""
    with two_routers(model_maker("llama"), tmp_path) as (started, second):
        prompts, outcomes = made_prompts(), Counter[str]()
        expected = {
            (stream, number): tokens(started.decode[0], prompt, "alone", stream)
            for number, prompt in enumerate(prompts)
            for stream in (False, True)
        }
        begun, killing = Semaphore(0), Event()

        def ask(router: KvferryProcess, number: int, stream: bool) -> None:
            name = "second" if router is second else "first"
            begun.release()
            try:
                assert tokens(router, prompts[number], "shared", stream) == expected[stream, number]
                outcomes[name] += 1
            except (httpx.TransportError, AssertionError):
                if router is not second or not killing.is_set():
                    raise
                outcomes["cut"] += 1

        asked = [(router, number, stream) for number in range(NUM_PROMPTS) for stream in (True, False)
                 for router in (second, started.router)] * 2  # fmt: skip
        with ThreadPoolExecutor(12) as pool:
            under_way = [pool.submit(ask, *one) for one in asked]
            for _ in range(24):
                begun.acquire()
            until(lambda: in_flight(second) > 0, timeout_s=30)
            killing.set()
            second.kill()
            for one in under_way:
                one.result(120)
        assert outcomes["first"] == len(asked) / 2
        assert outcomes["cut"] >= 1
        assert outcomes["second"] + outcomes["cut"] == len(asked) / 2
        assert started.router.metric("kvferry_router_requests_total", status="200") == len(asked) / 2
        require_nothing_left(started, started.router)
        assert [tokens(started.router, one, "after") for one in prompts[:3]] == [expected[False, n] for n in range(3)]
