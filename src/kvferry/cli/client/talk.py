"""`kvferry ask` and `kvferry chat`: print an answer while it arrives, and how long each of its phases took."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from kvferry.cli import completion
from kvferry.cli.client.stream import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    OpenAIClient,
    Reply,
    ServedModel,
)
from kvferry.cli.text import milliseconds, printable
from kvferry.cli.watch.follow import candidates, find
from kvferry.core.errors import ConfigError, KvferryError, Unavailable
from kvferry.core.runtime.threads import run_async
from kvferry.core.settings.bounds import Bounds

Url = Annotated[
    str | None,
    Parameter(
        help="URL of a server. Default: one of this user's, or of ports 8000 to 8015.", completer=completion.urls
    ),
]
Model = Annotated[str | None, Parameter(help="Name of the model. Default: the server's first.")]
MaxTokens = Annotated[int, Parameter(help="Most tokens of an answer.")]
Temperature = Annotated[float, Parameter(help="0: always the likeliest token.")]
Aggregated = Annotated[
    bool, Parameter(help="Have one decode instance do both phases, to compare (X-Kvferry-Aggregate).", negative=())
]
ApiKey = Annotated[str | None, Parameter(help="API key of the server, if it has one.")]
TlsCa = Annotated[Path | None, Parameter(help="Certificate authorities (PEM) of a server at https://.")]

MAX_TOKENS, TEMPERATURE = Bounds(1, 2**20), Bounds(0, 10)
_LEVELS = "▁▂▃▄▅▆▇█"
_BAR_COLUMNS = 40
_PHASES = (
    ("queue", "arrived", "prefill_started"),
    ("prefill", "prefill_started", "prefill_done"),
    ("hand-off", "prefill_done", "transfer_done"),
    ("decode", "transfer_done", "done"),
)
_MAX_HISTORY = 200
"""Maximum number of messages of a conversation that are sent again."""


def ask(
    *words: Annotated[str, Parameter(help="URL of the server, if it is not to be found, then the prompt.")],
    model: Model = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    aggregated: Aggregated = False,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
) -> int:
    """Send one prompt. The answer goes to standard output, and the times of its phases to standard error.

        kvferry ask http://127.0.0.1:8000 "def add(a, b):"

    Without a prompt, standard input is sent.
    """
    _require_bounds(max_tokens, temperature)
    url, *rest = words if words and words[0].startswith(("http://", "https://")) else (None, *words)
    prompt = " ".join(str(word) for word in rest)
    if not prompt:
        if sys.stdin.isatty():
            raise ConfigError('there is no prompt: kvferry ask "def add(a, b):"')
        prompt = sys.stdin.read()
    address = url or run_async(find(candidates()))

    async def run() -> int:
        async with OpenAIClient(address, api_key=api_key, tls_ca=tls_ca) as client:
            talk = await Talk.begin(client, model, max_tokens, temperature, aggregated=aggregated)
            reply = await talk.say(prompt)
        return 1 if reply.error else 0

    return run_async(run())


def chat(
    url: Url = None,
    *,
    model: Model = None,
    system: Annotated[str | None, Parameter(help="Message that the conversation begins with.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    aggregated: Aggregated = False,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
) -> int:
    """Talk to a model. Ctrl-D ends it; Ctrl-C ends an answer.

        kvferry chat http://127.0.0.1:8000

    Under each answer: time to first token, gaps between two tokens, and the instances that served it.
    """
    _require_bounds(max_tokens, temperature)
    address = url or run_async(find(candidates()))

    async def turn(prompt: str, history: list[dict[str, str]]) -> list[dict[str, str]]:
        async with OpenAIClient(address, api_key=api_key, tls_ca=tls_ca) as client:
            talk = await Talk.begin(client, model, max_tokens, temperature, aggregated=aggregated)
            talk.messages = list(history)
            await talk.say(prompt)
            return talk.messages

    async def first() -> ServedModel:
        async with OpenAIClient(address, api_key=api_key, tls_ca=tls_ca) as client:
            return await choose_model(client, model)

    served = run_async(first())
    sys.stderr.write(f"{served.name} at {address}. Ctrl-D ends it; Ctrl-C ends an answer.\n")
    history = [{"role": "system", "content": system}] if system else []
    while (prompt := _read_prompt()) is not None:
        if not prompt.strip():
            continue
        try:
            history = run_async(turn(prompt, history))[-_MAX_HISTORY:]
        except KeyboardInterrupt:
            sys.stderr.write("\n  (ended)\n")
        except KvferryError as error:
            sys.stderr.write(f"kvferry: error: {error}\n")
    sys.stderr.write("\n" if sys.stdin.isatty() else "")
    return 0


def _require_bounds(max_tokens: int, temperature: float) -> None:
    MAX_TOKENS.require("--max-tokens", max_tokens)
    TEMPERATURE.require("--temperature", temperature)


def _read_prompt() -> str | None:
    """The next line of standard input; None at its end, and after Ctrl-C."""
    try:
        if sys.stdin.isatty():
            return input("> ")
        return sys.stdin.readline() or None
    except (EOFError, KeyboardInterrupt):
        return None


async def choose_model(client: OpenAIClient, name: str | None) -> ServedModel:
    """The model with this name, or the first model of the server. Raises `ConfigError` if there is none."""
    models = await client.models()
    if not models:
        raise ConfigError(f"{client.origin} serves no model yet")
    if name is None:
        return models[0]
    served = next((model for model in models if model.name == name), None)
    if served is None:
        names = ", ".join(model.name for model in models)
        raise ConfigError(f"{client.origin} does not serve {name}; it serves {names}")
    return served


class Talk:
    """One conversation. `messages`: the messages so far, as in OpenAI's API."""

    def __init__(self, client: OpenAIClient, model: ServedModel, options: dict[str, Any], *, aggregated: bool) -> None:
        self._client, self._model, self._options = client, model, options
        self._headers = [(b"x-kvferry-aggregate", b"1")] if aggregated else []
        self.messages: list[dict[str, str]] = []

    @classmethod
    async def begin(
        cls, client: OpenAIClient, model: str | None, max_tokens: int, temperature: float, *, aggregated: bool
    ) -> Talk:
        """A conversation with a model of the server."""
        served = await choose_model(client, model)
        options: dict[str, Any] = {"model": served.name, "max_tokens": max_tokens, "temperature": temperature}
        if served.owner == "kvferry":
            options["return_timeline"] = True
        return cls(client, served, options, aggregated=aggregated)

    async def say(self, prompt: str) -> Reply:
        """Print the answer to this prompt, and below it the times of its phases. A model without a chat template
        completes the text."""
        messages = [*self.messages, {"role": "user", "content": prompt}]
        try:
            reply = await self._stream(CHAT_PATH, {"messages": messages})
        except Unavailable as error:
            if "template" not in str(error):
                raise
            reply = await self._stream(COMPLETIONS_PATH, {"prompt": prompt})
        sys.stdout.write("\n")
        sys.stdout.flush()
        for line in summary_lines(reply, await self._path(reply.request_id)):
            sys.stderr.write(f"{line}\n")
        self.messages = [*messages, {"role": "assistant", "content": reply.text}]
        return reply

    async def _stream(self, path: str, content: dict[str, Any]) -> Reply:
        return await self._client.stream(path, {**self._options, **content}, _print, self._headers)

    async def _path(self, request_id: str) -> str:
        """The instances that served a request; empty if the server does not report them."""
        if not request_id:
            return ""
        try:
            decisions = (await self._client.get("/kvferry/decisions?limit=32", timeout_s=2.0))["decisions"]
            decision = next(decision for decision in decisions if decision["request_id"] in request_id)
            names = (decision.get("prefill"), decision.get("decode"))
            return " → ".join(printable(str(name)) for name in names if name)
        except (KvferryError, StopIteration, KeyError, TypeError, AttributeError):
            return ""


