"""An answer as it comes, from servers of all kinds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.cli.client.load import LoadResult, OpenLoop, RequestOutcome, poisson
from kvferry.cli.client.stream import COMPLETIONS_PATH, OpenAIClient, Reply, ServedModel
from kvferry.cli.client.talk import sparkline, summary_lines
from kvferry.core.errors import KvferryError, Unavailable
from kvferry.sim.targets import Targets
from kvferry.sim.traffic import Arrival
from router.peers import serving


def streams(*events: bytes) -> Starlette:
    async def answer(request: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            for event in events:
                yield event

        return StreamingResponse(body(), media_type="text/event-stream")

    return Starlette(routes=[Route(COMPLETIONS_PATH, answer, methods=["POST"])])


async def ask(app: Starlette) -> Reply:
    async with serving(app) as url, OpenAIClient(url, timeout_s=5.0) as client:
        return await client.stream(COMPLETIONS_PATH, {"prompt": "x"})


async def test_unknown_events_are_passed_over() -> None:
    reply = await ask(
        streams(
            b'data: {"choices": [{"text": "a"}]}\n\n: a comment\n\ndata: {not json\n\n',
            b'data: {"choices": "no list"}\n\ndata: {"choices": [{"delta": {"content": "b"}}], "usage": null}\n\n',
            b'data: {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 7}}\n\ndata: [DONE]\n\n',
        )
    )
    assert (reply.text, reply.num_tokens, reply.prompt_tokens, reply.error) == ("ab", 2, 7, "")
    assert reply.ttft_s is not None
    assert len(reply.gaps_s) == 1


@pytest.mark.parametrize("name", [b"reasoning", b"reasoning_content"])
async def test_reasoning_is_shown_and_is_no_part_of_the_text(name: bytes) -> None:
    shown: list[str] = []
    app = streams(
        b'data: {"choices": [{"delta": {"' + name + b'": "hm "}}]}\n\n',
        b'data: {"choices": [{"delta": {"content": "yes"}}]}\n\ndata: [DONE]\n\n',
    )
    async with serving(app) as url, OpenAIClient(url, timeout_s=5.0) as client:
        reply = await client.stream(COMPLETIONS_PATH, {"prompt": "x"}, shown.append)
    assert (reply.text, shown, len(reply.gaps_s)) == ("yes", ["hm ", "yes"], 1)


async def test_an_error_in_the_stream_is_the_answers() -> None:
    reply = await ask(streams(b'data: {"choices": [{"text": "a"}]}\n\n', b'data: {"error": {"message": "lost"}}\n\n'))
    assert (reply.text, reply.error) == ("a", "lost")
    assert summary_lines(reply, "")[-1] == "  incomplete: lost"


@pytest.mark.parametrize("status", [401, 404, 503])
async def test_a_refusal_is_one_line_without_control_characters(status: int) -> None:
    async def refuse(request: Request) -> Response:
        return JSONResponse({"error": {"message": "no \x1b[31mroom"}}, status_code=status)

    app = Starlette(routes=[Route(COMPLETIONS_PATH, refuse, methods=["POST"])])
    with pytest.raises(Unavailable) as raised:
        await ask(app)
    assert "\x1b" not in str(raised.value)
    assert ("--api-key" in str(raised.value)) == (status == 401)


async def test_an_endless_line_is_not_kept() -> None:
    async def endless(request: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            while True:
                await asyncio.sleep(0)
                yield b"x" * 2**20

        return StreamingResponse(body(), media_type="text/event-stream")

    reply = await ask(Starlette(routes=[Route(COMPLETIONS_PATH, endless, methods=["POST"])]))
    assert reply.error == "the answer is too long to be read"


async def test_an_open_loop_sends_at_its_times_and_counts_what_fails() -> None:
    """A server that answers late does not delay the requests after."""
    arrived: list[float] = []

    async def slow(request: Request) -> Response:
        arrived.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.5)
        return JSONResponse({"error": {"message": "too late"}}, status_code=503)

    app = Starlette(routes=[Route(COMPLETIONS_PATH, slow, methods=["POST"])])
    async with serving(app) as url, OpenAIClient(url) as client:
        arrivals = [Arrival(0.02 * number, 4, 2) for number in range(10)]
        result = await OpenLoop(client, ServedModel("m"), 1).run(arrivals)
    assert arrived[-1] - arrived[0] < 0.5
    figures = result.figures(Targets(ttft=1.0))
    assert (figures["requests"], figures["failed"], figures["goodput"]) == (10, 10, 0.0)
    assert figures["ttft_ms"] is None


def test_goodput_counts_answers_within_all_targets() -> None:
    def reply(ttft_s: float, gap_s: float) -> Reply:
        times = [ttft_s, ttft_s + gap_s, ttft_s + 2 * gap_s]
        return Reply(0.0, "abc", times, num_tokens=3, end_s=times[-1])

    replies = [reply(0.1, 0.01), reply(3.0, 0.01), reply(0.1, 0.2)]
    result = LoadResult(2.0, [RequestOutcome(Arrival(0.0, 1, 3), 0.0, one) for one in replies])
    figures = result.figures(Targets(ttft=2.0, itl=0.05))
    assert figures["within_targets"] == pytest.approx(1 / 3)
    assert figures["goodput"] == 0.5


def test_arrivals_are_the_same_for_a_seed() -> None:
    assert poisson(5.0, 10.0, 8, 2, seed=3) == poisson(5.0, 10.0, 8, 2, seed=3)
    assert 20 < len(poisson(5.0, 10.0, 8, 2, seed=3)) < 90


def test_a_bar_for_each_gap_or_the_longest_of_several() -> None:
    assert sparkline([1.0, 8.0]) == "▂█"
    assert sparkline([0.0] * 100 + [1.0], columns=10)[-1] == "█"
    assert len(sparkline([0.0] * 1000)) == 60


async def test_what_is_no_server_of_models_is_named() -> None:
    app = Starlette(routes=[Route("/v1/models", lambda request: JSONResponse({"data": "nothing"}))])
    async with serving(app) as url, OpenAIClient(url) as client:
        with pytest.raises(KvferryError, match="does not speak OpenAI's API"):
            await client.models()
