"""A queue in the order of time, from which anything can be removed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvferry.store.eviction.learned import AgeQueue


@dataclass(eq=False)
class Item:
    started: float


def test_the_oldest_and_the_newest_are_found() -> None:
    queue, items = AgeQueue[Item](), [Item(2.0), Item(1.0), Item(3.0)]
    for item in items:
        queue.add(item)
    assert (queue.oldest(), queue.newest(), len(queue)) == (items[1], items[2], 3)
    queue.discard(items[1])
    assert queue.oldest() is items[0]
    assert items[1] not in queue
    queue.discard(items[1])
    assert len(queue) == 2, "removing it again changes nothing"


def test_of_equals_the_first_that_came_is_the_oldest() -> None:
    queue, items = AgeQueue[Item](), [Item(1.0) for _ in range(5)]
    for item in items:
        queue.add(item)
    assert (queue.oldest(), queue.newest()) == (items[0], items[-1])
    queue.discard(items[0])
    queue.add(items[0])
    assert queue.newest() is items[0], "it came last now"
    assert queue.oldest() is items[1]


def test_it_is_a_sorted_list_whatever_happens() -> None:
    draw, queue, present = random.Random(1), AgeQueue[Item](), list[Item]()
    for _ in range(3000):
        if present and draw.random() < 0.5:
            queue.discard(present.pop(draw.randrange(len(present))))
        else:
            present.append(Item(draw.random()))
            queue.add(present[-1])
        assert len(queue) == len(present)
        if present:
            assert queue.oldest() is min(present, key=lambda item: item.started)
            assert queue.newest() is max(present, key=lambda item: item.started)
