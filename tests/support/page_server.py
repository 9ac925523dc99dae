"""A server of the page alone, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.dashboard.feed import Feed
from kvferry.dashboard.page_state import FeedSettings
from kvferry.dashboard.routes import PageRoutes
from kvferry.http.server.config import HttpConfig
from kvferry.http.server.http_server import HttpServer
from kvferry.http.server.keys import Guard
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Route, Routes
from support.page_source import FakeSource

HOSTILE = "</script><script>window.attacked=1</script><img src=x onerror=window.attacked=1>{{7*7}}'\"&"


class Answers:
    """A model behind the page, and the operators' calls that reach its server."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bytes, bool]] = []

    async def chat(self, request: HttpRequest, response: Response) -> None:
        await request.body.read()
        response.start(200, [(b"content-type", b"text/event-stream")])
        for word in ("Hello", " ", HOSTILE):
            text = word.replace("\\", "\\\\").replace('"', '\\"')
            response.write(b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % text.encode())
            await asyncio.sleep(0.02)
        response.end(b"data: [DONE]\n\n")

    async def operate(self, request: HttpRequest, response: Response) -> None:
        self.calls.append((request.path, await request.body.read(), request.caller.is_operator))
        response.send_json(b"{}")


@asynccontextmanager
async def serving(
    source: FakeSource,
    answers: Answers | None = None,
    *,
    admin_key: str = "",
    port: int = 0,
    admin_port: int | None = None,
    has_chat: bool = True,
) -> AsyncIterator[HttpServer]:
    answers = answers or Answers()
    keys = (admin_key,) if admin_key else ()
    config = HttpConfig(port=port, admin_key=keys, admin_port=admin_port, shutdown_grace_s=1.0)
    routes = [
        *PageRoutes(Feed(source, SYSTEM_CLOCK, FeedSettings(tick_s=0.1, has_chat=has_chat))).routes(),
        Route("POST", "/v1/chat/completions", answers.chat),
        Route("POST", "/kvferry/instances/drain", answers.operate, "operate"),
    ]
    server = HttpServer(Routes(routes), config, guard=Guard.from_config(config))
    listening = asyncio.Event()
    task = asyncio.create_task(server.run(lambda host, bound: listening.set()))
    try:
        async with asyncio.timeout(10):
            await listening.wait()
        yield server
    finally:
        server.stop()
        async with asyncio.timeout(10):
            await task


def url_of(server: HttpServer) -> str:
    return f"http://127.0.0.1:{server.ports[0]}"
