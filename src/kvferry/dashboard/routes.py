"""The routes of the page: its file at `/`, and its stream of changes.

The file shows nothing by itself: everything comes over the stream, which needs the key that GET /kvferry/* needs. The
key is kept in the tab's session storage and sent as a header, so that another page cannot use it. The content security
policy allows the page's own style and script by their hashes, and requests to this server, and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from importlib.resources import files
from typing import NamedTuple

from kvferry.core.errors import Unavailable
from kvferry.dashboard.feed import Feed
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Route

PAGE_PATH, FEED_PATH = "/", "/kvferry/page/feed"

_PART = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class PageDocument(NamedTuple):
    """The page's file and the content security policy under which it runs."""

    content: bytes
    policy: bytes


def read_document() -> PageDocument:
    """The page of the package."""
    text = files("kvferry.dashboard").joinpath("page.html").read_text("utf-8")
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _PART.findall(text):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(hashes['script'])}",
            f"style-src {' '.join(hashes['style'])}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    return PageDocument(text.encode(), policy.encode())


class PageRoutes:
    """Serves the page of one server. `feed`: its changes."""

    alive_s = 10.0
    """Seconds without an event before a comment is sent, which shows a proxy that the stream is in use."""

    def __init__(self, feed: Feed) -> None:
        self._feed, self._document = feed, read_document()
        self._headers = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", self._document.policy),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-opener-policy", b"same-origin"),
            (b"cache-control", b"no-cache"),
        ]

    def routes(self) -> list[Route]:
        """The page's routes, to be served beside the server's other ones."""
        return [Route("GET", PAGE_PATH, self.show_page, "page"), Route("GET", FEED_PATH, self.follow, "probe")]

    async def show_page(self, request: HttpRequest, response: Response) -> None:
        """GET /: the page."""
        response.send(200, self._document.content, self._headers)

    async def follow(self, request: HttpRequest, response: Response) -> None:
        """GET /kvferry/page/feed: a snapshot, then changes, as server-sent events, until either side leaves."""
        if self._feed.is_full:
            raise Unavailable("as many pages are open as this server takes; close another one")
        page, snapshot = await self._feed.open()
        try:
            response.start(200, [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")])
            response.write(snapshot)
            while not (page.is_behind or response.is_draining):
                await response.drain()
                try:
                    async with asyncio.timeout(self.alive_s):
                        event = await page.queue.get()
                except TimeoutError:
                    event = b": \n\n"
                response.write(event)
            response.end()
        finally:
            self._feed.close(page)
