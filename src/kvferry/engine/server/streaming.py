"""Server-sent events of one answer, and the marks between them with which another instance can continue it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.core.messages.continuation import StreamMark
from kvferry.core.messages.openai import SSE_DONE, SSE_HEADERS
from kvferry.engine.server.assembly import Delta
from kvferry.engine.server.generation import Generation
from kvferry.http.headers import as_raw
from kvferry.http.server.response import Response

_encoder = msgspec.json.Encoder()
_HEADERS = as_raw(SSE_HEADERS)


class EventStream:
    """Writes one stream. The headers are sent with the first event, so that an error before it can have its own
    status."""

    def __init__(self, response: Response) -> None:
        self._response = response

    def write(self, events: Sequence[msgspec.Struct], marks: Sequence[bytes] = ()) -> None:
        """Send events in one write, each after its mark if there are marks. Does not wait: see `Response.drain`."""
        if not events:
            return
        self._start()
        written = [b"data: %b\n\n" % _encoder.encode(event) for event in events]
        if marks:
            written = [mark + event for mark, event in zip(marks, written, strict=True)]
        self._response.write(written[0] if len(written) == 1 else b"".join(written))

    def close(self) -> None:
        """Send `[DONE]`, and end the response."""
        self._start()
        self._response.end(SSE_DONE)

    def _start(self) -> None:
        if not self._response.started:
            self._response.start(200, _HEADERS)


class ProgressMarks:
    """The marks of a stream with one choice, with which a router can have it continued (`core.messages.continuation`).
    Tokens without an event of their own are part of the next mark."""

    def __init__(self, generation: Generation, created: int) -> None:
        self._generation, self._child = generation, generation.children[0]
        self._created = created
        self._pending_tokens: list[int] = []
        self._begun = False

    def of(self, delta: Delta, num_events: int) -> list[bytes]:
        """A mark for each event of `delta`. The last one has the tokens: the other events contain none of the answer's
        text."""
        self._pending_tokens += delta.token_ids
        if not num_events:
            return []
        marks = [self._mark() for _ in range(num_events)]
        marks[-1].tokens, self._pending_tokens = self._pending_tokens, []
        marks[-1].last = delta.finish_reason is not None
        return [mark.encode() for mark in marks]

    def _mark(self) -> StreamMark:
        if self._begun:
            return StreamMark()
        self._begun = True
        cached, seed = self._child.num_cached_tokens, self._child.request.sampling.seed
        name = self._generation.answer_name
        return StreamMark(seed=seed, created=self._created, num_cached_tokens=cached, answer=name)
