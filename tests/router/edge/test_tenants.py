"""Whose request it is, and what a tenant may have."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvferry.api.dialects.translator import TRANSLATED_PATHS
from kvferry.core.clock import ManualClock
from kvferry.core.errors import ConfigError, InvalidRequest
from kvferry.http.server.config import HttpConfig
from kvferry.router.body import RequestBody
from kvferry.router.config import RouterConfig
from kvferry.router.edge.tenants import Bucket, Limits, Tenants, count_tokens, priority_of, read_tenants
from kvferry.router.errors import OverLimit
from kvferry.router.paths import JSON_PATHS
from router.peers import CONCURRENT, DECODE, Peer, answer, answer_when_told, instances, routing, ticket
from support.waiting import eventually

BODY: dict[str, Any] = {"model": "m", "prompt": "Hello", "max_tokens": 8}


def body(**fields: Any) -> RequestBody:
    return RequestBody.parse(json.dumps(fields).encode())


async def post(url: str, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, str | None]:
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(url + "/v1/completions", json={**BODY, **fields}) as response,
    ):
        await response.read()
        return response.status, response.headers.get("Retry-After")


# Rates.


def test_a_bucket_fills_up_steadily_and_not_beyond_a_minute() -> None:
    bucket = Bucket(60, now=0)
    assert bucket.seconds_until(60, 0) == 0
    bucket.take(60)
    assert bucket.seconds_until(1, 0) == pytest.approx(1)
    assert bucket.seconds_until(30, 10) == pytest.approx(20)
    assert bucket.seconds_until(60, 1000) == 0
    bucket.take(1)
    assert bucket.seconds_until(60, 1000) == pytest.approx(1)


def test_what_is_more_than_a_minute_has_is_let_through_by_a_full_bucket_and_paid_for() -> None:
    bucket = Bucket(60, now=0)
    assert bucket.seconds_until(600, 0) == 0
    bucket.take(600)
    assert bucket.seconds_until(1, 0) == pytest.approx(541)


def test_each_tenant_has_its_own() -> None:
    clock = ManualClock()
    tenants = Tenants(clock, Limits(requests_per_minute=2, tokens_per_minute=100))
    one, two = (tenants.find(name, [], None) for name in (b"one", b"two"))
    for _ in range(2):
        tenants.charge(one, 10)
    with pytest.raises(OverLimit, match="2 requests per minute") as refused:
        tenants.charge(one, 10)
    assert refused.value.retry_after_s == 30
    tenants.charge(two, 90)
    with pytest.raises(OverLimit, match="100 tokens per minute") as refused:
        tenants.charge(two, 20)
    assert refused.value.retry_after_s == 6
    tenants.charge(two, 10).refund()
    tenants.charge(two, 10)  # what was refused, or given back, was not counted
    clock.advance(60)
    tenants.charge(one, 100)


def test_no_number_of_tenants_fills_the_memory() -> None:
    tenants = Tenants(ManualClock(), Limits(requests_per_minute=1), max_tenants=3)
    busy = tenants.find(b"busy", [], None)
    tenants.charge(busy, 0)
    for number in range(100):
        with pytest.raises(OverLimit):
            tenants.charge(tenants.find(b"busy", [], None), 0)
        tenants.find(b"%d" % number, [], None)
    assert len(tenants) == 3


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "x" * 38, "max_tokens": 8}, 18),
        ({"prompt": [1, 2, 3], "max_tokens": 8}, 11),
        ({"prompt": [1, 2, 3]}, 19),
        ({"prompt": [1, 2, 3], "max_tokens": 8, "n": 3}, 27),
        ({"prompt": [1], "max_tokens": -8}, 17),
        ({"prompt": [1], "max_tokens": 10**30, "n": 10**30}, 10**10 + 1),
        ({}, 16),
        ({"prompt": ["x" * 36], "max_tokens": 1}, 11),
        ({"prompt": ["x" * 36, 'a "," b \\\\', ""], "max_tokens": 100}, 315.5),
        ({"prompt": [[1, 2], [3]], "max_tokens": 100, "n": 2}, 403),
        ({"prompt": [1], "max_tokens": 100, "best_of": 3}, 301),
        ({"prompt": [1], "max_tokens": 100, "max_completion_tokens": 1}, 101),
        ({"prompt": [1], "max_tokens": "100", "n": 3.0}, 301),
        ({"prompt": [1], "max_tokens": 100.0, "n": "3"}, 301),
        ({"prompt": [1], "max_tokens": 8, "suffix": "x" * 38}, 19),
    ],
)
def test_tokens_are_the_prompt_and_the_longest_answer(fields: dict[str, Any], expected: float) -> None:
    assert count_tokens(body(**fields), "/v1/completions", 4.0) == expected


@pytest.mark.parametrize("wrong", ["many", "inf", "9" * 10**6, 8.5, [8], {"a": 8}, ""])
@pytest.mark.parametrize("field", ["max_tokens", "n"])
def test_a_limit_that_no_engine_reads_as_an_integer_is_refused(field: str, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} must be an integer, got ") as refused:
        count_tokens(body(prompt=[1], **{field: wrong}), "/v1/completions", 4.0)
    assert len(str(refused.value)) < 100


def test_tokens_of_chats_and_of_what_is_no_prompt() -> None:
    chat = "/v1/chat/completions"
    assert count_tokens(body(messages=[]), chat, 4.0) == 1024.5
    assert count_tokens(body(messages=[], max_completion_tokens=5, max_tokens=7), chat, 4.0) == 7.5  # SGLang's choice
    assert count_tokens(body(messages=[], max_completion_tokens=5, tools=["x" * 36]), chat, 4.0) == 15.5
    assert count_tokens(body(text="x" * 38), "/tokenize", 4.0) == 0
    assert count_tokens(b"form", "/v1/audio", 4.0) == count_tokens(None, "/v1/completions", 4.0) == 0


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        ("/v1/embeddings", {"input": "x" * 38}, 10),
        ("/v1/embeddings", {"input": [1, 2, 3], "max_tokens": "no limit here"}, 3),
        ("/v1/embeddings", {"input": [[1, 2], [3]]}, 3),
        ("/v1/embeddings", {"messages": "x" * 38}, 10),
        ("/pooling", {"input": ["x" * 36]}, 10),
        ("/v2/embed", {"texts": ["x" * 36]}, 10),
        ("/v1/audio/speech", {"input": "x" * 38}, 10),
        ("/v1/chat/completions/batch", {"messages": [["x"] * 2, ["y"] * 2], "max_tokens": 5}, 16),
        ("/classify", {"input": "x" * 38}, 10),
        ("/rerank", {"query": "x" * 38, "documents": "x" * 38}, 20),
        ("/v1/rerank", {"query": "x" * 38, "documents": ["a,b", '"]']}, 23.5),
        ("/v1/rerank", {"query": "x" * 38, "documents": []}, 10.5),
        ("/rerank", {"query": "x" * 38, "documents": {"content": ["x"]}}, 14.5),
        ("/score", {"text_1": "x" * 38, "text_2": ["a"] * 8}, 90),
        ("/v1/score", {"text_1": ["x" * 36] * 2, "text_2": ["x" * 36] * 2}, 40),
        ("/v1/score", {"queries": "x" * 38, "items": ["a"] * 2}, 22.5),
        ("/v1/score", {"text_2": ["a", 1, None]}, 3.5),
        ("/score", {"text_1": ["x" * 36], "text_2": ["a"] * 8}, 90),
        ("/score", {"text_1": "x" * 38, "text_2": ["a"] * 8, "instruction": "x" * 38}, 170),
        # Fields that mean the same: the costliest choice, in whatever order.
        ("/score", {"queries": [], "text_1": "x" * 38, "text_2": ["a"] * 8}, 90),
        ("/score", {"text_2": ["a"] * 8, "items": "", "text_1": "x" * 38, "query": ["a", "b"]}, 90),
        ("/v1/rerank", {"query": "x" * 38, "documents": ["a"], "items": ["b"]}, 11.25),
        ("/v1/rerank", {"query": "x" * 38, "documents": "", "items": ["a"] * 8}, 90),
    ],
)
def test_tokens_of_what_is_computed_and_answers_no_text(path: str, fields: dict[str, Any], expected: float) -> None:
    assert count_tokens(body(**fields), path, 4.0) == expected


def test_every_path_with_a_model_behind_it_counts() -> None:
    names = ("prompt", "messages", "input", "query", "text_1", "documents", "text_2", "text", "texts")
    asked = dict.fromkeys(names, "x" * 38)
    uncounted = {path for path in JSON_PATHS if not count_tokens(body(**asked), path, 4.0)}
    assert uncounted == {
        *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
        *("/v1/completions/render", "/v1/chat/completions/render"),
        *TRANSLATED_PATHS,
    }


@pytest.mark.parametrize(("limit", "share"), [(0, 0), (2, 1), (8, 1), (15, 1), (16, 2)])
def test_workers_together_give_a_tenant_no_more_at_a_time_than_it_may_have(limit: int, share: int) -> None:
    tenants = Tenants.from_config(RouterConfig(workers=8, tenant_max_in_flight=limit), ManualClock())
    assert tenants.find(b"key", [], None).limits.max_in_flight == share


def test_priorities() -> None:
    found = [priority_of(body(priority=one)) for one in (3, -3, None, "1", 1.5, True)]
    assert found == [3, -3, 0, 0, 0, 0]
    assert priority_of(None) == priority_of(b"form") == 0


# Who is who.


def test_a_name_is_a_tenant_where_clients_are_trusted_with_that() -> None:
    headers = [(b"x-team", b"red")]
    by_key, by_user, by_team = (
        Tenants.from_config(RouterConfig(tenant_by=by), ManualClock()) for by in ("key", "user", "header:X-Team")
    )
    asked = body(user="blue")
    assert by_key.find(b"key", headers, asked).key == b"key"
    assert by_user.find(b"key", headers, asked).key == b"name blue"
    assert by_user.find(b"key", headers, body(user=5)).key == b"key"
    assert by_team.find(b"key", headers, asked).key == b"name red"
    assert by_team.find(b"key", [], asked).key == b"key"
    assert len(by_user.find(b"key", [], body(user="x" * 10**6)).key) < 1000


def test_single_tenants_have_limits_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[acme]\napi_key = ["k1", "k2"]\nweight = 4\n[guests]\nrequests_per_minute = 1.5\n')
    found = read_tenants(file, Limits(tokens_per_minute=7))
    assert len(found) == 4
    assert {(one.weight, one.requests_per_minute, one.tokens_per_minute) for one in found.values()} == {
        (4, 0, 7),
        (1, 1.5, 7),
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[acme", "tenants.toml"),
        ("[acme]\nwieght = 1", r"\[acme\].*wieght is not a known key; did you mean 'weight'"),
        ("[acme]\nweight = 0", r"\[acme\]"),
        ("acme = 3", r"\[acme\]"),
        ('[a]\napi_key = ["k"]\n[b]\napi_key = ["k"]', "also belongs to another tenant"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_that_says_where(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_tenants(file, Limits())
    with pytest.raises(ConfigError, match="No such file"):
        read_tenants(tmp_path / "nowhere", Limits())


@pytest.mark.parametrize("wrong", [{"tenant_by": "ip"}, {"tenant_max_in_flight": -1}, {"tenant_by": "header:a b"}])
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--tenant-"):
        RouterConfig(**wrong)


# At the router.


async def test_who_asks_too_often_is_told_when_to_come_back() -> None:
    d = Peer("decode", answer, facts=DECODE)
    http = HttpConfig(api_key=("one", "two"), shutdown_grace_s=1)
    async with instances(d), routing([], [d.url], http, tenant_requests_per_minute=2) as (_, url):
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        assert [(await post(url, one))[0] for _ in range(2)] == [200, 200]
        status, retry_after = await post(url, one)
        assert (status, 25 <= int(retry_after or 0) <= 30) == (429, True)
        assert (await post(url, two))[0] == 200
        assert len(d.calls) == 3


async def test_a_tenants_key_is_a_key(tmp_path: Path) -> None:
    d, file = Peer("decode", answer, facts=DECODE), tmp_path / "tenants.toml"
    file.write_text('[acme]\napi_key = ["one", "two"]\nrequests_per_minute = 2\n')
    async with instances(d), routing([], [d.url], tenants_file=file) as (_, url):
        statuses = [(await post(url, {"Authorization": f"Bearer {key}"}))[0] for key in ("one", "one", "one", "three")]
        assert [(await post(url, {}))[0], *statuses] == [401, 200, 200, 429, 401]
    file.write_text('[acme]\napi_key = ["a b"]\n')
    with pytest.raises(ConfigError, match=r"--tenants-file .*\[acme\]: a key must be printable"):
        read_tenants(file, Limits())


async def test_a_limit_of_tokens_counts_what_is_asked_for() -> None:
    d = Peer("decode", answer, facts=DECODE)
    async with instances(d), routing([], [d.url], tenant_tokens_per_minute=100) as (_, url):
        assert (await post(url, prompt=[1] * 50, max_tokens=40))[0] == 200
        assert (await post(url, prompt=[1] * 50, max_tokens=40))[0] == 429
        assert (await post(url, prompt=["a", "b", "c"], max_tokens=5))[0] == 429
        assert (await post(url, prompt=[1], max_tokens="five"))[0] == 400
        assert (await post(url, prompt=[1], max_tokens=5))[0] == 200


async def test_a_tenant_with_all_it_may_have_holds_up_no_other() -> None:
    d = Peer("decode", answer_when_told, facts=DECODE)
    settings = {"tenant_max_in_flight": 1, "tenant_by": "user"}
    async with instances(d), routing([], [d.url], **settings) as (router, url):
        asked = [asyncio.create_task(post(url, stream=True, user=user)) for user in ("a", "a", "b")]
        async with asyncio.timeout(30):
            await eventually(lambda: not (len(d.calls) < 2 or not router.turns.num_waiting))
        assert sorted(call.body["user"] for call in d.calls) == ["a", "b"]
        d.go.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 3


async def test_the_priority_goes_to_both_instances() -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer, facts=DECODE)
    async with instances(p, d), routing([p.url], [d.url], disaggregate_from="0") as (_, url):
        assert (await post(url, priority=-7))[0] == 200
    assert [one.calls[0].body["priority"] for one in (p, d)] == [-7, -7]
