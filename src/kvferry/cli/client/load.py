"""An open-loop load: each request is sent at its time, whether or not earlier requests have been answered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.cli.client.stream import COMPLETIONS_PATH, OpenAIClient, Reply, ServedModel
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import ConfigError, KvferryError
from kvferry.core.percentile import percentile
from kvferry.core.runtime.tasks import BackgroundTasks
from kvferry.http.headers import RawHeaders
from kvferry.sim.targets import Targets
from kvferry.sim.traffic import Arrival, TracePrompt

AGGREGATED: RawHeaders = [(b"x-kvferry-aggregate", b"1")]
"""Has the router serve a request on one instance, without a hand-off."""
_POOL_TEXT = (
    "The quick brown fox jumps over the lazy dog while seven wise owls count stars above the quiet harbour, and every"
    " traveller who crosses the river at dawn pays the old ferryman with a story, a song or a small silver coin."
)


@dataclass(frozen=True)
class RequestOutcome:
    """One request of the load and its outcome. `send_delay_s`: seconds after its time at which it was sent; `reply`:
    None if it failed or was not sent, for the reason in `error`."""

    arrival: Arrival
    send_delay_s: float
    reply: Reply | None
    error: str = ""


@dataclass
class LoadResult:
    """The outcomes of a load of `seconds`."""

    seconds: float
    sent: list[RequestOutcome] = field(default_factory=list)

    @property
    def answered(self) -> list[Reply]:
        """The complete answers."""
        return [
            sent.reply for sent in self.sent if sent.reply is not None and not sent.reply.error and sent.reply.ttft_s
        ]

    def figures(self, targets: Targets) -> dict[str, Any]:
        """The results, with times in ms but for `seconds`, the duration of the load. `within_targets`: share of all
        requests whose answers were complete within the targets; `goodput`: the number of these answers a second."""
        replies = self.answered
        within = sum(
            targets.met_by(reply.ttft_s or 0.0, reply.end_s - reply.begun_s, max(1, reply.num_tokens))
            for reply in replies
        )
        return {
            "requests": len(self.sent),
            "failed": len(self.sent) - len(replies),
            "seconds": self.seconds,
            "request_rate": len(self.sent) / self.seconds,
            "input_tokens_per_s": sum(reply.prompt_tokens for reply in replies) / self.seconds,
            "output_tokens_per_s": sum(reply.num_tokens for reply in replies) / self.seconds,
            "ttft_ms": quantiles([reply.ttft_s or 0.0 for reply in replies]),
            "itl_ms": quantiles([gap for reply in replies for gap in reply.gaps_s]),
            "e2e_ms": quantiles([reply.end_s - reply.begun_s for reply in replies]),
            "within_targets": within / len(self.sent) if self.sent else 0.0,
            "goodput": within / self.seconds,
            "longest_delay_ms": 1000 * max((sent.send_delay_s for sent in self.sent), default=0.0),
        }


def quantiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """P50, P90, P99 and the longest of these times, in ms; None: there are none."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    points = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: 1000 * percentile(ordered, share) for name, share in points.items()}


def poisson(rate: float, seconds: float, prompt_tokens: int, answer_tokens: int, seed: int) -> list[Arrival]:
    """Requests at random times, `rate` a second on average."""
    rng, at_s, arrivals = random.Random(seed), 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        arrivals.append(Arrival(at_s, prompt_tokens, answer_tokens))
    return arrivals or [Arrival(0.0, prompt_tokens, answer_tokens)]


class OpenLoop:
    """Sends a trace to one server. Its prompts consist of the server's tokens of an English text, in an order drawn
    with `seed`. Prompts that share blocks in the trace share their first tokens."""

    min_pool = 8
    max_open = 4096
    """Maximum number of requests under way: with more, the server is overloaded anyway, and further requests fail at
    once."""

    def __init__(self, client: OpenAIClient, model: ServedModel, seed: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client, self._model, self._seed, self._clock = client, model, seed, clock
        self._pool: list[int] = []

    async def prepare(self) -> None:
        """Get the tokens of a text from the server, and send one request that does not count. Raises
        `KvferryError`."""
        try:
            tokens = (await self._client.post("/tokenize", {"model": self._model.name, "prompt": _POOL_TEXT}))["tokens"]
            self._pool = sorted({int(token) for token in tokens})
        except (KvferryError, KeyError, TypeError, ValueError):
            self._pool = []
        if self._pool and len(self._pool) < self.min_pool:
            raise ConfigError(
                f"{self._client.origin}: /tokenize gives fewer than {self.min_pool} different tokens for a text"
            )
        await self._client.stream(COMPLETIONS_PATH, self._body(Arrival(0.0, 16, 2), -1))

    async def run(
        self,
        arrivals: Sequence[Arrival],
        headers: RawHeaders = [],  # noqa: B006 - never changed
        on_done: Callable[[RequestOutcome], object] = lambda sent: None,
    ) -> LoadResult:
        """Send the requests at their times, and wait for all answers."""
        begun, outcomes = self._clock.monotonic(), list[RequestOutcome]()
        under_way = BackgroundTasks()

        async def send(arrival: Arrival, number: int) -> None:
            send_delay_s = self._clock.monotonic() - begun - arrival.at_s
            try:
                reply = await self._client.stream(COMPLETIONS_PATH, self._body(arrival, number), headers=headers)
                outcome = RequestOutcome(arrival, send_delay_s, reply, reply.error)
            except KvferryError as error:
                outcome = RequestOutcome(arrival, send_delay_s, None, str(error))
            outcomes.append(outcome)
            on_done(outcome)

        try:
            for number, arrival in enumerate(arrivals):
                await asyncio.sleep(max(0.0, begun + arrival.at_s - self._clock.monotonic()))
                if len(under_way) >= self.max_open:
                    outcomes.append(RequestOutcome(arrival, 0.0, None, f"{self.max_open} requests were under way"))
                    continue
                under_way.start(send(arrival, number))
            await asyncio.gather(*under_way)
        finally:
            under_way.cancel()
        return LoadResult(max(self._clock.monotonic() - begun, 1e-9), outcomes)

    def _body(self, arrival: Arrival, number: int) -> dict[str, Any]:
        limit = self._model.max_tokens
        answer = max(1, arrival.answer_tokens)
        length = arrival.prompt_tokens if limit is None else max(1, min(arrival.prompt_tokens, limit - answer - 1))
        prompt: Any
        if self._pool:
            drawn = TracePrompt(arrival, number, self._seed, len(self._pool))[:length]
            prompt = [self._pool[index] for index in drawn]
        else:
            rng = random.Random(f"{self._seed} {number}")
            prompt = " ".join(rng.choice(_POOL_TEXT.split()) for _ in range(length))
        return {
            "model": self._model.name,
            "prompt": prompt,
            "max_tokens": answer,
            "temperature": 0,
            "ignore_eos": True,
        }
