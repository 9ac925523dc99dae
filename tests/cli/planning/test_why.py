"""`kvferry why URL` asks a router, and says whether to disaggregate."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvferry.cli.main import main
from router.peers import Peer, event, instances, routing
from router.request.test_hand_off import BODY, a_decode, a_prefill, post
from router.request.test_record import telling


async def at_length(peer: Peer, request: Request, body: Any) -> Response:
    """D: a stream of forty events."""
    events = [event("a word of an answer " * 10) for _ in range(40)]
    return StreamingResponse(iter([*events, b"data: [DONE]\n\n"]), media_type="text/event-stream")


@pytest.fixture
def router() -> Iterator[str]:
    """One that has served thirty streams, beside this test."""
    serving, told, over = threading.Event(), [], asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        p, d = a_prefill(telling), a_decode(at_length)
        async with instances(p, d), routing([p.url], [d.url], disaggregate_from="0") as (_, url):
            for _ in range(30):
                await post(url, {**BODY, "stream": True})
            told.append(url)
            serving.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert serving.wait(60)
    yield told[0]
    loops[0].call_soon_threadsafe(over.set)
    thread.join(30)


def test_a_router_is_asked_and_the_answer_is_one_sentence(router: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", router]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].startswith("30 requests, ")
    assert any(line.startswith("as it is") and line.endswith("1 P + 1 D") for line in lines)
    assert lines[-1].startswith(("Disaggregate: ", "Do not disaggregate: "))
