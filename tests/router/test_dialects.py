"""Errors, keys and request ids as the clients of each API have them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from anthropic import (
    APIStatusError,
    AsyncAnthropic,
    AuthenticationError,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    RateLimitError,
)
from openai import APIError, AsyncOpenAI
from starlette.requests import Request
from starlette.responses import Response

from kvferry.http.server.config import HttpConfig
from kvferry.router.config import RouterConfig
from router.peers import DECODE, Cut, Peer, chat, chat_event, failing, instances, routing

MESSAGES: dict[str, Any] = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "How much?"}]}


def typed(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


async def cut_chat(peer: Peer, request: Request, body: Any) -> Response:
    """The connection breaks within a chat's stream."""
    return Cut([chat_event("The dose "), chat_event("is 5")])


@asynccontextmanager
async def served(
    *answering: Any, http: HttpConfig | None = None, config: RouterConfig | None = None, **settings: Any
) -> AsyncIterator[tuple[Peer, str]]:
    """One instance that answers on every path, behind a router."""
    peer = Peer("decode", *answering, vllm="0.32.0")
    async with instances(peer), routing([], [peer.url], http, **settings) as (_, url):
        yield peer, url


def anthropic_client(url: str, key: str = "k") -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


async def test_a_cut_message_is_an_error_to_anthropics_client() -> None:
    async with served(cut_chat) as (_, url), anthropic_client(url) as client:
        chunks: list[str] = []

        async def read() -> None:
            async with client.messages.stream(**MESSAGES) as stream:
                async for text in stream.text_stream:
                    chunks.append(text)

        with pytest.raises(APIStatusError, match="incomplete") as caught:
            await read()
        assert "".join(chunks) == "The dose is 5"
        body = caught.value.body
        assert isinstance(body, dict)
        assert (body["type"], body["error"]["type"]) == ("error", "api_error")


async def test_a_cut_response_is_an_error_to_openais_client() -> None:
    async with (
        served(cut_chat) as (_, url),
        AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client,
    ):
        chunks: list[str] = []

        async def read() -> None:
            async for received in await client.responses.create(model="m", input="How much?", stream=True):
                chunks.append(getattr(received, "delta", ""))

        with pytest.raises(APIError, match="incomplete"):
            await read()
        assert "".join(chunks) == "The dose is 5"


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/messages", b"event: error\ndata: {"),
        ("/v1/responses", b"event: error\ndata: {"),
        ("/v1/chat/completions", b"data: [DONE]"),
    ],
)
async def test_the_last_event_of_a_cut_stream_is_its_apis(path: str, last: bytes) -> None:
    prompt = {"input": "x"} if path == "/v1/responses" else MESSAGES
    async with (
        served(cut_chat) as (_, url),
        aiohttp.ClientSession() as session,
        session.post(url + path, json={**prompt, "stream": True}) as response,
    ):
        events = (await response.read()).split(b"\n\n")
        assert events[-2].startswith(last), events
        assert (b"data: [DONE]" in events) == (path == "/v1/chat/completions")


async def test_errors_of_the_router_in_anthropics_dialect() -> None:
    http = HttpConfig(api_key=("right",), shutdown_grace_s=1)
    async with served(chat, http=http) as (_, url):
        async with anthropic_client(url, "wrong") as client:
            with pytest.raises(AuthenticationError) as unauthorized:
                await client.messages.create(**MESSAGES)
        async with anthropic_client(url, "right") as client:
            with pytest.raises(NotFoundError) as missing:
                await client.messages.batches.list()
            with pytest.raises(BadRequestError) as bad:
                await client.messages.create(**MESSAGES, extra_body={"kv": {"kv_transfer_params": {}}})
        require_dialect(unauthorized.value, "authentication_error", "x-api-key")
        require_dialect(missing.value, "not_found_error", "/v1/messages/batches")
        require_dialect(bad.value, "invalid_request_error", "kv_transfer_params")


