"""Generated traffic in which the popularity of documents changes, in all the ways that could mislead an eviction
policy.

Each request asks a question about one document of many: it consists of the document's blocks and usually of some that
are never used again. The functions in `DRIFTS` decide which document is next. None of the shapes is taken from a
recorded trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvferry.store.trace.records import TraceRequest

Draw = np.random.Generator


@dataclass(frozen=True)
class Documents:
    """How many documents are popular at once, and how many requests pass before that changes."""

    number: int
    period: int

    def popular(self, draw: Draw) -> list[int]:
        """Ranks of one period's requests, by Zipf's law."""
        weights = np.arange(1, self.number + 1) ** -0.9
        ranks: list[int] = draw.choice(self.number, size=self.period, p=weights / weights.sum()).tolist()
        return ranks


def rotate(documents: Documents, draw: Draw) -> Iterator[int]:
    """Each rank moves on to the next documents, period by period."""
    for first in itertools.count(0, max(1, documents.number // 40)):
        yield from ((rank + first) % documents.number for rank in documents.popular(draw))


def jump(documents: Documents, draw: Draw) -> Iterator[int]:
    """All ranks are shuffled at once."""
    while True:
        order = draw.permutation(documents.number).tolist()
        yield from (order[rank] for rank in documents.popular(draw) + documents.popular(draw))


def shift(documents: Documents, draw: Draw) -> Iterator[int]:
    """A quarter of the documents are in use, all equally popular; new ones arrive, and old ones never return."""
    for request in itertools.count():
        yield request // 8 + int(draw.integers(max(1, documents.number // 4)))


def age(documents: Documents, draw: Draw) -> Iterator[int]:
    """New documents are the most popular."""
    for request in itertools.count():
        yield request // 4 - int(draw.exponential(documents.number / 10))


def scan(documents: Documents, draw: Draw) -> Iterator[int]:
    """A scan: many documents are read once."""
    new = itertools.count(documents.number)
    while True:
        yield from documents.popular(draw)
        yield from itertools.islice(new, int(draw.integers(documents.period)))


def burst(documents: Documents, draw: Draw) -> Iterator[int]:
    """A new document is asked about a few times, soon one after another and never again, beside the popular ones."""
    new, current = itertools.count(documents.number), list[tuple[int, float]]()
    while True:
        for rank in documents.popular(draw):
            while not current or draw.random() < 0.3:
                current.append((next(new), float(draw.choice([0.5, 0.15]))))
            place = int(draw.integers(len(current)))
            document, end = current[place]
            yield document
            if draw.random() < end:
                current.pop(place)
            if draw.random() < 0.3:
                yield rank


def loop(documents: Documents, draw: Draw) -> Iterator[int]:
    """All documents of a circle in turn, several times, then another circle of another size."""
    while True:
        first, size = int(draw.integers(10)) * 10**5, 1 + int(documents.number * draw.choice([0.05, 0.15, 0.4, 1.0]))
        for _ in range(max(2, 2 * documents.period // size)):
            yield from range(first, first + size)


def wonder(documents: Documents, draw: Draw) -> Iterator[int]:
    """None, half or most of the documents are asked about once."""
    new = itertools.count(documents.number)
    while True:
        share = draw.choice([0.0, 0.5, 0.9])
        yield from (next(new) if draw.random() < share else rank for rank in documents.popular(draw))


Drift = Callable[[Documents, Draw], Iterator[int]]
_PURE: dict[str, Drift] = {drift.__name__: drift for drift in (rotate, jump, shift, age, scan, burst, loop, wonder)}


def mix(documents: Documents, draw: Draw) -> Iterator[int]:
    """Some periods of one of the other ways, then of another."""
    started = [drift(documents, draw) for drift in _PURE.values()]
    while True:
        number = int(draw.integers(len(started)))
        for document in itertools.islice(started[number], int(draw.integers(1, 4)) * documents.period):
            yield document + number * 10**8


DRIFTS: dict[str, Drift] = {**_PURE, "mix": mix}


def drifting(drift: str, num_blocks: int, seed: int) -> list[TraceRequest]:
    """Requests of about `num_blocks` in all; the same for the same seed, which also decides on the number and length of
    documents, the length of questions, the rate, and how fast popularity changes."""
    draw = np.random.default_rng(seed)
    documents = Documents(int(draw.choice([50, 200, 800])), int(draw.choice([50, 200, 1000])))
    document_blocks, question_blocks = float(draw.choice([2, 4, 12])), int(draw.choice([0, 1, 3]))
    requests_per_s = float(draw.choice([0.5, 5.0, 50.0]))
    names, chains, requests, now_s, left = itertools.count(), dict[int, list[int]](), [], 0.0, num_blocks
    for document in DRIFTS[drift](documents, draw):
        if left <= 0:
            break
        now_s += draw.exponential(1 / requests_per_s)
        length = 1 + int(draw.exponential(document_blocks - 1))
        chain = chains.setdefault(document, list(itertools.islice(names, length)))
        blocks = chain + list(itertools.islice(names, int(draw.integers(0, 2 * question_blocks + 1))))
        output = int(np.clip(draw.lognormal(5.3, 1.0), 1, 4000))
        requests.append(TraceRequest(round(now_s * 1000), 512 * len(blocks), output, blocks))
        left -= len(blocks)
    return requests