def _print(text: str) -> None:
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def summary_lines(reply: Reply, path: str) -> list[str]:
    """The times of an answer, in lines of at most 80 characters."""
    lines = []
    parts = [] if reply.ttft_s is None else [f"TTFT {milliseconds(reply.ttft_s)}"]
    if reply.itl_s:
        parts.append(f"{1 / reply.itl_s:.0f} tok/s")
    if gaps := reply.gaps_s:
        parts.append(f"gaps {milliseconds(statistics.median(gaps))}, longest {milliseconds(max(gaps))}")
    if path:
        parts.append(path)
    if parts:
        lines.append("  " + " · ".join(parts))
    if gaps := reply.gaps_s:
        lines.append(f"  {sparkline(gaps)}")
    if reply.timeline is not None:
        lines.append(f"  {_phases(reply)}")
    if reply.error:
        lines.append(f"  incomplete: {printable(reply.error)}")
    return lines


def sparkline(values: list[float], columns: int = 60) -> str:
    """The values as bars from 0 to the largest; with more values than columns, the largest of each column."""
    count = min(len(values), columns)
    largest = [max(values[index * len(values) // count : (index + 1) * len(values) // count]) for index in range(count)]
    top = max(largest) or 1.0
    return "".join(_LEVELS[min(len(_LEVELS) - 1, int(value / top * len(_LEVELS)))] for value in largest)


def _phases(reply: Reply) -> str:
    """The phases of a request, each with its ms and a bar of its share."""
    assert reply.timeline is not None
    spans = {name: max(0.0, reply.timeline.span(start, end) or 0.0) for name, start, end in _PHASES}
    total = sum(spans.values()) or 1.0
    parts = []
    for name, seconds in spans.items():
        if seconds > 0:
            bar = "═" * round(_BAR_COLUMNS * seconds / total)
            parts.append(f"{name} {milliseconds(seconds)}" + (f" {bar}" if bar else ""))
    return " ─ ".join(parts)[:78]
