"""Requests of other APIs take the ways of chat requests: both legs, sessions, limits, waiting, traffic, errors."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from yarl import URL

from kvferry.http.server.config import HttpConfig
from router.peers import (
    CHAT_END,
    CONCURRENT,
    DECODE,
    Cut,
    Peer,
    Streaming,
    chat,
    chat_event,
    failing,
    instances,
    routing,
)
from router.peers import ticket as give_ticket

MESSAGES: dict[str, Any] = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "How much?"}]}


async def post(url: str, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(url + path, json=body) as response,
    ):
        return response.status, await response.json()


async def test_both_legs_get_chat_requests_and_all_of_it_is_counted() -> None:
    p, d = Peer("prefill", give_ticket, facts=CONCURRENT), Peer("decode", chat, facts=DECODE)
    async with instances(p, d), routing([p.url], [d.url]) as (_, url):
        status, message = await post(url, "/v1/messages", {**MESSAGES, "metadata": {"user_id": "u"}, "system": "s"})
        assert (status, message["content"]) == (200, [{"type": "text", "text": "done"}])
        assert message["usage"]["input_tokens"] == 3
        for peer in (p, d):
            [call] = peer.calls
            assert call.path == "/v1/chat/completions"
            assert call.body["messages"][0] == {"role": "system", "content": "s"}
            assert call.headers["accept-encoding"] == "identity"
        assert p.calls[0].body["max_tokens"] == 1
        async with aiohttp.ClientSession() as session:
            async with session.get(url + "/kvferry/decisions") as response:
                [decision] = (await response.json())["decisions"]
            assert (decision["has_session"], decision["path"]) == (True, "/v1/chat/completions")
            async with session.get(url + "/kvferry/traffic") as response:
                assert (await response.json())["num_arrived"] == 1
            async with session.get(url + "/metrics") as response:
                assert 'path="/v1/messages"' in await response.text()


@pytest.mark.parametrize(
    ("fields", "headers", "has_session"),
    [
        ({}, {}, False),
        ({"user": "u"}, {}, True),
        ({"prompt_cache_key": "k"}, {}, True),
        ({"session_id": "s"}, {}, True),
        ({"session_id": 5}, {}, False),
        ({}, {"X-Session-Id": "s"}, True),
    ],
)
async def test_a_conversation_has_several_names(
    fields: dict[str, Any], headers: dict[str, str], has_session: bool
) -> None:
    d = Peer("decode", chat)
    async with instances(d), routing([], [d.url]) as (_, url):
        await post(url, "/v1/chat/completions", {**MESSAGES, **fields}, **headers)
        async with aiohttp.ClientSession() as session, session.get(url + "/kvferry/decisions") as response:
            assert [one["has_session"] for one in (await response.json())["decisions"]] == [has_session]


async def test_tokens_are_counted_by_an_instance() -> None:
    async def count(peer: Peer, request: Request, body: Any) -> Response:
        return JSONResponse({"count": 7, "max_model_len": 99, "tokens": [1]})

    d = Peer("decode", count, more_paths=("/tokenize",))
    async with instances(d), routing([], [d.url]) as (_, url):
        body = {"model": "m", "messages": MESSAGES["messages"]}
        assert await post(url, "/v1/messages/count_tokens", body) == (200, {"input_tokens": 7})
        [call] = d.calls
        assert (call.path, call.body) == ("/tokenize", body)


async def test_a_refused_request_reaches_no_instance() -> None:
    d = Peer("decode", chat)
    async with instances(d), routing([], [d.url]) as (_, url):
        status, body = await post(url, "/v1/messages", {**MESSAGES, "container": "c"})
        assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
        assert "container" in body["error"]["message"]
    assert d.calls == []


@pytest.mark.parametrize("streams", [False, True])
async def test_an_error_of_an_instance_is_told_as_the_api_does(streams: bool) -> None:
    d = Peer("decode", failing(400, "too long"))
    async with instances(d), routing([], [d.url]) as (_, url):
        status, body = await post(url, "/v1/messages", {**MESSAGES, "stream": streams})
        assert (status, body["error"]) == (400, {"type": "invalid_request_error", "message": "too long"})


@pytest.mark.parametrize(
    "wrong", [b"", b"[]", b'{"choices": []}', b'{"choices": [{"message": 5}]}', b"\xff", b'{"choices": [{}]}']
)
async def test_an_answer_that_is_no_chats_is_an_error(wrong: bytes) -> None:
    async def answer(peer: Peer, request: Request, body: Any) -> Response:
        return Response(wrong, media_type="application/json")

    d = Peer("decode", answer)
    async with instances(d), routing([], [d.url]) as (_, url):
        status, body = await post(url, "/v1/messages", MESSAGES)
        assert (status, body["error"]["type"]) == (502, "api_error")


async def test_a_stream_with_an_unstreamed_answer_is_translated_all_the_same() -> None:
    async def answer(peer: Peer, request: Request, body: Any) -> Response:
        return await chat(peer, request, {})

    d = Peer("decode", answer)
    async with instances(d), routing([], [d.url]) as (_, url):
        status, body = await post(url, "/v1/messages", {**MESSAGES, "stream": True})
        assert (status, body["content"][0]["text"]) == (200, "done")


async def test_a_client_that_leaves_ends_the_instances_work() -> None:
    async def begin(peer: Peer, request: Request, body: Any) -> Response:
        return Streaming(peer, request, [chat_event("one")], [CHAT_END])

    d = Peer("decode", begin)
    async with instances(d), routing([], [d.url]) as (_, url), aiohttp.ClientSession() as session:
        async with session.post(url + "/v1/messages", json={**MESSAGES, "stream": True}) as response:
            assert (await response.content.readline()).startswith(b"event: message_start")
        await d.disconnected.wait()


async def test_a_stream_goes_on_while_compiled_code_relays_others() -> None:
    """A translated stream is never forwarded as it is."""

    async def many(peer: Peer, request: Request, body: Any) -> Response:
        events = [chat_event(f"{number} ") for number in range(300)]
        return StreamingResponse(iter([*events, CHAT_END]), media_type="text/event-stream")

    d = Peer("decode", many)
    async with instances(d), routing([], [d.url]) as (_, url), aiohttp.ClientSession() as session:
        async with session.post(url + "/v1/messages", json={**MESSAGES, "stream": True}) as response:
            content = await response.read()
    assert b"chatcmpl" not in content
    assert content.count(b"event: content_block_delta") == 300
    assert content.endswith(b'data: {"type":"message_stop"}\n\n')


async def test_a_ticket_of_a_client_reaches_no_instance() -> None:
    forged = {"do_remote_prefill": True, "transfer_id": "x", "remote_host": "evil", "remote_port": 1}
    d = Peer("decode", chat)
    async with instances(d), routing([], [d.url]) as (_, url):
        for path, prompt in (("/v1/messages", MESSAGES), ("/v1/responses", {"input": "x"})):
            status, _ = await post(url, path, {**prompt, "kv_transfer_params": forged})
            assert status == 200
    assert "evil" not in str([call.body for call in d.calls])


# Responses.


async def request(
    url: str, method: str, path: str, body: dict[str, Any] | None = None, **headers: str
) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, url + path, json=body) as response,
    ):
        return response.status, await response.json()


async def test_a_response_goes_over_both_legs_and_on() -> None:
    p, d = Peer("prefill", give_ticket, facts=CONCURRENT), Peer("decode", chat, facts=DECODE)
    async with instances(p, d), routing([p.url], [d.url], policy="session") as (_, url):
        _, first = await post(url, "/v1/responses", {"model": "m", "input": "How much?"})
        assert first["output"][0]["content"][0]["text"] == "done"
        body = {"input": "And now?", "previous_response_id": first["id"]}
        _, second = await post(url, "/v1/responses", {**body, "max_output_tokens": 5})
        assert second["previous_response_id"] == first["id"]
        assert [message["content"] for message in p.calls[1].body["messages"]] == ["How much?", "done", "And now?"]
        assert p.calls[1].body["max_completion_tokens"] == 1
        _, listed = await request(url, "GET", "/kvferry/decisions")
        assert [decision["has_session"] for decision in listed["decisions"]] == [True, True]


@pytest.mark.parametrize("knows_keys", [True, False])
async def test_a_response_is_of_the_key_that_requested_it(knows_keys: bool) -> None:
    d = Peer("decode", chat)
    http = HttpConfig(api_key=("mine", "yours"), shutdown_grace_s=1) if knows_keys else None
    mine, yours = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer yours"}
    async with instances(d), routing([], [d.url], http) as (_, url):
        _, response = await request(url, "POST", "/v1/responses", {"input": "x"}, **mine)
        path = f"/v1/responses/{response['id']}"
        follow = {"input": "x", "previous_response_id": response["id"]}
        for method, more, body in (
            ("GET", "", None),
            ("GET", "/input_items", None),
            ("DELETE", "", None),
            ("POST", "/cancel", None),
        ):
            status, answer = await request(url, method, path + more, body, **yours)
            assert (status, answer["error"]["code"]) == (404, "response_not_found")
        status, answer = await request(url, "POST", "/v1/responses", follow, **yours)
        assert (status, answer["error"]["code"]) == (400, "previous_response_not_found")
        assert (await request(url, "GET", path, **mine))[0] == 200
        assert (await request(url, "POST", "/v1/responses", follow, **mine))[0] == 200
        assert (await request(url, "DELETE", path, **mine))[1]["deleted"]
    assert len(d.calls) == 2


async def test_a_response_is_of_the_tenant_that_requested_it() -> None:
    d = Peer("decode", chat)
    async with instances(d), routing([], [d.url], tenant_by="header:X-Tenant") as (_, url):
        _, response = await request(url, "POST", "/v1/responses", {"input": "x"}, **{"X-Tenant": "a"})
        path = f"/v1/responses/{response['id']}"
        statuses = [(await request(url, "GET", path, **{"X-Tenant": name}))[0] for name in ("a", "b", "")]
        assert statuses == [200, 404, 404]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/responses/resp_0", 404),
        ("GET", "/v1/responses/", 404),
        ("GET", "/v1/responses/..%2f..%2fmetrics", 404),
        ("GET", "/v1/responses/%00", 404),
        ("GET", "/v1/responses/resp_1/other", 404),
        ("GET", "/v1/responses/" + "x" * 4000, 404),
        ("POST", "/v1/responses/resp_0", 405),
        ("POST", "/v1/responses/resp_0/compact", 404),
        ("POST", "/v1/responses/compact", 405),
        ("GET", "/v1/responses/resp_0/cancel", 405),
        ("PUT", "/v1/responses/resp_0", 405),
        ("GET", "/v1/responses", 405),
        ("GET", "/v1/messages", 405),
    ],
)
async def test_forged_paths_reach_no_instance(method: str, path: str, status: int) -> None:
    d = Peer("decode", chat)
    async with instances(d), routing([], [d.url]) as (_, url), aiohttp.ClientSession() as session:
        async with session.request(method, URL(url + path, encoded=True)) as response:
            assert response.status == status
            assert "error" in await response.json()
    assert d.calls == d.others == []


async def test_lists_of_input_are_in_pages() -> None:
    d = Peer("decode", chat)
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    async with instances(d), routing([], [d.url]) as (_, url):
        _, response = await request(url, "POST", "/v1/responses", {"input": items})
        path = f"/v1/responses/{response['id']}/input_items"
        _, page = await request(url, "GET", f"{path}?order=asc&limit=3")
        assert [item["content"][0]["text"] for item in page["data"]] == ["0", "1", "2"]
        assert page["has_more"]
        _, page = await request(url, "GET", f"{path}?order=asc&after={page['last_id']}")
        assert [item["content"][0]["text"] for item in page["data"]] == ["3", "4"]
        assert not page["has_more"]
        _, page = await request(url, "GET", path)
        assert [item["content"][0]["text"] for item in page["data"]] == ["4", "3", "2", "1", "0"]
        for wrong in ("limit=0", "limit=101", "limit=x", "order=up", "after=x", "limit=1&limit=2"):
            assert (await request(url, "GET", f"{path}?{wrong}"))[0] == 400
        assert (await request(url, "GET", f"/v1/responses/{response['id']}?stream=true"))[0] == 400


async def test_a_long_conversation_is_read_beside_the_event_loop() -> None:
    d = Peer("decode", chat)
    async with instances(d), routing([], [d.url]) as (_, url):
        _, response = await request(url, "POST", "/v1/responses", {"input": "word " * 50_000})
        for _ in range(2):
            body = {"input": "more", "previous_response_id": response["id"]}
            status, response = await request(url, "POST", "/v1/responses", body)
            assert status == 200
        assert len(d.calls[-1].body["messages"]) == 5


async def test_a_lost_stream_is_not_stored() -> None:
    async def cut(peer: Peer, request: Request, body: Any) -> Response:
        return Cut([chat_event("one")])

    d = Peer("decode", cut)
    async with (
        instances(d),
        routing([], [d.url]) as (router, url),
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/responses", json={"input": "x", "stream": True}) as response,
    ):
        events = (await response.read()).decode()
        assert '"type":"error"' in events.split("\n\n")[-2]
        assert router.responses.statistics()["responses"] == 0


async def test_a_conversation_is_no_longer_than_a_body_and_counts_as_one() -> None:
    """Its turns are short, and compressed where they are stored."""
    num_buffered = []

    async def look(peer: Peer, request: Request, body: Any) -> Response:
        num_buffered.append(router.admission.num_bytes)
        return await chat(peer, request, body)

    d = Peer("decode", look)
    async with instances(d), routing([], [d.url], max_body="64KiB", max_buffered="200KiB") as (router, url):
        previous, statuses = {}, []
        for _ in range(8):
            status, response = await request(url, "POST", "/v1/responses", {"input": "x" * 10_000, **previous})
            statuses.append(status)
            previous = {"previous_response_id": response.get("id")} if status == 200 else previous
        assert statuses == [200] * 6 + [413] * 2
        assert response["error"]["param"] == "previous_response_id"
        assert num_buffered == sorted(num_buffered)
        assert num_buffered[-1] > 60_000
        assert router.admission.num_bytes == 0
