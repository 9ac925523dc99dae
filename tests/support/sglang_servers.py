"""Real SGLang servers for tests, started by kvferry's own commands, and requests whose answers are compared."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from support.fleets import Fleet
from support.processes import KvferryProcess, begun, kvferry, sum_of
from support.sglang_python import PYTHON
from support.waiting import until

MODEL = "kvferry/tiny-python"
START_S = 280.0
SETTLE_S = 60.0
CHUNK_TOKENS = 256
PAGE_TOKENS = 16
ON_CPU = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *(
        "--grammar-backend",
        "none",
        "--cuda-graph-backend-decode",
        "disabled",
        "--cuda-graph-backend-prefill",
        "disabled",
    ),
    *("--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle", "--mem-fraction-static", "0.8"),
)
"""Flags with which SGLang 0.5.23 serves on CPUs."""
SIZES = (
    *("--max-total-tokens", "16384", "--chunked-prefill-size", str(CHUNK_TOKENS), "--page-size", str(PAGE_TOKENS)),
    "--enable-cache-report",
)
EVENTS = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*", "bind": True}
DISAGGREGATED = (
    *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
    f"--kv-events-config={json.dumps(EVENTS)}",
)
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
WORDS = (
    *("def", "class", "return", "import", "self", "value", "name", "data", "list", "for", "in", "if", "else", "while"),
    *("try", "except", "raise", "lambda", "yield", "with", "open", "read", "write", "join", "split", "map", "sorted"),
)


class SglangFleet(Fleet):
    """Servers that take some time to start, and long on a machine that is busy."""

    def becomes(self, prefill: int, decode: int) -> None:
        """Scale it, and wait."""
        self.scale(f"prefill={prefill}", f"decode={decode}", "--wait-s=0")
        self.until_ready(prefill, decode)

    def until_ready(self, prefill: int, decode: int) -> None:
        """Wait until this many of each role serve."""
        counts = (prefill, decode)
        until(lambda: tuple(len(self.names(role)) for role in ("prefill", "decode")) == counts, 600, lambda: self.log)

    def urls(self, role: str) -> list[str]:
        """Addresses of the servers of a role, in the order of their names."""
        return [member.url for member in sorted(self.ready(role), key=lambda member: member.name)]


@contextmanager
def plain_server(log: Path) -> Iterator[KvferryProcess]:
    """One SGLang server that does both phases, by `kvferry serve --engine sglang`."""
    flags = ("--engine=sglang", f"--engine-python={PYTHON}", "--served-model-name=m")
    with begun("serve", MODEL, *flags, "--", *ON_CPU, *SIZES, log=log, start_s=START_S, more=ENVIRONMENT) as ready:
        yield ready()


@contextmanager
def router_before(log: Path, prefill: Sequence[str], decode: Sequence[str], *flags: str) -> Iterator[KvferryProcess]:
    """A router in front of running servers."""
    urls = [f"--prefill-url={url}" for url in prefill] + [f"--decode-url={url}" for url in decode]
    with kvferry("router", *urls, "--health-timeout-s=10", *flags, log=log) as process:
        yield process


# Requests.


@dataclass(frozen=True)
class Case:
    """A request whose answer does not depend on chance."""

    path: str
    body: dict[str, Any]


def cases(count: int, seed: int = 1, longest_words: int = 500) -> list[Case]:
    """Requests of all kinds in turn, several of which begin with the same words."""
    source = random.Random(seed)
    stem = [source.choice(WORDS) for _ in range(100)]

    def words(most: int) -> str:
        return " ".join(source.choice(WORDS) for _ in range(source.randrange(3, most)))

    def completion(prompt: Any, **options: Any) -> Case:
        body = {"model": "m", "prompt": prompt, "max_tokens": 10, "temperature": 0, **options}
        return Case("/v1/completions", body)

    def chat(text: str, **options: Any) -> Case:
        messages = [{"role": "system", "content": "You write Python."}, {"role": "user", "content": text}]
        body = {"model": "m", "messages": messages, "max_tokens": 10, "temperature": 0, **options}
        return Case("/v1/chat/completions", body)

    def streamed(**options: Any) -> dict[str, Any]:
        return {"stream": True, "stream_options": {"include_usage": True}, **options}

    kinds = (
        lambda: completion(words(60)),
        lambda: completion([source.randrange(5, 4000) for _ in range(source.randrange(1, 200))]),
        lambda: completion(" ".join(stem) + " " + words(20)),
        lambda: completion(words(longest_words), max_tokens=4),
        lambda: completion(words(40), **streamed()),
        lambda: completion(words(40), stop=["\n", " self"], max_tokens=24),
        lambda: completion(words(40), logprobs=2),
        lambda: completion(words(40), max_tokens=1),
        lambda: completion([words(20), words(20), words(20)]),
        lambda: completion(words(30), echo=True),
        lambda: completion(words(30), n=1, best_of=1, **streamed(logprobs=1, stop=["return"])),
        lambda: chat(words(40)),
        lambda: chat(words(40), **streamed()),
        lambda: chat(words(40), logprobs=True, top_logprobs=2, stop=["="]),
        lambda: chat(words(40), max_tokens=1, **streamed()),
        lambda: chat(" ".join(stem) + " " + words(10), max_completion_tokens=6),
    )
    return [kinds[index % len(kinds)]() for index in range(count)]


def answers(url: str, asked: Sequence[Case], *, at_once: int = 16) -> list[Any]:
    """What each request is answered with, but for what differs each time. An error is a text with its status."""

    async def answer(session: aiohttp.ClientSession, gate: asyncio.Semaphore, case: Case) -> Any:
        async with gate, session.post(url + case.path, json=case.body) as response:
            if response.status != 200:
                return f"{response.status}: {await response.text()}"
            if case.body.get("stream"):
                return _assembled([json.loads(line[6:]) async for line in response.content if line[:7] == b"data: {"])
            return _without_ids(await response.json())

    async def everything() -> list[Any]:
        gate = asyncio.Semaphore(at_once)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=280)) as session:
            return await asyncio.gather(*(answer(session, gate, case) for case in asked))

    return asyncio.run(everything())


def _without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"choices": answer["choices"], "usage": usage}


def _assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The text, log-probabilities and end of each choice, and the usage. Where an event ends depends on time."""
    texts, ends, usage = Counter[int](), {}, None
    parts: dict[int, list[str]] = {}
    numbers: dict[int, list[float]] = {}
    for event in events:
        if "error" in event:
            return {"error": event["error"]}
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            index = choice["index"]
            texts[index] += 1
            parts.setdefault(index, []).append(choice.get("text") or choice.get("delta", {}).get("content") or "")
            logprobs = choice.get("logprobs") or {}
            numbers.setdefault(index, []).extend(logprobs.get("token_logprobs") or ())
            if choice["finish_reason"] is not None:
                ends[index] = (choice["finish_reason"], choice.get("matched_stop"))
    return {
        "texts": {index: "".join(part) for index, part in parts.items()},
        "ends": ends,
        "logprobs": numbers,
        "usage": None if usage is None else [usage[name] for name in ("prompt_tokens", "completion_tokens")],
    }


