"""Server-sent events of one answer, and the marks between them with which another instance can continue it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.messages.continuation import StreamMark
from kvferry.core.messages.openai import SSE_DONE, SSE_HEADERS
from kvferry.engine.server.assembly import Delta, merge_deltas
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


class DeltaBatches:
    """Joins the deltas of a stream's choices to batches of `num_tokens` tokens. A choice's first and last tokens are
    not held back, and no token for longer than `max_delay_s` after the last batch, or the stream would seem lost."""

    def __init__(self, num_tokens: int, clock: Clock, max_delay_s: float = 1.0) -> None:
        self._num_tokens, self._max_delay_s = num_tokens, max_delay_s
        self._clock = clock
        self._held: dict[int, Delta] = {}
        self._sent_at: dict[int, float] = {}
        """For each choice, the time of its last batch."""

    def add(self, delta: Delta) -> Delta | None:
        """The batch that `delta` completes; None: it is held back."""
        if self._num_tokens == 1:
            return delta
        held = self._held.pop(delta.index, None)
        batch = delta if held is None else merge_deltas([held, delta])
        now = self._clock.monotonic()
        is_full = len(batch.token_ids) >= self._num_tokens
        is_late = now - self._sent_at.get(batch.index, now) >= self._max_delay_s
        if batch.first or batch.finish_reason is not None or is_full or is_late:
            self._sent_at[batch.index] = now
            return batch
        self._held[batch.index] = batch
        return None


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
