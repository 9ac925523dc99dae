"""Requests with the fields of vLLM's API, before a prefill and a decode server: each is answered as by one server,
whole and streamed, and goes over both legs unless it cannot."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
import pytest

from support.processes import KvferryProcess
from support.vllm_fields import CHAT, CHATS, COMPLETION, COMPLETIONS, WHOLE_ON_D, body_of
from support.vllm_servers import Server, router_before, vllm_servers

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(1500)]

PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
P2P = {"kv_connector": "P2pConnector"}
FILLER = -9999.0
CHANGING = frozenset({"id", "created", "system_fingerprint", "kv_transfer_params", "metrics", "prompt_tokens_details"})
"""What differs from one answer to the next one, or with what is cached."""


@dataclass(frozen=True)
class Asked:
    """One request."""

    name: str
    path: str
    body: Mapping[str, Any]
    is_split: bool


@dataclass
class Started:
    alone: KvferryProcess
    router: KvferryProcess


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("fields")
    servers = {
        "alone": Server("serve", None, PARSERS, ("--prefill", "0")),
        "prefill": Server("prefill", P2P, PARSERS),
        "decode": Server("decode", P2P, PARSERS),
    }
    with (
        vllm_servers(folder, **servers) as found,
        router_before(folder, found["prefill"], found["decode"], "--disaggregate-from", "0") as router,
    ):
        yield Started(found["alone"], router)


def requests(*, stream: bool) -> list[Asked]:
    """All of them."""
    split = [(f"chat, {name}", CHAT, more, True) for name, more in CHATS.items()]
    split += [(name, COMPLETION, more, True) for name, more in COMPLETIONS.items()]
    others = [(name, path, more, False) for name, (path, more) in WHOLE_ON_D.items()]
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return [Asked(name, path, body_of(path, more) | streamed, legs) for name, path, more, legs in (*split, *others)]


def ask(url: str, asked: Sequence[Asked], at_once: int) -> list[tuple[int, Any]]:
    """Status and answer of each."""

    async def answer(session: aiohttp.ClientSession, gate: asyncio.Semaphore, one: Asked) -> tuple[int, Any]:
        headers = {"x-request-id": id_of(one, at_once)}
        async with gate, session.post(url + one.path, json=one.body, headers=headers) as response:
            text = await response.text()
            if response.status == 200 and one.body.get("stream"):
                return response.status, joined(text)
            return response.status, stable(json.loads(text))

    async def everything() -> list[tuple[int, Any]]:
        gate = asyncio.Semaphore(at_once)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=280)) as session:
            return await asyncio.gather(*(answer(session, gate, one) for one in asked))

    return asyncio.run(everything())


def id_of(one: Asked, at_once: int) -> str:
    """The request's id."""
    return re.sub("[^a-z0-9]+", "-", f"{one.name} {bool(one.body.get('stream'))} {at_once}".lower())


def split_ids(url: str) -> set[str]:
    """The ids of the last requests that went over both legs."""
    decisions = httpx.get(url + "/kvferry/decisions?limit=512", timeout=30).json()["decisions"]
    return {decision["request_id"] for decision in decisions if decision["prefill"]}


def stable(value: Any) -> Any:
    """Without what differs each time, and without the tokens with which vLLM 0.32 fills up the log-probabilities of
    requests that run beside one with `logprob_token_ids`."""
    if isinstance(value, dict):
        return {key: stable(inner) for key, inner in value.items() if key not in CHANGING and inner != FILLER}
    return [stable(inner) for inner in value] if isinstance(value, list) else value


def joined(text: str) -> dict[str, Any]:
    """The choices of a stream, put together, with its usage, its error and its end."""
    choices: dict[int, dict[str, Any]] = {}
    result: dict[str, Any] = {"choices": choices, "ends": text.rstrip().endswith("data: [DONE]")}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        result |= {key: stable(event[key]) for key in ("usage", "error") if event.get(key)}
        for choice in event.get("choices", []):
            add(choices.setdefault(choice["index"], {}), {**choice, **(choice.get("delta") or {})})
    return result


def add(whole: dict[str, Any], chunk: Mapping[str, Any]) -> None:
    """Add one chunk of a choice."""
    for key in ("text", "content", "reasoning", "reasoning_content"):
        if chunk.get(key):
            whole[key] = whole.get(key, "") + chunk[key]
    for key in ("finish_reason", "stop_reason", "prompt_token_ids"):
        if chunk.get(key) is not None:
            whole[key] = chunk[key]
    if chunk.get("token_ids"):
        whole["token_ids"] = whole.get("token_ids", []) + chunk["token_ids"]
    for call in chunk.get("tool_calls") or []:
        known = whole.setdefault("calls", {}).setdefault(call["index"], {"name": "", "arguments": ""})
        for key in known:
            known[key] += (call.get("function") or {}).get(key) or ""
    for key, values in (chunk.get("logprobs") or {}).items():
        if values:
            whole[key] = whole.get(key, []) + stable(values)


def alike(one: Any, other: Any) -> bool:
    """Equal, but for what the size of a batch does to numbers in float32."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=1e-3)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@pytest.mark.parametrize("at_once", [1, 16])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_answers_are_those_of_one_server(started: Started, stream: bool, at_once: int) -> None:
    asked = requests(stream=stream)
    expected = ask(started.alone.url, asked, at_once)
    found = ask(started.router.url, asked, at_once)
    split, wrong = split_ids(started.router.url), []
    for one, (status, answer), (router_status, router_answer) in zip(asked, expected, found, strict=True):
        is_error = status != 200 or (isinstance(answer, dict) and "error" in answer)
        if is_error:
            told = router_status != 200 or "error" in router_answer
            if not told or (not stream and (status, answer) != (router_status, router_answer)):
                wrong.append(f"{one.name}: {status} {answer} | {router_status} {router_answer}")
        elif (status, True) != (router_status, alike(answer, router_answer)):
            wrong.append(f"{one.name}: {answer} | {router_status} {router_answer}")
        elif (id_of(one, at_once) in split) != one.is_split:
            wrong.append(f"{one.name}: it {'was not' if one.is_split else 'was'} handed off")
    assert wrong == []
    assert sum(one.is_split for one in asked) > 0.8 * len(asked)