def differences(asked: Sequence[Case], expected: Sequence[Any], found: Sequence[Any]) -> list[str]:
    """Requests with another answer. Numbers may differ by what the size of a batch does to them in float32."""
    return [
        f"{case.path} {str(case.body)[:300]}\n  expected {str(one)[:600]}\n  found    {str(other)[:600]}"
        for case, one, other in zip(asked, expected, found, strict=True)
        if not _alike(one, other)
    ]


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=1e-3)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


# Looking.


def figure(url: str, name: str, **labels: str) -> float:
    """The sum of a metric over its labels, but for those that are named."""
    return sum_of(httpx.get(url + "/metrics", timeout=30).text, name, **labels)


def require_idle(*urls: str, timeout_s: float = SETTLE_S) -> None:
    """No request runs or waits at these servers, as SGLang itself counts them."""
    names = (
        *("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_prefill_bootstrap_queue_reqs"),
        *("sglang:num_prefill_inflight_queue_reqs", "sglang:num_decode_prealloc_queue_reqs"),
        *("sglang:num_decode_transfer_queue_reqs",),
    )

    def is_idle(url: str) -> bool:
        try:
            metrics = httpx.get(url + "/metrics", timeout=30).text
        except httpx.HTTPError:
            return False
        return sum(sum_of(metrics, name) for name in names) == 0

    until(lambda: all(map(is_idle, urls)), timeout_s, lambda: "\n".join(urls))


def bootstrap_port(url: str) -> int:
    """That of a prefill server."""
    port: int = httpx.get(url + "/server_info", timeout=30).json()["disaggregation_bootstrap_port"]
    return port


# Asking one by one.


def post(url: str, body: dict[str, Any], *, timeout_s: float = 120, **headers: str) -> httpx.Response:
    """A greedy completion."""
    fixed = {"model": "m", "max_tokens": 8, "temperature": 0}
    return httpx.post(url + "/v1/completions", json={**fixed, **body}, timeout=timeout_s, headers=headers)


def is_error(found: Any, statuses: Sequence[int]) -> bool:
    """True for an answer of one of these statuses, and for a stream that ends with an error event: SGLang's decode
    servers begin to answer before they have the KV."""
    return int(found[:3]) in statuses if isinstance(found, str) else "error" in found


class Asking:
    """Two clients that ask without a pause, and compare with what they got first. `errors`: statuses that are
    allowed."""

    def __init__(self, url: str, errors: Sequence[int] = ()) -> None:
        self._url, self._errors, self._cases = url, errors, cases(24, seed=9, longest_words=200)
        self._expected = answers(url, self._cases, at_once=4)
        self.wrong: list[str] = []
        self.num_right, self.num_errors = 0, 0
        self._ending = threading.Event()
        self._clients = [threading.Thread(target=self._ask, args=(number,)) for number in range(2)]

    def _ask(self, seed: int) -> None:
        source = random.Random(seed)
        while not self._ending.is_set():
            index = source.randrange(len(self._cases))
            [found] = answers(self._url, self._cases[index : index + 1])
            if self._errors and is_error(found, self._errors):
                self.num_errors += 1
                self._ending.wait(0.1)
            elif wrong := differences(self._cases[index : index + 1], self._expected[index : index + 1], [found]):
                self.wrong += wrong
            else:
                self.num_right += 1

    def more(self, number: int, timeout_s: float = 240) -> None:
        """Wait for so many further right answers."""
        enough = self.num_right + number
        until(lambda: self.num_right >= enough or bool(self.wrong), timeout_s, lambda: f"{self.num_errors} errors")

    def __enter__(self) -> Asking:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        for client in self._clients:
            client.join()
