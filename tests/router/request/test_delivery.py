"""Streams whose instance is lost in the middle: the client has all of the answer, as one instance alone gives it.

The instances are kvferry's own servers, with an engine that computes nothing and fails when it is told to.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from engine.server.conftest import make_tokenizer
from engine.server.fake_engine import DeterministicEngine
from engine.server.running import running
from kvferry.core.errors import InvalidRequest, Unavailable
from kvferry.core.messages.continuation import PROGRESS_HEADER
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.core.request import EngineOutput, Request
from router.peers import DECODE, Peer, failing, instances, routing

TEXT = {"prompt": "Zürich 日本語", "max_tokens": 30, "stream": True, "seed": 3}
CHAT = {"messages": [{"role": "user", "content": "naïve 🎉"}], "max_tokens": 30, "stream": True}
SOON = {"first_byte_timeout_s": 5.0, "between_bytes_timeout_s": 0.2}
"""For instances that hang."""

_TURNS = 50
"""Of the event loop that all run on, after which the router has read what an instance has written."""


class Failing(DeterministicEngine):
    """`fail` is called behind the token with number `after`, once for each of the next `times` requests."""

    def __init__(self, after: int = 0, times: int = 0, fail: Callable[[], Any] | None = None) -> None:
        super().__init__(make_tokenizer())
        self.after, self.times, self.fail = after, times, fail
        self.stop: Callable[[], None] = lambda: None
        self.role = "decode"

    def describe(self) -> InstanceFacts:
        return msgspec.structs.replace(super().describe(), engine_id=f"engine-{id(self)}", role=self.role)

    def ticket(self, request: Request, first_token: int) -> dict[str, Any] | None:
        ticket = super().ticket(request, first_token)
        return ticket and {**ticket, "remote_engine_id": f"engine-{id(self)}"}

    async def outputs(self, request: Request) -> AsyncIterator[EngineOutput]:
        number = len(request.answer_token_ids)
        fails, self.times = self.times > 0, max(0, self.times - 1)
        async for output in super().outputs(request):
            if fails and number >= self.after:
                await self._break(output)
            number += 1
            yield output

    async def _break(self, output: EngineOutput) -> None:
        if isinstance(self.fail, Exception):
            raise self.fail
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        if self.fail == "cut":
            self.stop()
        await asyncio.Event().wait()


@asynccontextmanager
async def fleet(*decode: Failing, prefill: tuple[Failing, ...] = (), **settings: Any) -> AsyncIterator[tuple[Any, str]]:
    """A router before such instances."""
    async with AsyncExitStack() as stack:
        urls = []
        for engine in prefill:
            engine.role = "prefill"
        for engine in (*decode, *prefill):
            server = await stack.enter_async_context(running(engine))
            engine.stop = lambda server=server.server: [one.abort() for one in tuple(server.service.connections)]
            urls.append(server.url)
        where = urls[len(decode) :], urls[: len(decode)]
        yield await stack.enter_async_context(routing(*where, **settings))


async def stream(url: str, body: dict[str, Any], path: str = "/v1/completions") -> list[bytes]:
    headers = {"X-Request-Id": "one"}
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert PROGRESS_HEADER not in response.headers
        return timeless((await response.read()).removesuffix(b"\n\n").split(b"\n\n"))


def timeless(events: list[bytes]) -> list[bytes]:
    """Without when it was created, which two requests do not share; within one it is the same."""
    read = [json.loads(event.removeprefix(b"data: ")) for event in events if event != b"data: [DONE]"]
    assert len({one.pop("created", None) for one in read}) <= 2  # an error event has none
    return [json.dumps(one).encode() for one in read] + [event for event in events if event == b"data: [DONE]"]


async def expected(body: dict[str, Any], path: str = "/v1/completions") -> list[bytes]:
    async with running(Failing()) as server:
        return await stream(server.url, body, path)


WAYS = ["cut", "hang", Unavailable("the engine is gone")]


@pytest.mark.parametrize("how", WAYS, ids=["cut", "hang", "error"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", TEXT),
        ("/v1/completions", {**TEXT, "logprobs": 2, "temperature": 0, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {**CHAT, "seed": 9, "stop": ["zzz"], "logprobs": True}),
    ],
)
async def test_the_answer_goes_on_elsewhere(path: str, body: dict[str, Any], how: Any) -> None:
    whole = await expected(body, path)
    for after in (0, 1, 13, 29):
        bad, good = Failing(after, 1, how), Failing()
        async with fleet(bad, good, **SOON) as (router, url):
            assert await stream(url, body, path) == whole
            metrics = router.services.metrics.expose(router.services.pools).decode()
            assert ('continuations_total{outcome="done"} 1.0' in metrics) == (after > 0)


async def test_several_in_turn_are_lost_and_a_prefill_instance_gives_the_rest() -> None:
    first, second, p = Failing(5, 1, "cut"), Failing(11, 1, "cut"), Failing()
    async with fleet(first, second, prefill=(p,)) as (_, url):
        assert await stream(url, TEXT) == await expected(TEXT)
    assert [len(one.requests[-1].answer_token_ids) for one in (first, second, p)] == [0, 4, 11]


async def test_unseeded_sampling_goes_on_with_the_seed_that_it_began_with() -> None:
    body = {key: value for key, value in TEXT.items() if key != "seed"} | {"ignore_eos": True}
    bad, good = Failing(10, 1, "cut"), Failing()
    async with fleet(bad, good) as (_, url):
        got = await stream(url, body)
    seed = bad.requests[0].sampling.seed
    assert good.requests[0].sampling.seed == seed
    assert got == await expected({**body, "seed": seed})


async def test_the_only_instance_is_back_in_time() -> None:
    engine = Failing(7, 1, "cut")
    async with fleet(engine, health_interval_s=0.05) as (_, url):
        assert await stream(url, TEXT) == await expected(TEXT)
    assert len(engine.requests) == 2


@pytest.mark.parametrize("how", WAYS, ids=["cut", "hang", "error"])
async def test_where_nobody_can_go_on_the_client_is_told(how: Any) -> None:
    engine = Failing(7, 9, how)
    async with fleet(engine, continuation_timeout_s=0.1, **SOON) as (_, url):
        events = await stream(url, TEXT)
    assert events[:-2] == (await expected(TEXT))[: len(events) - 2]
    kinds = {"cut": "instance_lost", "hang": "instance_silent"}
    assert json.loads(events[-2])["error"]["code"] == kinds.get(how if isinstance(how, str) else "", "unavailable")
    assert events[-1] == b"data: [DONE]"


async def test_an_answer_that_breaks_everywhere_is_given_up_after_some_tries() -> None:
    engines = [Failing(10 + number, 99, "cut") for number in range(5)]
    async with fleet(*engines, continuations=2) as (_, url):
        assert b"instance_lost" in (await stream(url, TEXT))[-2]
    assert sum(len(one.requests) for one in engines) == 3


async def test_none_are_continued_where_that_is_turned_off() -> None:
    bad, good = Failing(7, 1, "cut"), Failing()
    async with fleet(bad, good, continuations=0) as (_, url):
        assert b"instance_lost" in (await stream(url, TEXT))[-2]
    assert not good.requests


async def joined(router: Any, *peers: Peer) -> None:
    """They are behind the router too, and known."""
    for peer in peers:
        router.membership.add("decode", peer.url)
    await router.health.probe(router.services.pools)


async def test_one_that_asked_to_be_left_alone_is_asked_once_while_the_answer_waits() -> None:
    bad, busy = Failing(7, 9, "cut"), Peer("decode", failing(503, **{"Retry-After": "60"}), facts=DECODE)
    async with instances(busy), fleet(bad, continuation_timeout_s=1.0) as (router, url):
        await joined(router, busy)
        assert b"instance_lost" in (await stream(url, TEXT))[-2]
    assert len(busy.calls) == 1


async def test_one_that_refuses_the_rest_is_passed_over() -> None:
    bad, good, refuses = Failing(7, 1, "cut"), Failing(), Peer("decode", failing(404), facts=DECODE)
    async with instances(refuses), fleet(bad, prefill=(good,)) as (router, url):
        await joined(router, refuses)
        assert await stream(url, TEXT) == await expected(TEXT)
    assert len(refuses.calls) == 1


async def test_nobody_is_asked_who_serves_another_model() -> None:
    body = {**TEXT, "model": "test-model"}
    bad, good, other = Failing(7, 1, "cut"), Failing(), Peer("decode", failing(404), facts=DECODE)
    async with instances(other), fleet(bad, prefill=(good,)) as (router, url):
        await joined(router, other)
        assert await stream(url, body) == await expected(body)
    assert not other.calls


async def test_an_error_that_is_the_requests_own_is_not_tried_elsewhere() -> None:
    bad, good = Failing(7, 1, InvalidRequest("min_tokens and the stop tokens leave no token to choose")), Failing()
    async with fleet(bad, good) as (_, url):
        assert b"leave no token" in (await stream(url, TEXT))[-2]
    assert not good.requests


def by_choice(events: list[bytes]) -> Any:
    """What each choice says and how it ends, and all usage."""
    choices: dict[int, list[Any]] = {}
    usage = []
    for event in (json.loads(one) for one in events if one != b"data: [DONE]"):
        usage += [event["usage"]] if event.get("usage") else []
        for choice in event.get("choices", ["an error"]):
            text = choice.get("text", "") + choice.get("delta", {}).get("content", "")
            end = [choice["finish_reason"]] if choice.get("finish_reason") else []
            said = choices.setdefault(choice["index"], ["", []])
            choices[choice["index"]] = [said[0] + text, said[1] + end]
    return choices, usage, events[-1]


@pytest.mark.parametrize("how", WAYS, ids=["cut", "hang", "error"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**TEXT, "n": 2, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {**TEXT, "prompt": ["one", "two"], "temperature": 0}),
        ("/v1/chat/completions", {**CHAT, "n": 3, "seed": 9}),
    ],
)
async def test_several_choices_that_repeat_themselves_go_on_elsewhere(
    path: str, body: dict[str, Any], how: Any
) -> None:
    whole = by_choice(await expected(body, path))
    for after in (1, 13, 29):
        bad, good = Failing(after, 2, how), Failing()
        async with fleet(bad, good, **SOON) as (_, url):
            assert by_choice(await stream(url, body, path)) == whole
        assert good.requests


async def test_several_choices_that_are_sampled_without_a_seed_end_with_an_error() -> None:
    bad, good = Failing(7, 2, "cut"), Failing()
    async with fleet(bad, good) as (_, url):
        assert b"instance_lost" in (await stream(url, {**TEXT, "n": 2, "seed": None}))[-2]
    assert not good.requests


async def test_a_client_cannot_say_what_an_answer_begins_with() -> None:
    told = {"continue_from": {"token_ids": [5, 6], "seed": 1, "created": 1}}
    engine = Failing()
    async with fleet(engine) as (_, url):
        assert await stream(url, {**TEXT, "kv_transfer_params": told}) == await expected(TEXT)
    assert engine.requests[0].answer_token_ids == []


async def test_a_whole_answer_is_begun_anew_even_at_a_prefill_instance() -> None:
    bad, p = Failing(7, 1, "cut"), Failing()
    body = {**TEXT, "stream": False}
    async with fleet(bad, prefill=(p,)) as (_, url), aiohttp.ClientSession() as session:
        async with session.post(url + "/v1/completions", json=body) as response:
            assert response.status == 200
            assert (await response.json())["usage"]["completion_tokens"] == 30
