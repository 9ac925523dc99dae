"""At exact moments: errors before and after the first byte, clients that leave, bodies that are no good."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from kvferry.core.errors import DeadlineExceeded, HandOffFailed, QueueFull, Unavailable
from kvferry.core.messages.hand_off import TokenLogprobs
from kvferry.core.request import EngineOutput

from .fake_engine import Gate, ScriptedEngine, Step
from .running import Running, running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


def token(token_id: int = 70, **fields: Any) -> EngineOutput:
    return EngineOutput(request_id="r", token_ids=[token_id], **fields)


LAST = token(finish_reason="length")


@asynccontextmanager
async def scripted(
    tokenizer: Any, *script: Step, **settings: Any
) -> AsyncIterator[tuple[ScriptedEngine, Any, Running]]:
    """An engine that plays `script`, a client for its server, and the server."""
    engine = ScriptedEngine(tokenizer, script)
    async with running(engine, **settings) as server, aiohttp.ClientSession(server.url) as client:
        yield engine, client, server


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "messages": [{"role": "user", "content": "a"}], **fields}


async def events_of(response: aiohttp.ClientResponse) -> list[Any]:
    """The stream's events; all but the last are JSON."""
    text = (await response.read()).decode()
    assert text.endswith("\n\n")
    data = [event.removeprefix("data: ") for event in text[:-2].split("\n\n")]
    return [json.loads(event) if event != "[DONE]" else event for event in data]


# Errors.


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFull("the queue is full"), 429, "queue_full"),
        (Unavailable("no more"), 503, "unavailable"),
        (DeadlineExceeded("too late"), 400, "deadline_exceeded"),
        (HandOffFailed("the KV is lost"), 502, "hand_off_failed"),
        (ValueError("secret"), 500, None),
    ],
)
async def test_an_error_before_the_first_token_has_its_status(
    tokenizer: Any, path: str, stream: bool, error: Exception, status: int, code: str | None
) -> None:
    async with scripted(tokenizer, error) as (_, client, _):
        async with client.post(path, json=body(stream=stream)) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["code"]) == (status, code)
        assert response.headers.get("Retry-After") == ("1" if status in (429, 503) else None)
        assert "secret" not in answer["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_error_after_the_first_token_is_an_event(tokenizer: Any, path: str) -> None:
    failed = EngineOutput(request_id="r", finish_reason="error", error=HandOffFailed("the KV is lost"))
    async with scripted(tokenizer, token(), failed) as (engine, client, _):
        async with client.post(path, json=body(stream=True)) as response:
            *_, error, done = await events_of(response)
        assert response.status == 200
        assert error == {
            "error": {"message": "the KV is lost", "type": "hand_off_error", "param": None, "code": "hand_off_failed"}
        }
        assert done == "[DONE]"
        assert not engine.running


async def test_an_unforeseen_error_is_logged_and_not_told(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with scripted(tokenizer, token(), ZeroDivisionError("secret")) as (_, client, _):
        with caplog.at_level(logging.ERROR):
            header = {"X-Request-Id": "needle"}
            async with client.post(COMPLETIONS, json=body(stream=True), headers=header) as response:
                *_, error, done = await events_of(response)
    assert (error["error"]["type"], done) == ("server_error", "[DONE]")
    assert "needle" in error["error"]["message"]
    assert "secret" not in json.dumps(error)
    assert "needle" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_an_engine_that_aborts_or_just_ends_is_unavailable(tokenizer: Any) -> None:
    for script in ([EngineOutput(request_id="r", finish_reason="abort")], [token()], []):
        async with scripted(tokenizer, *script) as (_, client, _), client.post(COMPLETIONS, json=body()) as response:
            assert response.status == 503


async def test_one_choice_that_fails_ends_the_others(tokenizer: Any) -> None:
    gate = Gate()

    class FirstFails(ScriptedEngine):
        async def outputs(self, request: Any) -> AsyncIterator[EngineOutput]:
            if request.request_id.endswith("-1"):
                await gate.reached.wait()
                raise QueueFull("no room for the second")
            gate.reached.set()
            await gate.opened.wait()
            yield LAST

    engine = FirstFails(tokenizer)
    async with running(engine) as server, aiohttp.ClientSession(server.url) as client:
        async with client.post(COMPLETIONS, json=body(n=2)) as response:
            assert response.status == 429
        assert [request_id[-2:] for request_id in engine.aborted] == ["-0"]
        assert not engine.running


# Clients that leave.


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}], ids=str)
async def test_leaving_before_the_first_token_ends_the_request(tokenizer: Any, path: str, fields: Any) -> None:
    gate = Gate()
    async with scripted(tokenizer, gate) as (engine, client, _):
        asking = asyncio.create_task(client.post(path, json=body(**fields)))
        await gate.reached.wait()
        asking.cancel()
        await until_idle(engine)
        assert len(engine.aborted) == fields.get("n", 1)


async def test_leaving_a_stream_ends_the_request(tokenizer: Any) -> None:
    gate = Gate()
    async with scripted(tokenizer, token(), gate, LAST) as (engine, client, server):
        response = await client.post(CHAT, json=body(stream=True))
        await response.content.readline()
        await gate.reached.wait()
        response.close()
        await until_idle(engine)
        assert len(engine.aborted) == 1
        assert b'finished_reason="abort",model_name="test-model"} 1.0' in server.context.metrics.exposition(None)[0]


