"""What a stream tells of its own progress, for who may have to continue it elsewhere (`core.continuation`)."""

from __future__ import annotations

from kvferry.core.continuation import Mark
from kvferry.engine.server.assembly import Delta
from kvferry.engine.server.generation import Generation


class ProgressMarks:
    """The marks of one stream with one choice. Tokens that are worth no event of their own go with the next."""

    def __init__(self, generation: Generation, created: int) -> None:
        self._child = generation.children[0]
        self._created = created
        self._untold: list[int] = []
        self._begun = False

    def of(self, delta: Delta, num_events: int) -> list[bytes]:
        """A mark for each of the events that `delta` is worth. Its tokens go with the last: the others bring none of
        the answer's text."""
        self._untold += delta.token_ids
        if not num_events:
            return []
        marks = [self._mark() for _ in range(num_events)]
        marks[-1].tokens, self._untold = self._untold, []
        marks[-1].last = delta.finish_reason is not None
        return [mark.encode() for mark in marks]

    def _mark(self) -> Mark:
        if self._begun:
            return Mark()
        self._begun = True
        cached, seed = self._child.num_cached_tokens, self._child.request.sampling.seed
        return Mark(seed=seed, created=self._created, num_cached_tokens=cached)
