"""The scheduler's queues: who comes first, and that nobody stays behind."""

from __future__ import annotations

import random

import pytest

from kvferry.core.errors import LeakError
from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams
from kvferry.engine.scheduling.queues import RemovableHeap, SequenceQueues
from kvferry.engine.scheduling.sequence import LoadMeetingPoint, Sequence, Status


def sequence(name: str, order: int, priority: int = 0) -> Sequence:
    request = Request(
        request_id=name, prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=4), priority=priority
    )
    return Sequence(request, order=order, block_size=4, model_identity="m")


def test_priority_comes_before_order_in_both_queues() -> None:
    queues, late, early = SequenceQueues(), sequence("late", 2), sequence("early", 1)
    urgent = sequence("urgent", 3, priority=-1)
    for one in (late, early, urgent):
        queues.enqueue(one)
    taken = [queues.next_waiting() for _ in range(3)]
    assert taken == [urgent, early, late]
    for one in reversed(taken):
        queues.start(one)
    assert queues.running() == [urgent, early, late]
    assert {one.status for one in taken} == {Status.RUNNING}


def test_who_is_put_back_keeps_its_place() -> None:
    queues, first, second = SequenceQueues(), sequence("first", 1), sequence("second", 2)
    queues.enqueue(first)
    queues.enqueue(second)
    queues.requeue([queues.next_waiting()])
    assert queues.next_waiting() is first


def test_the_least_urgent_is_neither_scheduled_nor_written_to() -> None:
    queues, running = SequenceQueues(), [sequence(str(order), order) for order in range(4)]
    for one in running:
        queues.start(one)
    running[2].load.meeting = LoadMeetingPoint(4, 8)
    assert queues.select_victim({"3"}) is running[1]


@pytest.mark.parametrize("status", list(Status))
def test_who_leaves_is_in_no_queue(status: Status) -> None:
    queues, one = SequenceQueues(), sequence("one", 1)
    if status is Status.WAITING:
        queues.enqueue(one)
    elif status is Status.RUNNING:
        queues.start(one)
    one.status = status
    queues.remove(one)
    queues.check()
    assert (queues.num_waiting, queues.num_running) == (0, 0)


def test_what_is_left_in_a_queue_is_a_leak() -> None:
    queues = SequenceQueues()
    queues.enqueue(sequence("one", 1))
    with pytest.raises(LeakError, match="have ended"):
        queues.check()


@pytest.mark.parametrize("seed", range(8))
def test_whoever_leaves_the_others_keep_their_order(seed: int) -> None:
    rng, queues = random.Random(seed), SequenceQueues()
    waiting = [sequence(str(order), order, priority=rng.randrange(3)) for order in range(300)]
    for number, added in enumerate(waiting):
        queues.enqueue(added)
        queues.add_deadline(added, float(rng.randrange(50)))
        if number % 3 == 2:
            queues.requeue([queues.next_waiting()])
    gone = rng.sample(waiting, rng.randrange(300))
    for left in gone:
        queues.remove(left)
        left.status = Status.FINISHED
    stay = sorted((one for one in waiting if one not in gone), key=lambda one: one.rank)
    assert queues.num_waiting == len(stay)
    assert [queues.next_waiting() for _ in stay] == stay
    assert set(queues.take_expired(49.0)) == set(stay)
    queues.check()


def test_what_is_left_behind_of_those_who_left_is_bounded() -> None:
    heap = RemovableHeap[float]()
    for order in range(5000):
        added = sequence(str(order), order)
        heap.push(float(order), added)
        heap.remove(added)
        assert heap.num_entries <= heap.MIN_STALE + 1
    assert len(heap) == 0
    assert heap.first_key() is None


def test_deadlines_pass_in_their_order_wherever_the_sequence_is() -> None:
    queues, [waits, runs, loads, ended] = SequenceQueues(), [sequence(str(order), order) for order in range(4)]
    for one, deadline in ((waits, 3.0), (runs, 1.0), (loads, 2.0), (ended, 0.5)):
        queues.add_deadline(one, deadline)
    queues.enqueue(waits)
    queues.start(runs)
    queues.remove(ended)
    assert queues.take_expired(0.9) == []
    assert queues.take_expired(2.0) == [runs, loads]
    assert queues.take_expired(2.0) == []
    assert queues.take_expired(3.0) == [waits]
