"""Looks into the store for the scheduler side, which must not wait for a disk.

Owns a thread, and the questions and answers by request. The thread starts with the first question.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.connectors.shared_storage.markers import Marker, MarkerFolder
from kvferry.core.block_hash import BlockHash
from kvferry.core.errors import KvferryError, StoreError, TransferTimeout
from kvferry.store.base import KVStore

MARKER_POLL_S = 0.002
MARKER_POLL_EACH_S = 0.00025
CLOSE_S = 10.0


@dataclass(frozen=True)
class Question:
    """How many of these blocks, from the first on, are there? `transfer_id`: wait for its marker first.

    `deadline` is monotonic, s.
    """

    hashes: Sequence[BlockHash]
    transfer_id: str | None = None
    deadline: float = 0.0


@dataclass(frozen=True)
class Answer:
    """`num_present` blocks are there; `marker` is the hand-off's. `error`: the store, or the marker, did not answer."""

    num_present: int = 0
    marker: Marker | None = None
    error: KvferryError | None = None


class Prober:
    """Used by the engine's thread; answers come from its own. `stores`: one a rank, in rank order."""

    def __init__(self, stores: Sequence[KVStore], markers: MarkerFolder) -> None:
        self._stores, self._markers = stores, markers
        self._changed = threading.Condition()
        self._questions: dict[str, Question] = {}
        self._answers: dict[str, Answer] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def ask(self, request_id: str, question: Question) -> None:
        """Look, soon."""
        with self._changed:
            self._questions[request_id] = question
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvferry-store-probe", daemon=True)
            self._thread.start()

    def is_asked(self, request_id: str) -> bool:
        """Whether a question of this request waits for its answer."""
        with self._changed:
            return request_id in self._questions

    def answer(self, request_id: str) -> Answer | None:
        """The answer, when there is one; it stays until forgotten."""
        with self._changed:
            return self._answers.get(request_id)

    def forget(self, request_id: str) -> None:
        """The request is over, or wants to ask anew."""
        with self._changed:
            self._questions.pop(request_id, None)
            self._answers.pop(request_id, None)

    def num_kept(self) -> int:
        """Questions and answers; for leak checks."""
        with self._changed:
            return len(self._questions) + len(self._answers)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                asked = list(self._questions.items())
            num_answered = sum(self._try(request_id, question) for request_id, question in asked)
            self._rest(len(asked) - num_answered)

    def _rest(self, num_waiting: int) -> None:
        """Until a new question, or while markers are waited for until the next look."""
        pause = max(MARKER_POLL_S, num_waiting * MARKER_POLL_EACH_S) if num_waiting else None
        with self._changed:
            if not self._closed and len(self._questions) <= num_waiting:
                self._changed.wait(pause)

    def _try(self, request_id: str, question: Question) -> bool:
        """Whether the question could be answered."""
        try:
            answer = self._look(question)
        except StoreError as error:
            answer = Answer(error=error)
        if answer is None:
            return False
        with self._changed:
            if self._questions.get(request_id) is question:
                del self._questions[request_id]
                self._answers[request_id] = answer
        return True

    def _look(self, question: Question) -> Answer | None:
        """A block is there when every rank has its share."""
        marker = None
        if question.transfer_id is not None:
            marker = self._marker(question.transfer_id)
            if marker is None:
                return self._not_yet(question, question.transfer_id)
        hashes = question.hashes
        for store in self._stores:
            hashes = hashes[: store.match(hashes)]
        return Answer(len(hashes), marker)

    def _marker(self, transfer_id: str) -> Marker | None:
        """The first rank's marker, once all have left theirs; at once, where the producer's ranks are not as many."""
        first = self._markers.read(transfer_id, 0)
        if first is None or first.layout.tp_size != len(self._stores):
            return first
        others = (self._markers.read(transfer_id, rank) for rank in range(1, len(self._stores)))
        return first if all(other is not None for other in others) else None

    def _not_yet(self, question: Question, transfer_id: str) -> Answer | None:
        if time.monotonic() < question.deadline:
            return None
        error = TransferTimeout(f"hand-off {transfer_id!r}: its prefill did not reach the shared storage in time")
        return Answer(error=error)
