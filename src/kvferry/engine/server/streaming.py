"""Server-sent events of one answer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.core.openai import SSE_DONE, SSE_HEADERS
from kvferry.http.headers import as_raw
from kvferry.http.response import Response

_encoder = msgspec.json.Encoder()
_HEADERS = as_raw(SSE_HEADERS)


class EventStream:
    """Its headers go out with the first event, so that an error before that can have its own status."""

    def __init__(self, response: Response) -> None:
        self._response = response

    def write(self, events: Sequence[msgspec.Struct], marks: Sequence[bytes] = ()) -> None:
        """Send events, all in one piece, each behind its mark if there are any; nothing when there are none. Does not
        wait: see `Response.drain`."""
        if not events:
            return
        self._start()
        written = [b"data: %b\n\n" % _encoder.encode(event) for event in events]
        if marks:
            written = [mark + event for mark, event in zip(marks, written, strict=True)]
        self._response.write(written[0] if len(written) == 1 else b"".join(written))

    def close(self) -> None:
        """Say that the answer is complete, and end the response."""
        self._start()
        self._response.end(SSE_DONE)

    def _start(self) -> None:
        if not self._response.started:
            self._response.start(200, _HEADERS)