async def test_overload_and_no_instance_in_anthropics_dialect() -> None:
    async def wait(peer: Peer, request: Request, body: Any) -> Response:
        await peer.go.wait()
        return await chat(peer, request, body)

    async with (
        served(wait, max_in_flight=1, max_waiting=0) as (peer, url),
        anthropic_client(url) as client,
        asyncio.TaskGroup() as group,
    ):
        first = group.create_task(client.messages.with_raw_response.create(**MESSAGES))
        await peer.called.wait()
        with pytest.raises(RateLimitError) as full:
            await client.messages.create(**MESSAGES)
        peer.go.set()
        await first
        await peer.close()
        with pytest.raises(InternalServerError) as gone:
            await client.messages.create(**MESSAGES)
    require_dialect(full.value, "rate_limit_error", "")
    assert gone.value.status_code == 503
    require_dialect(gone.value, "overloaded_error", "no decode instance")


def require_dialect(error: APIStatusError, kind: str, text: str) -> None:
    body = error.body
    assert isinstance(body, dict)
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert text in body["error"]["message"]
    assert body["request_id"] == error.response.headers["x-request-id"]


async def test_an_instances_error_stays_as_it_is() -> None:
    async with served(failing(404, "no such model")) as (_, url), anthropic_client(url) as client:
        with pytest.raises(NotFoundError, match="no such model"):
            await client.messages.create(**MESSAGES)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "right"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": " "}, 401),
        ({"Authorization": "Bearer wrong", "x-api-key": "right"}, 200),
        ({"Authorization": "Bearer right", "x-api-key": "for-nobody"}, 200),
        ({"Authorization": "Basic right"}, 401),
    ],
)
async def test_a_key_may_come_in_either_header_and_goes_no_further(headers: dict[str, str], status: int) -> None:
    http = HttpConfig(api_key=("right",), shutdown_grace_s=1)
    async with (
        served(chat, http=http) as (peer, url),
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/messages", json=MESSAGES, headers=headers) as response,
    ):
        assert response.status == status
        assert "right" not in str([call.headers for call in peer.calls])


async def test_two_keys_in_one_header_are_refused() -> None:
    async with served(chat) as (_, url), aiohttp.ClientSession() as session:
        headers = [("x-api-key", "a"), ("x-api-key", "b")]
        async with session.post(url + "/v1/messages", json=MESSAGES, headers=headers) as response:
            assert response.status == 400


@pytest.mark.parametrize(
    ("header", "field", "expected"),
    [
        (None, "mine", "mine"),
        ("header", "mine", "header"),
        (None, "not fit\nfor a header", None),
        (None, 7, None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_the_request_id_of_a_body_names_the_request(
    path: str, header: str | None, field: Any, expected: str | None
) -> None:
    d = Peer("decode", chat, facts=DECODE)
    headers = {"X-Request-Id": header} if header else {}
    async with (
        instances(d),
        routing([], [d.url]) as (_, url),
        aiohttp.ClientSession() as session,
        session.post(url + path, json={**MESSAGES, "request_id": field}, headers=headers) as response,
    ):
        assert response.status == 200
        [call] = d.calls
        assert call.headers["x-request-id"] == response.headers["X-Request-Id"]
        assert call.headers["x-request-id"] == expected or expected is None
        assert call.body["request_id"] == field


@pytest.mark.parametrize("sent", [None, "yes"])
async def test_streams_are_not_buffered_by_proxies(sent: str | None) -> None:
    async def stream(peer: Peer, request: Request, body: Any) -> Response:
        response = await chat(peer, request, {"stream": True})
        if sent is not None:
            response.headers["X-Accel-Buffering"] = sent
        return response

    for path in ("/v1/chat/completions", "/v1/messages"):
        async with (
            served(stream) as (_, url),
            aiohttp.ClientSession() as session,
            session.post(url + path, json={**MESSAGES, "stream": True}) as response,
        ):
            assert response.headers.getall("X-Accel-Buffering") == [sent or "no"]
