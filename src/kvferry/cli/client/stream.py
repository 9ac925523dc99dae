"""A streamed answer of a server with OpenAI's API, with the time of each chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from kvferry.cli.text import printable
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import ConfigError, KvferryError, Unavailable
from kvferry.core.messages.timeline import Timeline
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.client.signed_client import bearer
from kvferry.http.headers import RawHeaders
from kvferry.http.tls import client_context

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
_ASK_S = 10.0


@dataclass
class Reply:
    """An answer. Times are in seconds of one monotonic clock. `error`: the reason why the answer is incomplete; empty
    if it is complete."""

    begun_s: float
    text: str = ""
    chunk_times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    prompt_tokens: int = 0
    end_s: float = 0.0
    request_id: str = ""
    timeline: Timeline | None = None
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None: none arrived."""
        return self.chunk_times_s[0] - self.begun_s if self.chunk_times_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between two consecutive chunks. A chunk has one token, or several if the server sends them together."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times_s)]

    @property
    def itl_s(self) -> float | None:
        """Mean time between two tokens; None if there are fewer than two."""
        count = max(self.num_tokens, len(self.chunk_times_s)) - 1
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / count if count > 0 and self.chunk_times_s else None


@dataclass(frozen=True)
class ServedModel:
    """A model that a server offers. `owner`: its engine."""

    name: str
    owner: str = ""
    max_tokens: int | None = None


class OpenAIClient:
    """Sends requests to one server. A context manager. Its methods raise `KvferryError`, whose message says what a user
    can do."""

    max_error_bytes = 65536
    max_answer_bytes = 64 * 2**20
    max_line_bytes = 4 * 2**20
    """Maximum bytes of an event."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        tls_ca: Path | None = None,
        timeout_s: float = 120.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`timeout_s`: maximum seconds for each complete answer."""
        self.origin = Origin.parse(url.removesuffix("/v1"), "URL")
        tls = client_context(tls_ca) if self.origin.tls else None
        self._client = HttpClient(tls=tls, client_name="this command")
        self._headers: RawHeaders = [] if api_key is None else [bearer(api_key)]
        self._timeout_s, self._clock = timeout_s, clock

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, traceback)

    async def get(self, path: str, timeout_s: float = _ASK_S) -> Any:
        """The JSON at a path."""
        return await self._json("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float = _ASK_S) -> Any:
        """Send a POST request with this body, and return the JSON of the answer."""
        return await self._json("POST", path, msgspec.json.encode(body), timeout_s)

    async def models(self) -> list[ServedModel]:
        """The models that the server offers."""
        answer = await self.get("/v1/models")
        try:
            return [
                ServedModel(str(model["id"]), str(model.get("owned_by", "")), model.get("max_model_len"))
                for model in answer["data"]
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self.origin} does not speak OpenAI's API: /v1/models is no list of models") from error

    async def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        on_text: Callable[[str], object] = lambda text: None,
        headers: RawHeaders = [],  # noqa: B006 - never changed
    ) -> Reply:
        """Send a request and read its streamed answer. An answer that ends too early has an `error`. Raises
        `Unavailable` if the answer does not begin."""
        reply = Reply(self._clock.monotonic())
        encoded = msgspec.json.encode({**body, "stream": True, "stream_options": {"include_usage": True}})
        sent = [*self._headers, *headers, (b"content-type", b"application/json")]
        call = self._client.start(self.origin, "POST", path, sent, encoded)
        try:
            async with asyncio.timeout(self._timeout_s):
                await call.begun()
                if call.status != 200:
                    raise Unavailable(_refusal(call.status, await call.read(self.max_error_bytes)))
                reply.request_id = _header(call.headers, b"x-request-id")
                await self._read(call.chunks(), reply, on_text)
        except TimeoutError as error:
            if not reply.chunk_times_s:
                raise Unavailable(f"{self.origin} did not answer within {self._timeout_s:g} s") from error
            reply.error = f"it did not end within {self._timeout_s:g} s"
        except Unavailable:
            raise
        except KvferryError as error:
            if not reply.chunk_times_s:
                raise
            reply.error = str(error)
        finally:
            call.close()
        reply.end_s = self._clock.monotonic()
        return reply

    async def _read(self, chunks: Any, reply: Reply, on_text: Callable[[str], object]) -> None:
        rest, total = b"", 0
        async for chunk in chunks:
            now = self._clock.monotonic()
            total += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > self.max_line_bytes or total > self.max_answer_bytes:
                reply.error = "the answer is too long to be read"
                return
            for line in lines:
                if line.startswith(b"data: {"):
                    _take(reply, line[6:], now, on_text)

    async def _json(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Any:
        headers = [*self._headers, *([(b"content-type", b"application/json")] if body is not None else [])]
        status, _, content = await self._client.ask(
            self.origin, method, path, headers=headers, body=body, timeout_s=timeout_s, max_bytes=self.max_answer_bytes
        )
        if status != 200:
            raise Unavailable(f"{self.origin}{path}: {_refusal(status, content)}")
        try:
            return msgspec.json.decode(content)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self.origin} does not speak OpenAI's API: {path} is not JSON") from error


def _take(reply: Reply, event: bytes, now: float, on_text: Callable[[str], object]) -> None:
    """Add one event to the reply. Events of another form are ignored: servers add some of their own."""
    try:
        content = msgspec.json.decode(event, type=dict[str, Any])
        if error := content.get("error"):
            reply.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        if timeline := content.get("timeline"):
            reply.timeline = msgspec.convert(timeline, Timeline)
        if usage := content.get("usage"):
            reply.num_tokens = int(usage.get("completion_tokens") or 0)
            reply.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        for choice in content.get("choices") or ():
            part = choice.get("delta") or choice
            text = part.get("content") or part.get("text") or ""
            thought = part.get("reasoning") or part.get("reasoning_content") or ""
            if thought or text or choice.get("token_ids"):
                reply.chunk_times_s.append(now)
                reply.text += text
                on_text(thought + text)
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, RecursionError):
        return


def _header(headers: RawHeaders, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in headers if key.lower() == name), "")


def _refusal(status: int, content: bytes) -> str:
    """The reason why a request was refused, in one line."""
    if status in (401, 403):
        return f"it answers {status}: add --api-key KEY, or set KVFERRY_API_KEY"
    try:
        error = msgspec.json.decode(content)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, RecursionError):
        message = content[:200].decode(errors="replace")
    return f"it answers {status}: {printable(str(message))[:300]}"
