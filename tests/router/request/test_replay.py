"""vLLM's streams whose instance is lost: another is asked the same, and the client gets only what it does not have."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from router.peers import Cut, Peer, instances, routing

WORDS = ["The", " quick", " brown", " é日", "", " fox", ' "finish_reason":"x', " jumps", " over", " it"]
BODY = {"model": "m", "prompt": "Hello", "max_tokens": 10, "temperature": 0, "stream": True}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "stream": True}


def chunks(body: Any, sizes: list[int], created: int, words: list[str]) -> list[bytes]:
    """As vLLM writes them, `sizes` tokens to an event."""
    chat = "messages" in body
    head = {"id": "cmpl-1", "created": created, "model": "m"}
    events: list[dict[str, Any]] = []
    if chat:
        events.append({**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    done = 0
    while done < len(words):
        size = sizes[len(events) % len(sizes)]
        some, numbers = words[done : done + size], list(range(done, min(done + size, len(words))))
        done += size
        finish = "stop" if done >= len(words) else None
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if chat:
            choice |= {"delta": {"content": "".join(some)}, "logprobs": {"content": [{"token": one} for one in some]}}
        else:
            logprobs = {
                "tokens": some,
                "token_logprobs": numbers,
                "text_offset": numbers,
                "top_logprobs": [{}] * len(some),
            }
            choice |= {"text": "".join(some), "logprobs": logprobs, "token_ids": numbers}
        events.append({**head, "choices": [choice]})
    events.append({**head, "choices": [], "usage": {"completion_tokens": len(words)}})
    return [
        *(b"data: " + json.dumps(one, separators=(",", ":")).encode() + b"\n\n" for one in events),
        b"data: [DONE]\n\n",
    ]


def answering(sizes: list[int], created: int, *, cut_after: int | None = None, words: list[str] = WORDS) -> Any:
    async def answer(peer: Peer, request: Request, body: Any) -> Response:
        found = chunks(body, sizes, created, words)
        if cut_after is not None:
            return Cut(found[:cut_after])
        return StreamingResponse(each(found), media_type="text/event-stream")

    return answer


async def each(events: list[bytes]) -> AsyncIterator[bytes]:
    for event in events:
        yield event


def a_vllm(answer: Any) -> Peer:
    return Peer("decode", answer, vllm="0.32.0")


async def ask(url: str, body: dict[str, Any]) -> list[Any]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as response:
        assert response.status == 200
        text = await response.text()
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def whole(events: list[Any]) -> dict[str, Any]:
    """All that the events say, joined."""
    found: dict[str, Any] = {"text": "", "ids": [], "logprobs": [], "finish": [], "roles": 0, "usage": []}
    found["created"] = {event["created"] for event in events}
    for event in events:
        found["usage"] += [event["usage"]] if event.get("usage") else []
        for choice in event["choices"]:
            delta, logprobs = choice.get("delta", {}), choice.get("logprobs") or {}
            found["text"] += choice.get("text", "") + delta.get("content", "")
            found["roles"] += "role" in delta
            found["ids"] += choice.get("token_ids") or []
            found["logprobs"] += [one["token"] for one in logprobs.get("content", [])] + logprobs.get("tokens", [])
            found["finish"] += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return found


@pytest.mark.diagonal
@pytest.mark.parametrize("body", [BODY, CHAT, {**BODY, "temperature": 1.0, "seed": 5}])
@pytest.mark.parametrize("sizes", [[1], [2], [3, 1], [100]])
async def test_wherever_it_broke_off_and_however_the_events_are_cut(body: dict[str, Any], sizes: list[int]) -> None:
    async with instances(one := a_vllm(answering([1], 7))), routing([], [one.url]) as (_, url):
        expected = whole(await ask(url, body))
    assert expected["text"] == "".join(WORDS)
    for after in range(1, len(chunks(body, [1], 7, WORDS))):
        bad, good = a_vllm(answering([1], 7, cut_after=after)), a_vllm(answering(sizes, 8))
        async with instances(bad, good), routing([], [bad.url, good.url]) as (_, url):
            assert whole(await ask(url, body)) == expected, after
        assert good.calls[0].body == bad.calls[0].body == body


def of_three(sizes: list[int], created: int, cut_after: int | None = None) -> Any:
    """Three choices, of different words and lengths, whose events take turns."""

    async def answer(peer: Peer, request: Request, body: Any) -> Response:
        texts = [WORDS, WORDS[::-1], WORDS[:4]]
        streams = [chunks(body, sizes[number:] + sizes[:number], created, words) for number, words in enumerate(texts)]
        found = []
        for number, events in enumerate(streams):
            found += [(at, event.replace(b'"index":0', b'"index":%d' % number)) for at, event in enumerate(events[:-2])]
        events = [event for _, event in sorted(found, key=lambda one: one[0])] + streams[0][-2:]
        return Cut(events[:cut_after]) if cut_after else StreamingResponse(each(events), media_type="text/event-stream")

    return answer


def by_choice(events: list[Any]) -> Any:
    assert not [event for event in events if "error" in event]
    numbers = {choice["index"] for event in events for choice in event["choices"]}
    return {
        number: whole([
            {**event, "choices": [choice for choice in event["choices"] if choice["index"] == number]}
            for event in events
        ])
        for number in numbers
    }  # fmt: skip


@pytest.mark.parametrize("body", [{**BODY, "n": 3}, {**CHAT, "n": 3}])
@pytest.mark.parametrize("sizes", [[1], [3, 1, 2]])
async def test_several_choices(body: dict[str, Any], sizes: list[int]) -> None:
    async with instances(one := a_vllm(of_three([1], 7))), routing([], [one.url]) as (_, url):
        expected = by_choice(await ask(url, body))
    assert [expected[number]["finish"] for number in range(3)] == [["stop"]] * 3
    for after in range(1, 26, 3):
        bad, good = a_vllm(of_three([1], 7, after)), a_vllm(of_three(sizes, 8))
        async with instances(bad, good), routing([], [bad.url, good.url]) as (_, url):
            assert by_choice(await ask(url, body)) == expected, after
        assert good.calls


@pytest.mark.parametrize(
    "words", [["The", " slow"], [*WORDS[:3], " red", *WORDS[4:]], ["The"], [], ["The", " quick", " brown"]]
)
async def test_another_answer_is_not_glued_to_the_first(words: list[str]) -> None:
    bad, other = a_vllm(answering([1], 7, cut_after=4)), a_vllm(answering([1], 8, words=words))
    async with instances(bad, other), routing([], [bad.url, other.url]) as (_, url):
        events = await ask(url, BODY)
    assert events[-1]["error"]["code"] == "instance_lost"
    assert "".join(WORDS).startswith(whole_text(events[:-1]))


async def test_who_answers_otherwise_is_known_as_before() -> None:
    bad, other = a_vllm(answering([1], 7, cut_after=4)), a_vllm(answering([1], 8, words=["The", " slow"]))
    async with instances(bad, other), routing([], [bad.url, other.url]) as (router, url):
        facts = router.services.pools.decode.instances[1].facts
        assert "error" in (await ask(url, BODY))[-1]
        assert router.services.pools.decode.instances[1].facts is facts


@pytest.mark.parametrize("strange", [b"nonsense", b'{"choices":[7]}', b'{"choices":7}', b"[" * 100_000])
async def test_a_stream_of_strange_events_that_breaks_off_ends_with_an_error(strange: bytes) -> None:
    async def answer(peer: Peer, request: Request, body: Any) -> Response:
        return Cut([b"data: " + strange + b"\n\n"])

    bad, good = a_vllm(answer), a_vllm(answering([1], 7))
    async with instances(bad, good), routing([], [bad.url, good.url]) as (_, url):
        async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=BODY) as response:
            text = await response.text()
    assert "internal" not in text
    assert text.endswith("data: [DONE]\n\n")


async def test_an_answer_without_a_finish_reason_is_over_when_it_says_so() -> None:
    async def answer(peer: Peer, request: Request, body: Any) -> Response:
        event = b'data: {"choices":[{"index":0,"text":"one","finish_reason":null}]}\n\n'
        return StreamingResponse(each([event, b"data: [DONE]\n\n"]), media_type="text/event-stream")

    async with instances(one := a_vllm(answer)), routing([], [one.url]) as (_, url):
        assert whole_text(await ask(url, BODY)) == "one"
    assert len(one.calls) == 1


def whole_text(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize(
    "fields", [{"temperature": 1.0}, {"temperature": None}, {"n": 2, "temperature": 1.0}, {"use_beam_search": True}]
)
async def test_what_does_not_repeat_itself_ends_with_an_error(fields: dict[str, Any]) -> None:
    bad, good = a_vllm(answering([1], 7, cut_after=4)), a_vllm(answering([1], 7))
    async with instances(bad, good), routing([], [bad.url, good.url]) as (_, url):
        assert (await ask(url, {**BODY, **fields}))[-1]["error"]["code"] == "instance_lost"
    assert not good.calls


def calling(sizes: list[int], created: int, cut_after: int | None = None, *, other: str = "") -> Any:
    """As vLLM calls two functions: each call's id and name first, then its arguments in chunks; ids are random."""
    head = {"id": "cmpl-1", "created": created, "model": "m"}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, {"reasoning": "so"}, {"content": "Look: "}]
    for index, (name, arguments) in enumerate((("get_weather", '{"city": "Zürich"}'), ("get_time", "{}"))):
        first = {"index": index, "id": f"call-{created}-{index}", "type": "function"}
        deltas.append({"tool_calls": [{**first, "function": {"name": name, "arguments": ""}}]})
        arguments += other
        size = sizes[index % len(sizes)]
        for begin in range(0, len(arguments), size):
            chunk = {"index": index, "function": {"arguments": arguments[begin : begin + size]}}
            deltas.append({"tool_calls": [chunk]})
    events: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    events.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    written = [b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n" for event in events]
    written.append(b"data: [DONE]\n\n")

    async def answer(peer: Peer, request: Request, body: Any) -> Response:
        if cut_after is not None:
            return Cut(written[:cut_after])
        return StreamingResponse(each(written), media_type="text/event-stream")

    return answer


def message_of(events: list[Any]) -> Any:
    """What a client makes of a stream: the calls by their number, their ids, texts and the finish reason."""
    texts: dict[str, str] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"]
        for name in ("reasoning", "content"):
            texts[name] = texts.get(name, "") + delta.get(name, "")
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(part["index"], {"id": [], "name": "", "arguments": ""})
            call["id"] += [part["id"]] if "id" in part else []
            for name in ("name", "arguments"):
                call[name] += part.get("function", {}).get(name, "")
    return texts, calls, events[-1]["choices"][0]["finish_reason"]


@pytest.mark.parametrize("sizes", [[3], [5, 1], [40]])
async def test_calls_go_on_with_the_ids_that_the_client_has(sizes: list[int]) -> None:
    async with instances(one := a_vllm(calling([3], 7))), routing([], [one.url]) as (_, url):
        events = await ask(url, CHAT)
    texts, calls, finish_reason = message_of(events)
    assert [call["id"] for call in calls.values()] == [["call-7-0"], ["call-7-1"]]
    for after in range(1, len(events)):
        bad, good = a_vllm(calling([3], 7, cut_after=after)), a_vllm(calling(sizes, 8))
        async with instances(bad, good), routing([], [bad.url, good.url]) as (_, url):
            found_texts, found, found_reason = message_of(await ask(url, CHAT))
        assert (found_texts, found_reason) == (texts, finish_reason), after
        assert [{**call, "id": len(call["id"])} for call in found.values()] == [
            {**call, "id": 1} for call in calls.values()
        ], after


async def test_other_calls_are_not_glued_to_the_first() -> None:
    bad, other = a_vllm(calling([3], 7, cut_after=7)), a_vllm(calling([3], 8))
    async with instances(bad, other), routing([], [bad.url, other.url]) as (_, url):
        assert "error" not in (await ask(url, CHAT))[-1]
    bad, other = a_vllm(calling([3], 7, cut_after=12, other="x")), a_vllm(calling([3], 8))
    async with instances(bad, other), routing([], [bad.url, other.url]) as (_, url):
        assert (await ask(url, CHAT))[-1]["error"]["code"] == "instance_lost"
