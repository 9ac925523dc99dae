"""Requests of other APIs take the ways of chat requests: both legs, sessions, limits, waiting, traffic, errors."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from router.peers import CHAT_END, CONCURRENT, DECODE, Peer, Streaming, chat, chat_event, failing, instances, routing
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
