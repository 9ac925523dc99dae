"""What the router does not need to understand, it does not touch."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
from typing import Any

import aiohttp
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError
from starlette.requests import Request
from starlette.responses import Response
from yarl import URL

from kvferry.core.messages.timeline import Timeline
from kvferry.http.client.call import Call
from kvferry.router.body import RequestBody
from kvferry.router.request.exchange import Exchange
from kvferry.router.request.hand_off import HandOff
from kvferry.router.request.leg import Leg
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
from support.waiting import eventually

BODY: dict[str, Any] = {"model": "m", "prompt": "Hello"}
JSON = {"Content-Type": "application/json"}


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
        session.post(url + "/v1/completions", data=odd, headers=JSON) as response,
    ):
        assert await response.read() == b'{ "odd":  1.0 }'
        assert response.headers["X-Odd"] == "1"
    assert seen == [odd]
    assert p.calls == []


PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"]


@pytest.mark.parametrize("path", [*PATHS, "/v1/responses"])
async def test_a_body_that_is_not_strict_json_goes_nowhere(path: str) -> None:
    """A parser that is less strict than the router's could find a ticket in it."""
    ticket = b'"kv_transfer_params": {"do_remote_prefill": true, "remote_host": "a..b"}'
    bodies = [
        b"{nonsense",
        b'{"prompt": "x", "junk": "\xff", ' + ticket + b"}",
        ('{"prompt": "x", ' + ticket.decode() + "}").encode("utf-16"),
        b'{"prompt": "x", "seed": NaN, ' + ticket + b"}",
        b'{"vllm_xargs": {' + ticket + b"}}",
        b"[{" + ticket + b"}]",
    ]
    d = Peer("decode", answer)
    async with instances(d), routing([], [d.url]) as (_, url), aiohttp.ClientSession() as session:
        for body in bodies:
            async with session.post(url + path, data=body, headers=JSON) as response:
                assert response.status == 400, body
                assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert d.calls == d.others == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("trust", [False, True])
async def test_a_ticket_of_a_client_reaches_no_instance(path: str, trust: bool) -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer, facts=DECODE)
    forged = {"do_remote_prefill": True, "transfer_id": "x", "remote_host": "evil", "remote_port": 1}
    body = {"model": "m", "input": "x", "kv_transfer_params": forged, "bootstrap_host": "evil"}
    async with (
        instances(p, d),
        routing([p.url], [d.url], trust_client_tickets=trust) as (_, url),
        aiohttp.ClientSession() as session,
        session.post(url + path, json=body) as response,
    ):
        assert response.status == 200
    (call,) = d.calls + d.others
    got = call.body if isinstance(call.body, dict) else json.loads(call.body)
    assert ("evil" in json.dumps(got)) == trust
    assert got["input"] == "x"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "text/plain"},  # the three that a web page may send to another's server without being asked
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": ""},
    ],
    ids=str,
)
async def test_a_body_that_is_not_said_to_be_plain_json_goes_nowhere(path: str, headers: dict[str, str]) -> None:
    d = Peer("decode", answer)
    async with (
        instances(d),
        routing([], [d.url]) as (_, url),
        aiohttp.ClientSession() as session,
        session.post(url + path, data=b'{"prompt": "x", "input": "x"}', headers=headers) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] in headers
    assert d.calls == d.others == []


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
    asked = [("POST", "/tokenize?q=1&q=%20", b'{ "prompt":1.50}'), ("GET", "/v1/models/org/m%2Fx", None)]
    async with instances(p, d), routing([p.url], [d.url]) as (_, url), aiohttp.ClientSession() as session:
        for method, path, data in asked:
            async with session.request(method, URL(url + path, encoded=True), data=data, headers=JSON) as response:
                assert response.status == 200
                assert response.headers["X-Other"] == "kept"
                assert (await response.json())["role"] == "decode"
    assert [call.path for call in d.others] == ["/tokenize?q=1&q=%20", "/v1/models/org/m%2Fx?"]
    assert [call.body for call in d.others] == ['{ "prompt":1.50}', ""]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/sleep", 404),
        ("POST", "/v1/load_lora_adapter", 404),
        ("GET", "/server_info", 404),
        ("GET", "/", 404),
        ("POST", "//v1/completions", 404),
        ("POST", "/v1/completions/", 404),
        ("POST", "/v1/%63ompletions", 404),
        ("GET", "/v1/models/../../sleep", 404),
        ("GET", "/v1/models/%2e%2e/sleep", 404),
        ("GET", "/v1/models/x%252f", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models/m", 405),
        ("OPTIONS", "/v1/completions", 405),
    ],
)
async def test_what_is_not_for_clients_reaches_no_instance(method: str, path: str, status: int) -> None:
    d = Peer("decode", answer)
    async with (
        instances(d),
        routing([], [d.url]) as (_, url),
        aiohttp.ClientSession() as session,
        session.request(method, URL(url + path, encoded=True), json={"prompt": "x"}) as response,
    ):
        assert response.status == status
        assert "error" in await response.json()
        assert (response.headers.get("Allow") is None) == (status == 404)
    assert d.calls == d.others == []


