"""The demo's requests, and the answers with the time of each token."""

from __future__ import annotations

import asyncio
import sysconfig
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import Unavailable
from kvferry.core.messages.timeline import Timeline
from kvferry.http.client.call import Call
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin

SHOWN_LINES = 4


@dataclass(frozen=True)
class DemoPrompt:
    """A prompt: the beginning of a file of Python's own library. `tail` is the text of its last lines."""

    name: str
    token_ids: list[int]
    tail: str


@dataclass
class DemoAnswer:
    """The answer of an endpoint."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    timeline: Timeline = field(default_factory=Timeline)
    kv_transfer_params: dict[str, Any] | None = None
    """The ticket, if one was requested."""
    asked_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    """Arrival time of each token, on the same monotonic clock as `asked_s`."""


@dataclass(frozen=True)
class Endpoint:
    """An address to which the demo sends requests. Its methods raise `Unavailable` if the answer is an error."""

    max_answer: ClassVar[int] = 16 * 2**20
    answer_s: ClassVar[float] = 60.0
    """Maximum seconds to wait for the first byte of an answer."""

    client: HttpClient
    url: str

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The whole answer."""
        async with self.posting(path, body) as answer:
            return msgspec.json.decode(await answer.read(self.max_answer))

    @asynccontextmanager
    async def posting(self, path: str, body: dict[str, Any]) -> AsyncIterator[Call]:
        """An answer that is read while it arrives."""
        origin = Origin.parse(self.url)
        encoded, headers = msgspec.json.encode(body), [(b"content-type", b"application/json")]
        answer = self.client.start(origin, "POST", path, headers, encoded)
        try:
            async with asyncio.timeout(self.answer_s):
                await answer.begun()
            if answer.status != 200:
                reason = (await answer.read(self.max_answer)).decode(errors="replace")
                raise Unavailable(f"{self.url} answered {answer.status}: {reason[:300]}")
            yield answer
        finally:
            answer.close()

    async def cut(self, name: str, num_tokens: int) -> DemoPrompt:
        """The first tokens of a file of the standard library."""
        text = (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8")
        tokens = await self.post("/tokenize", {"prompt": text})
        token_ids = tokens["tokens"][:num_tokens]
        shown = await self.post("/detokenize", {"tokens": token_ids})
        return DemoPrompt(name, token_ids, "\n".join(shown["prompt"].splitlines()[-SHOWN_LINES:]))

    async def ask(
        self, prompt: DemoPrompt, num_tokens: int, on_text: Callable[[str], object] = lambda text: None, **fields: Any
    ) -> DemoAnswer:
        """Stream a sampled answer of this number of tokens. `on_text`: called with the text of each chunk when it
        arrives. `fields`: further fields of the request."""
        body = {
            "prompt": prompt.token_ids,
            "max_tokens": num_tokens,
            "temperature": 0.6,
            "seed": 7,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "return_timeline": True,
            **fields,
        }
        answer, rest = DemoAnswer(asked_s=SYSTEM_CLOCK.monotonic()), b""
        async with self.posting("/v1/completions", body) as call:
            async for chunk in call.chunks():
                now = SYSTEM_CLOCK.monotonic()
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        _add(answer, msgspec.json.decode(line[6:]), now, on_text)
        return answer


def _add(answer: DemoAnswer, event: dict[str, Any], now: float, on_text: Callable[[str], object]) -> None:
    if "error" in event:
        raise Unavailable(event["error"]["message"])
    if event.get("timeline"):
        answer.timeline = msgspec.convert(event["timeline"], Timeline)
    answer.kv_transfer_params = event.get("kv_transfer_params") or answer.kv_transfer_params
    for choice in event["choices"]:
        token_ids = choice.get("token_ids") or []
        answer.token_ids += token_ids
        answer.token_times_s += [now] * len(token_ids)
        answer.text += choice["text"]
        on_text(choice["text"])