async def test_leaving_in_the_middle_of_the_body_is_no_error(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with scripted(tokenizer, LAST) as (engine, client, server):
        host, port = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        async with client.get("/health") as response:
            assert response.status == 200
        assert not engine.requests
    assert not caplog.records


async def until_idle(engine: ScriptedEngine) -> None:
    while engine.running or not engine.aborted:
        engine.ended.clear()
        await engine.ended.wait()


async def test_a_stop_string_closes_the_engines_iterator(tokenizer: Any) -> None:
    ids = tokenizer.backend_tokenizer.encode("the fox", add_special_tokens=False).ids
    gate = Gate()
    async with scripted(tokenizer, *(token(one) for one in ids), gate) as (engine, client, _):
        async with client.post(COMPLETIONS, json=body(stop="fox", kv_transfer_params={})) as response:
            answer = await response.json()
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("the ", "stop")
        assert len(engine.aborted) == 1


# Streams, byte by byte.


async def test_the_headers_go_out_with_the_first_token(tokenizer: Any) -> None:
    before, after = Gate(), Gate()
    async with scripted(tokenizer, before, token(), after, LAST) as (_, client, _):
        asking = asyncio.create_task(client.post(CHAT, json=body(stream=True)))
        await before.reached.wait()
        assert not asking.done()
        before.opened.set()
        response = await asking
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert b'"role":"assistant"' in await response.content.readline()
        await response.content.readline()
        assert b'"content":' in await response.content.readline()
        after.opened.set()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_a_character_in_several_tokens_is_sent_whole(tokenizer: Any) -> None:
    ids = tokenizer.backend_tokenizer.encode("a🎊b", add_special_tokens=False).ids
    assert len(ids) > 4
    script = [*(token(one) for one in ids), token(ids[0], finish_reason="length")]
    async with scripted(tokenizer, *script) as (_, client, _):
        async with client.post(COMPLETIONS, json=body(stream=True)) as response:
            *events, _ = await events_of(response)
        assert [event["choices"][0]["text"] for event in events] == ["a", "🎊", "b", "a"]
        extra = {"return_token_ids": True, "logprobs": 0}
        async with client.post(COMPLETIONS, json=body(stream=True, **extra)) as response:
            *events, _ = await events_of(response)
        assert [event["choices"][0]["token_ids"] for event in events] == [[one] for one in (*ids, ids[0])]


async def test_newlines_in_the_text_do_not_break_events(tokenizer: Any) -> None:
    ids = tokenizer.backend_tokenizer.encode("a\n\nb\r\n", add_special_tokens=False).ids
    script = [*(token(one) for one in ids), token(ids[0], finish_reason="length")]
    async with scripted(tokenizer, *script) as (_, client, _):
        async with client.post(COMPLETIONS, json=body(stream=True)) as response:
            *events, _ = await events_of(response)
        assert "".join(event["choices"][0]["text"] for event in events) == "a\n\nb\r\na"


async def test_infinite_logprobs_are_numbers(tokenizer: Any) -> None:
    place = TokenLogprobs(70, float("-inf"), 5, {71: -0.5})
    last = token(finish_reason="length", logprobs=[place])
    async with (
        scripted(tokenizer, last) as (_, client, _),
        client.post(COMPLETIONS, json=body(logprobs=1)) as response,
    ):
        assert (await response.json())["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


# Bodies, paths and headers.


async def test_a_body_that_is_too_large(tokenizer: Any) -> None:
    async with scripted(tokenizer, LAST, max_body_bytes=1000) as (engine, client, _):

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b" " * 100

        for data in (b" " * 2000, chunks()):
            async with client.post(COMPLETIONS, data=data, headers=JSON) as response:
                assert response.status == 413
                assert (await response.json())["error"]["code"] == "body_too_large"
        async with client.post(COMPLETIONS, json=body()) as response:
            assert response.status == 200
        assert len(engine.requests) == 1


async def test_what_is_not_json(tokenizer: Any) -> None:
    async with scripted(tokenizer, LAST) as (_, client, _):
        for data in (b"", b"prompt=a", b"[1]", b'{"prompt": "\xff"}'):
            async with client.post(COMPLETIONS, data=data, headers=JSON) as response:
                assert response.status == 400
                assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_unknown_paths_and_methods_have_the_envelope(tokenizer: Any) -> None:
    async with scripted(tokenizer) as (_, client, _):
        async with client.get("/v1/nothing") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "unknown_url")
        async with client.get(COMPLETIONS) as response:
            assert response.status == 405
            assert "Not allowed to GET" in (await response.json())["error"]["message"]
            assert response.headers["Allow"] == "POST"


async def test_request_ids(tokenizer: Any) -> None:
    async with scripted(tokenizer, LAST) as (_, client, _):

        async def ids(**request: Any) -> tuple[str, str]:
            async with client.post(COMPLETIONS, **request) as response:
                return response.headers["X-Request-Id"], (await response.json())["id"]

        assert await ids(json=body(), headers={"X-Request-Id": "mine"}) == ("mine", "cmpl-mine")
        assert await ids(json=body(request_id="in-the-body")) == ("in-the-body", "cmpl-in-the-body")
        for bad in ("a b", "x" * 200, "<script>", ""):
            given, _ = await ids(json=body(), headers={"X-Request-Id": bad})
            assert given != bad
            assert given.isalnum()
        async with client.get("/v1/nothing", headers={"X-Request-Id": "lost"}) as response:
            assert response.headers["X-Request-Id"] == "lost"


async def test_the_same_id_twice_is_two_requests_for_the_engine(tokenizer: Any) -> None:
    async with scripted(tokenizer, LAST) as (engine, client, _):
        for _ in range(2):
            async with client.post(COMPLETIONS, json=body(), headers={"X-Request-Id": "again"}) as response:
                assert response.status == 200
        first, second = (request.request_id for request in engine.requests)
        assert first != second
        assert first.startswith("cmpl-again-")
        assert first.endswith("-0")