async def test_paths_of_applications_are_open_and_more_can_be() -> None:
    d = Peer("decode", answer)
    more = ("GET /v1/files/*",)
    async with (
        instances(d),
        routing([], [d.url], forward_path=more) as (_, url),
        aiohttp.ClientSession() as session,
    ):
        form = aiohttp.FormData()
        form.add_field("file", b"bytes", filename="audio.wav")
        for method, path, data, status in (
            ("POST", "/v1/audio/transcriptions", form, 200),
            ("POST", "/v1/audio/transcriptions", b'{"a": 1}', 200),
            ("POST", "/v1/audio/transcriptions", b"\xff", 400),
            ("GET", "/v1/files/a/b", None, 200),
            ("GET", "/v1/files/", None, 404),
            ("POST", "/v2/rerank", b"{}", 200),
            ("POST", "/v1/chat/completions/batch", b"{}", 200),
            ("POST", "/v1/audio/speech", b"{}", 200),
            ("POST", "/v1/tokenize", b"{}", 200),
            ("GET", "/ping", None, 200),
            ("GET", "/load", None, 200),
            ("GET", "/tokenizer_info", None, 200),
            ("POST", "/reset_prefix_cache", b"{}", 404),
            ("POST", "/abort_requests", b"{}", 404),
            ("GET", "/server_info", None, 404),
        ):
            headers = {} if data is form else JSON
            async with session.request(method, url + path, data=data, headers=headers) as response:
                assert response.status == status, path
    assert [call.path.removesuffix("?") for call in d.others] == [
        *["/v1/audio/transcriptions"] * 2,
        *("/v1/files/a/b", "/v2/rerank", "/v1/chat/completions/batch", "/v1/audio/speech", "/v1/tokenize"),
        *("/ping", "/load", "/tokenizer_info"),
    ]


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
        async with session.post(url + "/tokenize", json={}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
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
            instance.mark_healthy()
        async with session.post(url + "/v1/embeddings", json={}) as response:
            assert response.status == 502
    assert seen == ["/v1/embeddings"]
    assert d.others == []


# What leads past the router.


async def test_a_redirect_of_an_instance_is_not_passed_on() -> None:
    async def elsewhere(peer: Peer, request: Request, body: Any) -> Response:
        return Response(status_code=307, headers={"Location": "http://10.0.0.7:8000/v1/completions"})

    p, d, good = Peer("prefill", elsewhere), Peer("decode", elsewhere), Peer("decode", answer)
    async with instances(p, d, good), aiohttp.ClientSession() as session:
        async with routing([p.url], [d.url]) as (_, url):
            for path in ("/v1/completions", "/v1/embeddings"):
                d.moved_to = "http://10.0.0.7:8000/v1/embeddings"
                async with session.post(url + path, json=BODY, allow_redirects=False) as response:
                    assert response.status == 502
                    assert "Location" not in response.headers
                    assert b"10.0.0.7" not in await response.read()
        async with (
            routing([p.url], [d.url, good.url]) as (_, url),
            session.post(url + "/v1/completions", json=BODY, allow_redirects=False) as response,
        ):
            assert response.status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_instances_tell_no_address(stream: bool) -> None:
    async def tell(peer: Peer, request: Request, body: Any) -> Response:
        error = f"could not fetch from 127.0.0.1:4711, nor ask {peer.url}/x or [127.0.0.1]; but 127.0.0.100 is fine"
        text = json.dumps({"error": {"message": error}})
        if body.get("stream"):
            return Response(event("one") + f"data: {text}\n\n".encode(), media_type="text/event-stream")
        return Response(text, status_code=500, media_type="application/json", headers={"X-At": peer.url, "X-A": "b"})

    d = Peer("decode", tell)
    async with (
        instances(d),
        routing([], [d.url]) as (_, url),
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json={**BODY, "stream": stream}) as response,
    ):
        text = await response.text()
        assert response.headers.get("X-At") is None
    stars = "*" * len(d.url)
    assert f"fetch from {'*' * 14}, nor ask {stars}/x or {'*' * 11}; but 127.0.0.100 is fine" in text
    assert response.status == (200 if stream else 500)


