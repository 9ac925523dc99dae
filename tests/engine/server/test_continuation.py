"""An answer that breaks off after any event, and goes on at another server: the client sees the same bytes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from kvferry.core.messages.continuation import PROGRESS_HEADER, StreamMark, decode_mark, is_last

from .fake_engine import DeterministicEngine, WritingEngine
from .running import running

TEXT = {"prompt": "Zürich 日本語", "max_tokens": 24, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "naïve 🎉"}], "max_tokens": 24, "stream": True}
ALL_USAGE = {"include_usage": True, "continuous_usage_stats": True}


class Broken:
    """A stream, event by event, each with its mark if it has one."""

    def __init__(self, body: bytes) -> None:
        self.events: list[bytes] = []
        self.marks: list[bytes | None] = []
        for event in body.removesuffix(b"\n\n").split(b"\n\n"):
            mark = None
            if event.startswith(b": "):
                mark, _, event = event.partition(b"\n")
            self.events.append(event)
            self.marks.append(mark)

    def so_far(self, num_events: int) -> tuple[StreamMark, list[int]]:
        """The first mark, and the tokens of so many events."""
        marks = [decode_mark(mark) for mark in self.marks[:num_events] if mark is not None]
        return marks[0], [token for mark in marks for token in mark.tokens]

    @property
    def place_of_last(self) -> int:
        """The event with the finish reason."""
        return next(place for place, mark in enumerate(self.marks) if mark is not None and is_last(mark))


class Asker:
    def __init__(self, client: aiohttp.ClientSession, engine: DeterministicEngine) -> None:
        self.client, self.engine = client, engine

    async def stream(self, path: str, body: dict[str, Any], *, marks: bool = True) -> Broken:
        headers = {"X-Request-Id": "one"} | ({PROGRESS_HEADER: "1"} if marks else {})
        async with self.client.post(path, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            assert (PROGRESS_HEADER in response.headers) == marks
            return Broken(await response.read())

    async def refused(self, path: str, body: dict[str, Any]) -> str:
        async with self.client.post(path, json=body) as response:
            assert response.status == 400
            return str((await response.json())["error"]["message"])


@pytest.fixture
async def asker(tokenizer: Any) -> AsyncIterator[Asker]:
    engine = DeterministicEngine(tokenizer)
    async with running(engine) as server, aiohttp.ClientSession(server.url) as client:
        yield Asker(client, engine)


def continuing(body: dict[str, Any], first: StreamMark, tokens: list[int]) -> dict[str, Any]:
    told = {"token_ids": tokens, "seed": first.seed, "created": first.created, "answer": first.answer}
    return {**body, "kv_transfer_params": {"continue_from": {**told, "num_cached_tokens": first.num_cached_tokens}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**TEXT, "temperature": 0}),
        ("/v1/completions", {**TEXT, "seed": 3}),
        ("/v1/completions", {**TEXT, "max_tokens": 60}),
        ("/v1/completions", {**TEXT, "logprobs": 2, "echo": True}),
        ("/v1/completions", {**TEXT, "return_token_ids": True, "stream_options": ALL_USAGE, "seed": 4}),
        ("/v1/completions", {**TEXT, "seed": 5, "stop": ["zzz", "é日"], "include_stop_str_in_output": True}),
        ("/v1/chat/completions", {**CHAT, "seed": 6}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 3, "stream_options": ALL_USAGE}),
        ("/v1/chat/completions", {**CHAT, "return_token_ids": True, "min_tokens": 20, "stop": ["e", " "]}),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}),
    ],
)
async def test_wherever_it_broke_off_the_client_has_the_same_bytes(
    asker: Asker, path: str, body: dict[str, Any]
) -> None:
    body = {"min_tokens": 12, **body}
    whole = await asker.stream(path, body)
    assert whole.place_of_last > 3
    for num_events in range(1, whole.place_of_last + 1):
        first, tokens = whole.so_far(num_events)
        rest = await asker.stream(path, continuing(body, first, tokens))
        assert [*whole.events[:num_events], *rest.events] == whole.events
        assert len(tokens) + len(rest.so_far(len(rest.events))[1]) == len(whole.so_far(len(whole.events))[1])


CALLS = (
    "<think>so\n</think>\n\nLook: "
    '<tool_call>{"name": "f", "arguments": {"a": "日本語 } and many more words"}}</tool_call>\n'
    '<tool_call>{"name": "f", "arguments": {"b": [1, {}]}}</tool_call> bye'
)
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS},
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"tools": TOOLS, "include_reasoning": False, "stop": ["words"]},
        {"tools": TOOLS, "logprobs": True, "return_token_ids": True},
        {"tools": TOOLS, "stream_options": ALL_USAGE},
        {},
    ],
)
async def test_calls_are_the_same_bytes_with_the_same_ids(tokenizer: Any, fields: dict[str, Any]) -> None:
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
    engines = WritingEngine(tokenizer, CALLS), WritingEngine(tokenizer, CALLS)
    async with (
        running(engines[0], **settings) as first_server,
        running(engines[1], **settings) as other_server,
        aiohttp.ClientSession(first_server.url) as client,
        aiohttp.ClientSession(other_server.url) as other_client,
    ):
        asker, other = Asker(client, engines[0]), Asker(other_client, engines[1])
        path, body = "/v1/chat/completions", {**CHAT, "max_tokens": 300, **fields}
        whole = await asker.stream(path, body)
        for num_events in range(1, whole.place_of_last + 1):
            first, tokens = whole.so_far(num_events)
            rest = await other.stream(path, continuing(body, first, tokens))
            assert [*whole.events[:num_events], *rest.events] == whole.events


async def test_what_parses_otherwise_does_not_continue(tokenizer: Any) -> None:
    async with running(WritingEngine(tokenizer, CALLS), tool_call_parser="hermes") as server:
        async with aiohttp.ClientSession(server.url) as client:
            asker, body = Asker(client, WritingEngine(tokenizer)), {**CHAT, "tools": TOOLS, "max_tokens": 300}
            whole = await asker.stream("/v1/chat/completions", body)
    async with running(WritingEngine(tokenizer, CALLS), tool_call_parser="glm") as server:
        async with aiohttp.ClientSession(server.url) as client:
            other = Asker(client, WritingEngine(tokenizer))
            message = await other.refused("/v1/chat/completions", continuing(body, *whole.so_far(2)))
    assert "was begun by an instance with another model" in message


async def test_only_what_would_give_the_same_answer_continues_it(asker: Asker) -> None:
    """Another model, other defaults of its sampling, other end tokens, another prompt: no answer is of two of them."""
    engine = asker.engine
    whole = await asker.stream("/v1/completions", TEXT | {"seed": 3})
    body = continuing(TEXT | {"seed": 3}, *whole.so_far(3))
    for name, other in [("model_identity", "b"), ("default_sampling", {"top_k": 3}), ("eos_token_ids", frozenset({9}))]:
        own = getattr(engine, name)
        setattr(engine, name, other)
        assert "was begun by an instance with another model" in await asker.refused("/v1/completions", body)
        setattr(engine, name, own)
    assert "another model" in await asker.refused("/v1/completions", body | {"prompt": "Zurich 日本語"})
    assert "another model" in await asker.refused("/v1/completions", body | {"cache_salt": "another tenant"})
    told = body["kv_transfer_params"]["continue_from"]
    unnamed = {name: value for name, value in told.items() if name != "answer"}
    nameless = body | {"kv_transfer_params": {"continue_from": unnamed}}
    assert "another model" in await asker.refused("/v1/completions", nameless)
    rest = await asker.stream("/v1/completions", body)
    assert [*whole.events[:3], *rest.events] == whole.events


async def test_an_answer_that_a_stop_string_ends(asker: Asker) -> None:
    free = await asker.stream("/v1/completions", {**TEXT, "seed": 7, "return_token_ids": True})
    text = "".join(text_of(event) for event in free.events[:-1])
    body = {**TEXT, "seed": 7, "stop": [text[10:16]]}
    whole = await asker.stream("/v1/completions", body)
    assert b'"finish_reason":"stop"' in whole.events[whole.place_of_last]
    for num_events in range(1, whole.place_of_last + 1):
        first, tokens = whole.so_far(num_events)
        rest = await asker.stream("/v1/completions", continuing(body, first, tokens))
        assert [*whole.events[:num_events], *rest.events] == whole.events
    first, tokens = free.so_far(len(free.events))
    assert "stop string" in await asker.refused("/v1/completions", continuing(body, first, tokens[:-1]))


def text_of(event: bytes) -> str:
    return str(json.loads(event.removeprefix(b"data: "))["choices"][0]["text"])


async def test_who_does_not_ask_sees_no_marks(asker: Asker) -> None:
    plain = await asker.stream("/v1/completions", {**TEXT, "seed": 1}, marks=False)
    marked = await asker.stream("/v1/completions", {**TEXT, "seed": 1})
    assert plain.marks == [None] * len(plain.events)
    assert len(plain.events) == len(marked.events)


async def test_several_choices_have_no_marks(asker: Asker) -> None:
    for body in ({**TEXT, "n": 2}, {**TEXT, "prompt": ["a", "b"]}):
        async with asker.client.post("/v1/completions", json=body, headers={PROGRESS_HEADER: "1"}) as response:
            assert PROGRESS_HEADER not in response.headers
            assert b"\n: " not in await response.read()


@pytest.mark.parametrize(
    ("told", "fields", "message"),
    [
        ({"token_ids": [5], "seed": 1, "created": 1}, {"stream": False}, "only a stream of one choice"),
        ({"token_ids": [5], "seed": 1, "created": 1}, {"n": 2}, "only a stream of one choice"),
        ({"token_ids": [5] * 24, "seed": 1, "created": 1}, {}, "complete with the 24 tokens"),
        ({"token_ids": [5] * 9000, "seed": 1, "created": 1}, {}, "complete with the 9000 tokens"),
        ({"token_ids": [10**6], "seed": 1, "created": 1}, {}, "1000000"),
        ({"token_ids": [-1], "seed": 1, "created": 1}, {}, "continue_from"),
        ({"token_ids": "5", "seed": 1, "created": 1}, {}, "continue_from"),
        ({"token_ids": [5], "seed": 2**70, "created": 1}, {}, "continue_from"),
        ({"token_ids": [5], "seed": 1, "created": -1}, {}, "continue_from"),
        ({"token_ids": [5], "seed": 1}, {}, "created"),
        ([], {}, "continue_from"),
    ],
)
async def test_what_cannot_be_continued_is_told_of(asker: Asker, told: Any, fields: Any, message: str) -> None:
    body = {**TEXT, **fields, "kv_transfer_params": {"continue_from": told}}
    assert message in await asker.refused("/v1/completions", body)
