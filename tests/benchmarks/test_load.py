"""The client of the benchmarks: when long prompts arrive, and streams that are cut."""

import asyncio
import json

from aiohttp import web

from load import Mix, run_mix

MIX = Mix(
    num_streams=2,
    stream_prompt_tokens=4,
    stream_tokens=10_000,
    long_prompt_tokens=8,
    long_tokens=2,
    long_per_s=10.0,
    duration_s=0.5,
    vocab_size=100,
)


def test_evenly_spaced_prompts_arrive_within_the_time() -> None:
    even = Mix(2, 4, 16, 8, 2, 1.0, 5.0, 100, is_evenly_spaced=True)
    assert even.arrivals() == [0.5, 1.5, 2.5, 3.5, 4.5]


def test_random_arrivals_are_the_same_each_time() -> None:
    arrivals = MIX.arrivals()
    assert arrivals == MIX.arrivals() == sorted(arrivals)
    assert arrivals[0] > 0
    assert arrivals[-1] < MIX.duration_s
    assert Mix(2, 4, 16, 8, 2, 0.0, 5.0, 100).arrivals() == []


async def answer(request: web.Request) -> web.StreamResponse:
    """Tokens of a stream, one each 5 ms, as long as the client is there."""
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range((await request.json())["max_tokens"]):
        event = {"choices": [{"token_ids": [7]}]}
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await asyncio.sleep(0.005)
    return response


async def test_streams_are_cut_when_the_last_long_prompt_is_answered() -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        mix = Mix(2, 4, 10_000, 8, 2, 10.0, 0.5, 100, is_evenly_spaced=True, is_cut=True)
        async with asyncio.timeout(20):
            result = await run_mix(f"http://127.0.0.1:{port}", "m", mix)
    finally:
        await runner.cleanup()
    assert [len(stream.token_times) for stream in result.longs] == [2] * 5
    assert len(result.streams) == 2
    assert all(10 < len(stream.token_times) < 10_000 for stream in result.streams)
    assert result.summary()["num_longs"] == 5