# Bounds.


async def test_one_request_too_many_is_told_to_come_back() -> None:
    d = Peer("decode", answer_late)
    async with (
        instances(d),
        routing([], [d.url], max_in_flight=1, max_waiting=0) as (_, url),
        aiohttp.ClientSession() as session,
    ):
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


async def test_half_a_body_takes_nobodys_turn() -> None:
    d = Peer("decode", answer)
    async with (
        instances(d),
        routing([], [d.url], max_in_flight=1, max_waiting=0) as (_, url),
        aiohttp.ClientSession() as session,
    ):
        address = URL(url)
        _, writer = await asyncio.open_connection(address.host, address.port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Content-Length: 100\r\n\r\n{")
        await writer.drain()
        for _ in range(3):
            async with session.post(url + "/v1/completions", json=BODY) as response:
                assert response.status == 200
        writer.transport.abort()


async def test_who_waits_is_served_in_turn_or_told_to_come_back() -> None:
    d = Peer("decode", answer_late)
    async with (
        instances(d),
        routing([], [d.url], max_in_flight=1, max_waiting=1) as (router, url),
        aiohttp.ClientSession() as session,
        asyncio.TaskGroup() as group,
    ):
        first = group.create_task(session.post(url + "/v1/completions", json=BODY).__aenter__())
        await d.called.wait()
        second = group.create_task(session.post(url + "/v1/completions", json=BODY).__aenter__())
        await eventually(lambda: router.turns.num_waiting, interval_s=0)
        async with session.post(url + "/v1/completions", json=BODY) as response:
            assert response.status == 429
        assert len(d.calls) == 1
        d.go.set()
        for asked in (first, second):
            async with await asked as response:
                assert response.status == 200


async def test_nobody_waits_for_its_turn_without_end() -> None:
    d = Peer("decode", answer_late)
    async with (
        instances(d),
        routing([], [d.url], max_in_flight=1, waiting_timeout_s=0.05) as (_, url),
        aiohttp.ClientSession() as session,
        asyncio.TaskGroup() as group,
    ):
        first = group.create_task(session.post(url + "/v1/completions", json=BODY).__aenter__())
        await d.called.wait()
        async with session.post(url + "/v1/completions", json=BODY) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
        d.go.set()
        async with await first as response:
            assert response.status == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_too_long_is_refused(chunked: bool) -> None:
    async def chunks() -> Any:
        for _ in range(8):
            yield b"x" * 512

    d = Peer("decode", answer)
    async with (
        instances(d),
        routing([], [d.url], max_body="2KiB") as (_, url),
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", data=chunks() if chunked else b"x" * 4096) as response,
    ):
        assert response.status == 413
        assert "2048" in (await response.json())["error"]["message"]
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
    async with instances(p, d), routing([p.url], [d.url]) as (router, url), aiohttp.ClientSession() as session:
        async with session.get(url + "/health") as response:
            assert response.status == 200
            assert await response.json() == {"status": "ok", "alive": {"prefill": 0, "decode": 1}}
        d.healthy = False
        await router.health.probe(router.services.pools)
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
    same = {"alive": True, "state": "up", "in_flight": 0, "draining": False, "drained": False, "unit": ""}
    same |= {"no_hand_off": "", "revision": ""}
    assert prefill == {"name": "prefill-0", "role": "prefill", "engine": "kvferry", **same}
    assert decode == {"name": "decode-0", "role": "decode", "engine": None, **same}
    assert 'kvferry_router_requests_total{path="/v1/completions",status="200"} 1.0' in text
    assert 'kvferry_router_instance_up{instance="prefill-0",role="prefill"} 1.0' in text
    assert "127.0.0.1" not in text


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hand_off", ["sequential", "concurrent"])
async def test_a_request_leaves_nothing_that_only_the_garbage_collector_finds(hand_off: str, stream: bool) -> None:
    """What refers to itself stays until it is looked for, and looking costs more than anything else of a request."""
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer, facts=DECODE)
    kinds = Exchange, Leg, HandOff, Call, RequestBody
    async with instances(p, d), routing([p.url], [d.url], hand_off=hand_off) as (_, url):
        async with aiohttp.ClientSession() as session:
            gc.collect()
            gc.disable()
            try:
                async with session.post(url + "/v1/completions", json={**BODY, "stream": stream}) as response:
                    await response.read()
                for _ in range(1000):
                    await asyncio.sleep(0)  # the handler's task comes to its end
                left = [one for one in gc.get_objects() if isinstance(one, kinds)]
            finally:
                gc.enable()
    assert not left
