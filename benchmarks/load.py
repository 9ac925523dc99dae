"""A small open-loop client: streams completions and notes when each token came. Used by the benchmarks here."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Streamed:
    """One streamed answer: when it was asked for and when each token came, monotonic seconds."""

    asked: float
    token_times: list[float] = field(default_factory=list)
    error: str = ""
    timeline: dict[str, float] = field(default_factory=dict)
    """When each phase happened, wall clock, where it was asked for."""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0] - self.asked

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]


async def stream_completion(
    session: aiohttp.ClientSession, url: str, model: str, prompt: Sequence[int], max_tokens: int, **more: Any
) -> Streamed:
    """Ask for one greedy completion of exactly `max_tokens` tokens."""
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
    streamed = Streamed(time.monotonic())
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            streamed.error = f"{response.status}: {(await response.text())[:200]}"
            return streamed
        async for line in response.content:
            now = time.monotonic()
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                streamed.error = str(event["error"])
                return streamed
            streamed.timeline = event.get("timeline") or streamed.timeline
            for choice in event.get("choices", []):
                streamed.token_times += [now] * len(choice.get("token_ids") or [])
    return streamed


@dataclass(frozen=True)
class Mix:
    """The traffic: streams that are always there, and long prompts that arrive at random."""

    num_streams: int
    stream_prompt_tokens: int
    stream_tokens: int
    long_prompt_tokens: int
    long_tokens: int
    long_per_s: float
    duration_s: float
    vocab_size: int
    seed: int = 0


@dataclass
class MixResult:
    """What the streams and the long prompts saw."""

    streams: list[Streamed] = field(default_factory=list)
    longs: list[Streamed] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Milliseconds, percentiles over all gaps of all streams."""
        gaps = sorted(gap for stream in self.streams for gap in stream.gaps)
        failed = [one.error for one in (*self.streams, *self.longs) if one.error]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed, the first with: {failed[0]}")
        ttfts = [one.ttft for one in self.longs]
        return {
            "itl_p50_ms": percentile(gaps, 50) * 1e3,
            "itl_p90_ms": percentile(gaps, 90) * 1e3,
            "itl_p99_ms": percentile(gaps, 99) * 1e3,
            "itl_p999_ms": percentile(gaps, 99.9) * 1e3,
            "itl_max_ms": gaps[-1] * 1e3,
            "long_ttft_p50_ms": statistics.median(ttfts) * 1e3 if ttfts else float("nan"),
            "long_ttft_p99_ms": percentile(sorted(ttfts), 99) * 1e3 if ttfts else float("nan"),
            "num_gaps": len(gaps),
            "num_longs": len(ttfts),
        }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The `share`-th percentile of an ordered list, by the nearest rank."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))]


async def run_mix(url: str, model: str, mix: Mix) -> MixResult:
    """Send the traffic to one endpoint and wait for what was begun."""
    source = random.Random(mix.seed)
    result = MixResult()
    end = time.monotonic() + mix.duration_s

    def prompt(num_tokens: int) -> list[int]:
        return [source.randrange(5, mix.vocab_size) for _ in range(num_tokens)]

    async def stream_forever(session: aiohttp.ClientSession) -> None:
        while time.monotonic() < end:
            result.streams.append(
                await stream_completion(session, url, model, prompt(mix.stream_prompt_tokens), mix.stream_tokens)
            )

    async def one_long(session: aiohttp.ClientSession) -> None:
        result.longs.append(
            await stream_completion(session, url, model, prompt(mix.long_prompt_tokens), mix.long_tokens)
        )

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as group:
        for _ in range(mix.num_streams):
            group.create_task(stream_forever(session))
        while time.monotonic() < end and mix.long_per_s > 0:
            await asyncio.sleep(source.expovariate(mix.long_per_s))
            group.create_task(one_long(session))
    return result
