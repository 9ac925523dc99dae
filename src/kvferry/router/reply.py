"""The answer to one client, on its way out. Owns what has been sent so far; everything sent goes through here."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.types import Send

from kvferry.core.errors import PeerLost, RequestError
from kvferry.core.openai import SSE_DONE, error_envelope, error_headers, sse_event
from kvferry.router.errors import InstanceLost
from kvferry.router.headers import REQUEST_ID, RawHeaders, for_client
from kvferry.router.upstream import Answer

logger = logging.getLogger(__name__)


class Reply:
    """One response. `on_first_byte` is called once, when its first body bytes go out."""

    def __init__(self, send: Send, request_id: bytes, on_first_byte: Callable[[], None]) -> None:
        self._send, self._request_id, self._on_first_byte = send, request_id, on_first_byte
        self.status: int | None = None
        self.finished = False
        self._any_byte_sent = False

    @property
    def started(self) -> bool:
        """Whether the status has been sent, so that nothing else can be answered any more."""
        return self.status is not None

    async def relay(self, answer: Answer) -> bool:
        """Send an instance's answer as it comes. False when the instance broke off before the end.

        The client then gets an error event if the answer is an event stream, else a connection that breaks off
        too: what has been sent cannot be made an error any more, and must not look complete.
        """
        await self._start(answer.status, for_client(answer.headers, self._request_id))
        try:
            async for chunk in answer.chunks():
                await self._write(chunk)
        except PeerLost as error:
            logger.warning("request %s: %s", self._request_id.decode(), error)
            if answer.is_event_stream:
                await self._write(_last_event(InstanceLost("the instance broke off; the answer is incomplete")))
                await self._finish()
            return False
        await self._finish()
        return True

    async def fail(self, error: RequestError) -> None:
        """Answer with an error, in OpenAI's form; nothing has been sent yet."""
        body = error_envelope(error)
        headers = [(name.lower().encode(), value.encode()) for name, value in error_headers(error).items()]
        headers += [(b"content-length", str(len(body)).encode()), (REQUEST_ID, self._request_id)]
        await self._start(error.status, headers)
        await self._write(body)
        await self._finish()

    async def _start(self, status: int, headers: RawHeaders) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, chunk: bytes) -> None:
        if not self._any_byte_sent:
            self._any_byte_sent = True
            self._on_first_byte()
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _finish(self) -> None:
        # Set before the await: with the last byte out, a client that leaves has its answer.
        self.finished = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _last_event(error: RequestError) -> bytes:
    """The end of an event stream that cannot go on.

    The blank line in front ends an event that was cut in the middle, so that the error is an event of its own.
    """
    return b"\n\n" + sse_event(error_envelope(error)) + SSE_DONE
