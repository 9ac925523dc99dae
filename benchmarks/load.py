"""A small open-loop client: streams completions and notes when each token came. Used by the benchmarks here."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvferry.core.percentile import percentile


@dataclass
class Streamed:
    """One streamed answer: when it was asked for and when each token came, monotonic seconds."""

    sent_at: float
    token_times: list[float] = field(default_factory=list)
    error: str = ""
    timeline: dict[str, float] = field(default_factory=dict)
    """When each phase happened, wall clock, where it was asked for."""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0] - self.sent_at

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]


async def stream_completion(
    session: aiohttp.ClientSession, url: str, model: str, prompt: Sequence[int], max_tokens: int, **more: Any
) -> Streamed:
    """Ask for one greedy completion of exactly `max_tokens` tokens."""
    streamed = Streamed(time.monotonic())
    await _stream(streamed, session, url, model, prompt, max_tokens, more)
    return streamed


async def _stream(
    streamed: Streamed,
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: Sequence[int],
    max_tokens: int,
    more: Mapping[str, Any],
) -> None:
    """Add to `streamed` what comes, as it comes."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **more,
    }
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            streamed.error = f"{response.status}: {(await response.text())[:200]}"
            return
        async for line in response.content:
            now = time.monotonic()
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                streamed.error = str(event["error"])
                return
            streamed.timeline = event.get("timeline") or streamed.timeline
            for choice in event.get("choices", []):
                streamed.token_times += [now] * len(choice.get("token_ids") or [])


@dataclass(frozen=True)
class Mix:
    """The traffic: streams that are always there, and long prompts that arrive at random, or evenly spaced.

    With `is_cut`, the streams are ended when the time is over and the last long prompt is answered; else each is
    waited for.
    """

    num_streams: int
    stream_prompt_tokens: int
    stream_tokens: int
    long_prompt_tokens: int
    long_tokens: int
    long_per_s: float
    duration_s: float
    vocab_size: int
    seed: int = 0
    is_evenly_spaced: bool = False
    is_cut: bool = False

    def arrivals(self) -> list[float]:
        """Seconds at which long prompts arrive; the same for each side."""
        if self.long_per_s <= 0:
            return []
        if self.is_evenly_spaced:
            return [(index + 0.5) / self.long_per_s for index in range(round(self.duration_s * self.long_per_s))]
        rng, moments = random.Random(f"arrivals {self.seed}"), [0.0]
        while moments[-1] < self.duration_s:
            moments.append(moments[-1] + rng.expovariate(self.long_per_s))
        return moments[1:-1]


@dataclass
class MixResult:
    """The latencies of the streams and of the long prompts."""

    streams: list[Streamed] = field(default_factory=list)
    longs: list[Streamed] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Milliseconds, percentiles over all gaps of all streams."""
        gaps = sorted(gap for stream in self.streams for gap in stream.gaps)
        failed = [answer.error for answer in (*self.streams, *self.longs) if answer.error]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed, the first with: {failed[0]}")
        if not gaps:
            raise RuntimeError("no stream came to its second token")
        ttfts = [answer.ttft for answer in self.longs]
        return {
            "itl_p50_ms": percentile(gaps, 0.5) * 1e3,
            "itl_p90_ms": percentile(gaps, 0.9) * 1e3,
            "itl_p99_ms": percentile(gaps, 0.99) * 1e3,
            "itl_p999_ms": percentile(gaps, 0.999) * 1e3,
            "itl_max_ms": gaps[-1] * 1e3,
            "long_ttft_p50_ms": statistics.median(ttfts) * 1e3 if ttfts else float("nan"),
            "long_ttft_p99_ms": percentile(sorted(ttfts), 0.99) * 1e3 if ttfts else float("nan"),
            "num_gaps": len(gaps),
            "num_longs": len(ttfts),
        }


async def run_mix(url: str, model: str, mix: Mix) -> MixResult:
    """Send the traffic to one endpoint and wait for what was begun."""
    rng = random.Random(mix.seed)
    result = MixResult()
    start = time.monotonic()
    end = start + mix.duration_s

    def prompt(num_tokens: int) -> list[int]:
        return [rng.randrange(5, mix.vocab_size) for _ in range(num_tokens)]

    async def stream_forever(session: aiohttp.ClientSession) -> None:
        while time.monotonic() < end:
            streamed = Streamed(time.monotonic())
            result.streams.append(streamed)
            await _stream(streamed, session, url, model, prompt(mix.stream_prompt_tokens), mix.stream_tokens, {})

    async def one_long(session: aiohttp.ClientSession) -> None:
        result.longs.append(
            await stream_completion(session, url, model, prompt(mix.long_prompt_tokens), mix.long_tokens)
        )

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as group:
        streams = [group.create_task(stream_forever(session)) for _ in range(mix.num_streams)]
        longs = []
        for moment in mix.arrivals():
            await asyncio.sleep(start + moment - time.monotonic())
            longs.append(group.create_task(one_long(session)))
        if mix.is_cut:
            await asyncio.sleep(end - time.monotonic())
            await asyncio.gather(*longs)
            for stream in streams:
                stream.cancel()
    return result
