"""Server-sent events over ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
from starlette.types import Send

from kvferry.core.openai import SSE_DONE, SSE_HEADERS, sse_event

_encoder = msgspec.json.Encoder()


class EventStream:
    """One response. Its headers go out with the first event, so that an error before that can have its own status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = asyncio.Lock()  # several choices write in turn, and the headers must be first
        self.started = False

    async def write(self, events: Iterable[msgspec.Struct]) -> None:
        """Send events, all in one piece; nothing when there are none."""
        await self._write(b"".join([sse_event(_encoder.encode(event)) for event in events]))

    async def write_error(self, envelope: bytes) -> None:
        """Send an error, in OpenAI's envelope, as an event."""
        await self._write(sse_event(envelope))

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        async with self._turn:
            await self._start()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        """Say that the answer is complete, and end the response."""
        async with self._turn:
            await self._start()
            await self._send({"type": "http.response.body", "body": SSE_DONE, "more_body": False})

    async def _start(self) -> None:
        if self.started:
            return
        self.started = True
        headers = [(name.lower().encode(), value.encode()) for name, value in SSE_HEADERS.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
