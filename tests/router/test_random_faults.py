"""Hundreds of faults in some seconds: servers of kvferry's whose engines compute nothing, and break at random.

Connections are cut in the middle of answers, engines stand still or tell of errors, servers are gone for a while and
come back, clients leave. Every answer is compared with what one server alone says, event for event; none is missing but
where every decode instance failed while it was asked for, and nothing is left at the end. `test_random_faults.py` in
`end_to_end` has real processes.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from engine.server.running import running
from kvferry.core.errors import Unavailable
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.core.request import EngineOutput, Request
from router.peers import routing
from router.request.test_delivery import CHAT, TEXT, Failing, timeless
from support.ports import free_port

NUM_REQUESTS = int(os.environ.get("KVFERRY_FAKE_REQUESTS", "300"))
FAULTS = 0.15
"""Of requests to an instance."""
AT_ONCE = 12
ANSWER_S = 60.0
SETTINGS: dict[str, Any] = {
    "first_byte_timeout_s": 5.0,
    "between_bytes_timeout_s": 0.5,
    "health_interval_s": 0.05,
    "retries": 4,
    "continuations": 10,
    "busy_wait_s": 10.0,
    "disaggregate_from": "0",
    "policy": "random",
}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", TEXT),
    ("/v1/completions", {**TEXT, "logprobs": 2, "temperature": 0, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {**TEXT, "stream": False}),
    ("/v1/chat/completions", {**CHAT, "seed": 9, "stop": ["zzz"], "logprobs": True}),
    ("/v1/chat/completions", {**CHAT, "seed": 10, "temperature": 0, "stream": False}),
]


class Chaotic(Failing):
    """Some of its requests meet a fault."""

    def __init__(self, name: str, rng: random.Random, met: Counter[str]) -> None:
        super().__init__()
        self.name, self.rng, self.met = name, rng, met
        self.faults, self.is_gone = 0, False
        self.role = "prefill" if name.startswith("p") else "decode"

    def describe(self) -> InstanceFacts:
        return msgspec.structs.replace(super().describe(), engine_id=self.name)

    def ticket(self, request: Request, first_token: int) -> dict[str, Any] | None:
        ticket = super().ticket(request, first_token)
        return ticket and {**ticket, "remote_engine_id": self.name}

    async def outputs(self, request: Request) -> AsyncIterator[EngineOutput]:
        number, at = 0, self.rng.randrange(25) if self.rng.random() < FAULTS else -1
        if request.sampling.max_tokens == 1:
            at = min(at, 0)
        async for output in super().outputs(request):
            if number == at:
                await self._meet(self.rng.choice(["cut", "cut", "hang", "error"]))
            number += 1
            yield output

    async def _meet(self, fault: str) -> None:
        self.met[fault] += 1
        self.faults += 1
        if fault == "error":
            raise Unavailable("the engine is gone")
        if fault == "cut":
            self.stop()
        await asyncio.Event().wait()


class Place:
    """One instance's address, where a server is, or is not."""

    def __init__(self, engine: Chaotic) -> None:
        self.engine, self.url, self._port = engine, "", free_port()
        self._ready, self._over = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None]

    async def start(self) -> None:
        self._ready, self._over = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._serve())
        await self._ready.wait()
        self.engine.is_gone = False

    async def _serve(self) -> None:
        async with running(self.engine, port=self._port) as server:
            self.url = server.url
            self.engine.stop = lambda: [one.abort() for one in tuple(server.server.service.connections)]
            self._ready.set()
            await self._over.wait()

    async def stop(self) -> None:
        self.engine.faults += 1
        self.engine.is_gone = True
        self._over.set()
        await asyncio.shield(self._task)  # who is cancelled while he waits for it leaves it be


async def disturb(places: list[Place], rng: random.Random, met: Counter[str]) -> None:
    """One after the other is gone for a moment."""
    while True:
        await asyncio.sleep(rng.random() * 0.3)
        place = rng.choice(places)
        met["restart"] += 1
        await place.stop()
        await asyncio.sleep(rng.random() * 0.1)
        await place.start()


NOBODY_LEFT = (b"there is no other to try", b"no decode instance can be reached")


class NobodyLeft(Exception):
    """The router's answer, where no decode instance is left that did not fail this request."""


async def ask(session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> list[bytes]:
    async with session.post(url + path, json=body, headers={"X-Request-Id": "one"}) as response:
        text = await response.read()
        if response.status in (502, 503, 504) and any(message in text for message in NOBODY_LEFT):
            raise NobodyLeft(text)
        assert response.status == 200, text
        return timeless(text.removesuffix(b"\n\n").split(b"\n\n"))


async def everything(url: str, decodes: list[Chaotic], rng: random.Random) -> Counter[str]:
    """All requests, `AT_ONCE` at a time; what came of them."""
    found: Counter[str] = Counter()
    left = iter(range(NUM_REQUESTS))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
        async with running(Failing()) as alone:
            expected = [await ask(session, alone.url, *one) for one in ASKED]

        async def client() -> None:
            for _ in left:
                number = rng.randrange(len(ASKED))
                if rng.random() < 0.05:
                    found["left"] += 1
                    asking = asyncio.create_task(ask(session, url, *ASKED[number]))
                    await asyncio.wait([asking], timeout=rng.random() * 0.05)
                    asking.cancel()
                    await asyncio.gather(asking, return_exceptions=True)
                    continue
                before = [one.faults - one.is_gone for one in decodes]
                try:
                    assert await ask(session, url, *ASKED[number]) == expected[number]
                    found["answered"] += 1
                except NobodyLeft:
                    assert all(one.faults > were for one, were in zip(decodes, before, strict=True))
                    found["nobody left"] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(client())
    return found


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
async def test_whatever_breaks_every_answer_is_right(seed: int) -> None:
    rng, met = random.Random(seed), Counter[str]()
    roles = ("p0", "p1", "d0", "d1", "d2", "d3")
    places = [Place(Chaotic(role, rng, met)) for role in roles]
    for place in places:
        await place.start()
    urls = [place.url for place in places]
    try:
        async with routing(urls[:2], urls[2:], **SETTINGS) as (router, url):
            disturbing = asyncio.create_task(disturb(places[1:3], rng, met))
            found = await everything(url, [place.engine for place in places[2:]], rng)
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)
            metrics = router.services.metrics.expose(router.services.pools).decode()
    finally:
        for place in places:
            await place.stop()
    continued = [line for line in metrics.splitlines() if line.startswith("kvferry_router_continuations_total")]
    print(dict(found), dict(met), continued)
    assert found.total() == NUM_REQUESTS
    assert found["nobody left"] <= NUM_REQUESTS / 50
    assert sum(met.values()) > NUM_REQUESTS / 10
    assert not any(place.engine.running for place in places)
