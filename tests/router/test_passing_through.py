"""What the router does not need to understand, it does not touch."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import aiohttp
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError
from starlette.requests import Request
from starlette.responses import Response
from yarl import URL

from kvferry.core.timeline import Timeline
from router.peers import (
    CONCURRENT,
    DECODE,
    Peer,
    answer,
    answer_late,
    answer_when_told,
    cut,
    cut_in_stream,
    event,
    failing,
    instances,
    routing,
    serving,
    ticket,
    unused_address,
)

BODY: dict[str, Any] = {"model": "m", "prompt": "Hello"}


@pytest.mark.parametrize("hand_off", ["sequential", "concurrent"])
async def test_a_stream_comes_chunk_by_chunk(hand_off: str) -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer_when_told, facts=DECODE)
    async with (
        instances(p, d),
        routing([p.url], [d.url], hand_off=hand_off) as (_, url),
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json={**BODY, "stream": True}) as response,
    ):
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream"
        assert await response.content.readany() == event("one")
        d.go.set()
        assert await response.content.read() == event("two") + b"data: [DONE]\n\n"


@pytest.mark.parametrize("hand_off", ["sequential", "concurrent"])
async def test_both_legs_get_the_clients_headers_and_the_same_request_id(hand_off: str) -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer, facts=DECODE)
    sent = {"Authorization": "Bearer sk-1", "OpenAI-Organization": "org", "X-Request-Id": "my-id", "Cookie": "a=b"}
    async with (
        instances(p, d),
        routing([p.url], [d.url], hand_off=hand_off) as (_, url),
        aiohttp.ClientSession(headers=sent) as session,
        session.post(url + "/v1/completions?beta=%2Fx", json=BODY) as response,
    ):
        assert response.headers["X-Request-Id"] == "my-id"
    for call in (p.calls[0], d.calls[0]):
        assert {name: call.headers[name.lower()] for name in sent} == sent
        stamps = Timeline(**json.loads(call.headers["x-kvferry-timeline"]))
        assert stamps.arrived is not None
        assert stamps.routed is not None
        assert stamps.arrived <= stamps.routed
    assert p.calls[0].headers["x-kvferry-timeline"] == d.calls[0].headers["x-kvferry-timeline"]


async def test_a_request_id_is_made_and_is_the_same_everywhere() -> None:
    p, d = Peer("prefill", ticket), Peer("decode", answer)
    async with (
        instances(p, d),
        routing([p.url], [d.url]) as (_, url),
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json=BODY) as response,
    ):
        name = response.headers["X-Request-Id"]
    assert p.calls[0].headers["x-request-id"] == d.calls[0].headers["x-request-id"] == name


async def test_a_whole_request_keeps_its_very_bytes() -> None:
    seen = []

    async def keep(peer: Peer, request: Request, body: Any) -> Response:
        seen.append(await request.body())
        return Response(b'{ "odd":  1.0 }', media_type="application/json", headers={"X-Odd": "1"})

    odd = b'{ "prompt" : ["a", "b"],\n "x": 1.50, "big": 123456789012345678901234567890 }'
    p, d = Peer("prefill", ticket), Peer("decode", keep)
    async with (
        instances(p, d),
        routing([p.url], [d.url]) as (_, url),
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", data=odd) as response,
    ):
        assert await response.read() == b'{ "odd":  1.0 }'
        assert response.headers["X-Odd"] == "1"
    assert seen == [odd]
    assert p.calls == []


async def test_a_body_that_is_not_json_is_judged_by_an_instance() -> None:
    d = Peer("decode", failing(400, "not JSON"))
    async with (
        instances(d),
        routing([], [d.url]) as (_, url),
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", data=b"{nonsense") as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["message"] == "not JSON"
    assert d.calls[0].body == b"{nonsense"


async def test_a_compressed_answer_stays_compressed_and_tickets_are_read_all_the_same() -> None:
    packed = gzip.compress(b'{"choices": []}')

    async def compress(peer: Peer, request: Request, body: Any) -> Response:
        return Response(packed, media_type="application/json", headers={"Content-Encoding": "gzip"})

    p, d = Peer("prefill", ticket), Peer("decode", compress)
    async with (
        instances(p, d),
        routing([p.url], [d.url]) as (_, url),
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.post(url + "/v1/completions", json=BODY, headers={"Accept-Encoding": "gzip"}) as response,
    ):
        assert response.headers["Content-Encoding"] == "gzip"
        assert await response.read() == packed
    assert p.calls[0].headers["accept-encoding"] == "identity"
    assert d.calls[0].headers["accept-encoding"] == "gzip"
    assert d.calls[0].body["kv_transfer_params"]["do_remote_prefill"]


# Other paths.


async def test_other_paths_go_to_decode_as_they_are() -> None:
    p, d = Peer("prefill", ticket), Peer("decode", answer)
    async with instances(p, d), routing([p.url], [d.url]) as (_, url), aiohttp.ClientSession() as session:
        for method, path in [("POST", "/tokenize"), ("GET", "/v1/models"), ("POST", "/v1/x%2Fy?q=1&q=%20")]:
            data = b"data" if method == "POST" else None
            async with session.request(method, url + path, data=data) as response:
                assert response.status == 200
                assert response.headers["X-Other"] == "kept"
                assert (await response.json())["role"] == "decode"
    assert [call.path for call in d.others] == ["/tokenize?", "/v1/models?", "/v1/x%2Fy?q=1&q=%20"]
    assert [call.body for call in d.others] == ["data", "", "data"]


async def test_models_come_from_prefill_when_decode_is_gone() -> None:
    p = Peer("prefill", ticket)
    async with (
        unused_address() as nowhere,
        instances(p),
        routing([p.url], [nowhere]) as (_, url),
        aiohttp.ClientSession() as session,
    ):
        async with session.get(url + "/v1/models") as response:
            assert (await response.json())["role"] == "prefill"
        async with session.post(url + "/tokenize") as response:
            assert response.status == 503
            assert (await response.json())["error"]["type"] == "unavailable_error"


@pytest.mark.parametrize(
    "path", ["/kvferry/release", "/kvferry/instance", "//kvferry/release", "/v1/..%2Fkvferry/release"]
)
async def test_what_is_between_router_and_instances_is_not_for_clients(path: str) -> None:
    d = Peer("decode", answer)
    async with (
        instances(d),
        routing([], [d.url]) as (_, url),
        aiohttp.ClientSession() as session,
        session.post(URL(url + path, encoded=True), json={"transfer_id": "x"}) as response,
    ):
        assert response.status == 404
    assert d.others == []
    assert d.released.empty()


async def test_a_post_that_may_have_been_begun_is_not_repeated() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            seen.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": True})

    seen: list[str] = []
    d = Peer("decode", answer)
    async with (
        instances(d),
        serving(broken) as broken_url,
        routing([], [broken_url, d.url]) as (router, url),
        aiohttp.ClientSession() as session,
    ):
        for instance in router.services.pools.decode.instances:
            instance.alive = True
        async with session.post(url + "/v1/embeddings", json={}) as response:
            assert response.status == 502
    assert seen == ["/v1/embeddings"]
    assert d.others == []


# Bounds.


async def test_one_request_too_many_is_told_to_come_back() -> None:
    d = Peer("decode", answer_late)
    async with instances(d), routing([], [d.url], max_in_flight=1) as (_, url), aiohttp.ClientSession() as session:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(session.post(url + "/v1/completions", json=BODY).__aenter__())
            await d.called.wait()
            async with session.post(url + "/v1/completions", json=BODY) as response:
                assert response.status == 429
                assert int(response.headers["Retry-After"]) >= 1
                assert (await response.json())["error"]["type"] == "rate_limit_error"
            async with session.get(url + "/health") as response:
                assert response.status == 200
            d.go.set()
        async with first.result() as response:
            assert response.status == 200
        async with session.post(url + "/v1/completions", json=BODY) as response:
            assert response.status == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_too_long_is_refused(chunked: bool) -> None:
    async def pieces() -> Any:
        for _ in range(8):
            yield b"x" * 512

    d = Peer("decode", answer)
    async with (
        instances(d),
        routing([], [d.url], max_body="2KiB") as (_, url),
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", data=pieces() if chunked else b"x" * 4096) as response,
    ):
        assert response.status == 413
        assert "2.0 KiB" in (await response.json())["error"]["message"]
    assert d.calls == []


async def test_bodies_held_are_bounded_together() -> None:
    d = Peer("decode", answer_late)
    body = {**BODY, "padding": "x" * 1500}
    async with (
        instances(d),
        routing([], [d.url], max_body="2KiB", max_buffered="2KiB") as (_, url),
        aiohttp.ClientSession() as session,
        asyncio.TaskGroup() as group,
    ):
        first = group.create_task(session.post(url + "/v1/completions", json=body).__aenter__())
        await d.called.wait()
        async with session.post(url + "/v1/completions", json=body) as response:
            assert response.status == 429
        d.go.set()
        async with await first as response:
            assert response.status == 200


# What the router says of itself.


async def test_health_follows_decode() -> None:
    p, d = Peer("prefill", ticket, healthy=False), Peer("decode", answer)
    async with instances(p, d), routing([p.url], [d.url]) as (_, url), aiohttp.ClientSession() as session:
        async with session.get(url + "/health") as response:
            assert response.status == 200
            assert await response.json() == {"alive": {"prefill": 0, "decode": 1}}
        d.healthy = False
        async with session.get(url + "/health") as response:
            assert response.status == 503


async def test_instances_and_metrics_can_be_looked_at() -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer)
    async with instances(p, d), routing([p.url], [d.url]) as (_, url), aiohttp.ClientSession() as session:
        async with session.post(url + "/v1/completions", json=BODY) as response:
            await response.read()
        async with session.get(url + "/kvferry/instances") as response:
            prefill, decode = (await response.json())["instances"]
        async with session.get(url + "/metrics") as response:
            text = await response.text()
    assert prefill == {
        "role": "prefill",
        "url": p.url,
        "alive": True,
        "in_flight": 0,
        "engine": "kvferry",
        "facts": CONCURRENT,
    }
    assert decode == {"role": "decode", "url": d.url, "alive": True, "in_flight": 0, "engine": None, "facts": None}
    assert 'kvferry_router_requests_total{path="/v1/completions",status="200"} 1.0' in text
    assert f'kvferry_router_instance_up{{instance="{p.url}",role="prefill"}} 1.0' in text


async def test_a_request_of_a_client_that_left_is_counted_as_such() -> None:
    d = Peer("decode", answer_late)
    async with instances(d), routing([], [d.url]) as (_, url), aiohttp.ClientSession() as session:
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(session.post(url + "/v1/completions", json=BODY).__aenter__())
            await d.called.wait()
            asked.cancel()
        await d.disconnected.wait()
        async with session.get(url + "/metrics") as response:
            assert 'requests_total{path="/v1/completions",status="499"} 1.0' in await response.text()


async def test_an_answer_that_is_no_stream_breaks_off_visibly() -> None:
    """Half a JSON object must not look complete."""

    async def half(peer: Peer, request: Request, body: Any) -> Response:
        return Half()

    class Half(Response):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            headers = [(b"content-type", b"application/json"), (b"content-length", b"100")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"choices": [', "more_body": True})

    d = Peer("decode", half)
    async with (
        instances(d),
        routing([], [d.url]) as (_, url),
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json=BODY) as response,
    ):
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_cut_without_an_answer_is_never_a_silent_end() -> None:
    d = Peer("decode", cut)
    async with (
        instances(d),
        routing([], [d.url]) as (_, url),
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json={**BODY, "stream": True}) as response,
    ):
        assert response.status == 502


async def test_the_openai_client_sees_what_happens() -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer, facts=DECODE)
    async with (
        instances(p, d),
        routing([p.url], [d.url]) as (_, url),
        AsyncOpenAI(base_url=url + "/v1", api_key="sk-mine", max_retries=0) as client,
    ):
        stream = await client.completions.create(model="m", prompt="Hello", stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["one", "two"]
        assert d.calls[0].headers["authorization"] == "Bearer sk-mine"
        d.answering = failing(400, "bad temperature")
        with pytest.raises(BadRequestError, match="bad temperature"):
            await client.completions.create(model="m", prompt="Hello")
        d.answering = cut_in_stream
        broken = await client.completions.create(model="m", prompt="Hello", stream=True)
        assert (await anext(broken)).choices[0].text == "one"
        with pytest.raises(APIError, match="broke off"):
            await anext(broken)
