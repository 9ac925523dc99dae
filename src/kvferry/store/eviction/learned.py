"""Least likely reused: the block that is least likely to be used again soon first.

Made for prefix trees. The blocks that one request inserts one after another are a *run*: a document, or a turn of a
conversation. They are used again together or not at all, so statistics are kept of runs, each of which counts once
however long it is. The properties of a run predict much of whether it is used again; a `ReuseModel` learns how much,
for each class, which consists of

    uses since it was inserted · whether only its beginning was used last time · how many runs come before it (the
    turn of a conversation) · tokens of its request's answer · its length

A store sees all of these except the length of the answer. As long as that is not reported (`finish`), the class ends
before it, and stands for answers of any length.

The blocks of a run with the same history are a *group*. It is evicted from its end, and only when no run after it is
kept: a block is useless without those before it, and a conversation's newest run tells the most about whether it
continues. Within a class, worth rises and then falls with idle time, so the next group to evict is the class's oldest
or its newest; evicting the newest keeps some of a workload that does not fit. Until a model is first fitted, the order
is LRU's.

All classes are ranked again after some evictions, not after each: in between, an eviction considers the lowest-ranked
one, and every operation takes O(log n). Related: LHD (Beckmann, Chen and Cidon, NSDI 2018) evicts by hit density,
learned by age.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable
from operator import itemgetter
from typing import Generic, Protocol, TypeVar

from kvferry.store.eviction.base import BlockKey, EvictionPolicy
from kvferry.store.eviction.reuse_model import ReuseModel

EXTRA_HISTORY = 65_536
"""Number of evicted blocks that are remembered, in addition to as many as may be kept."""
UNKNOWN_OUTPUT = 7
_BUCKET_OF_TURN = (0, 1, 2, 3, 4, 4)

_ALLOWED_STALE = 64


class _Timed(Protocol):
    """An item with a start time, which does not change while the item is in a queue."""

    started: float


T = TypeVar("T", bound=_Timed)


class AgeQueue(Generic[T]):
    """A queue in the order of time whose first and last items can be read, and from which any item can be removed: two
    heaps, in which removed items are skipped when they come up. Every operation takes amortized O(log n)."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}
        self._next = 0
        self._oldest: list[tuple[float, int, T]] = []
        self._newest: list[tuple[float, int, T]] = []

    def add(self, item: T) -> None:
        """Add an item that is not in the queue."""
        self._next += 1
        self._numbers[item] = self._next
        heapq.heappush(self._oldest, (item.started, self._next, item))
        heapq.heappush(self._newest, (-item.started, -self._next, item))

    def discard(self, item: T) -> None:
        """Remove an item, if it is in the queue."""
        self._numbers.pop(item, None)
        allowed = 2 * len(self._numbers) + _ALLOWED_STALE
        if len(self._oldest) > allowed:
            self._oldest = self._without_stale(self._oldest)
        if len(self._newest) > allowed:
            self._newest = self._without_stale(self._newest)

    def oldest(self) -> T:
        """The item with the earliest start. The queue must not be empty."""
        return self._top(self._oldest)

    def newest(self) -> T:
        """The item with the latest start. The queue must not be empty."""
        return self._top(self._newest)

    def __contains__(self, item: T) -> bool:
        return item in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def _top(self, heap: list[tuple[float, int, T]]) -> T:
        while self._numbers.get(heap[0][2]) != abs(heap[0][1]):
            heapq.heappop(heap)
        return heap[0][2]

    def _without_stale(self, heap: list[tuple[float, int, T]]) -> list[tuple[float, int, T]]:
        left = [entry for entry in heap if self._numbers.get(entry[2]) == abs(entry[1])]
        heapq.heapify(left)
        return left


class ReuseRun:
    """The blocks that one request inserted one after another."""

    __slots__ = ("before", "groups", "last", "num_before", "num_kept", "num_kept_after", "output", "size")

    def __init__(self, before: ReuseRun | None) -> None:
        self.before = before
        self.num_before: int = 0 if before is None else before.num_before + 1
        self.size, self.output = 0, UNKNOWN_OUTPUT
        self.last: BlockKey | None = None
        self.num_kept = self.num_kept_after = 0
        """Number of cached blocks of this run, and of runs directly after it that have some."""
        self.groups: dict[Group, None] = {}
        """The groups with cached blocks."""


class Group:
    """Blocks of a run with the same history. `keys`: the cached ones, each with its index in the run."""

    __slots__ = (
        "class_number",
        "is_rest",
        "is_sorted",
        "keys",
        "last_index",
        "moved_at",
        "num_uses",
        "run",
        "started",
        "trial",
    )

    def __init__(self, run: ReuseRun, num_uses: int, now: float) -> None:
        self.run, self.num_uses, self.started = run, num_uses, now
        self.keys: dict[BlockKey, int] = {}
        self.is_sorted, self.last_index = True, -1
        """True if `keys` are in the order of their indices; and the index of the key that was added last."""
        self.is_rest = False
        """True if a use ended before these blocks, so that another text continues from there."""
        self.moved_at = math.inf
        """Time at which a use last began to move some of its blocks to another group."""
        self.class_number = self.trial = -1

    def add(self, key: BlockKey, index: int) -> None:
        """Add a block at its index; blocks that an eviction skipped come back in any order."""
        self.is_sorted = not self.keys or (self.is_sorted and index > self.last_index)
        self.keys[key] = self.last_index = index

    def last(self) -> BlockKey:
        """The block furthest from the beginning of the run."""
        if not self.is_sorted:
            self.keys, self.is_sorted = dict(sorted(self.keys.items(), key=itemgetter(1))), True
            self.last_index = next(reversed(self.keys.values()))
        return next(reversed(self.keys))

    def describe(self) -> tuple[int, ...]:
        """The group's class, for `ReuseModel`."""
        history = 2 * min(self.num_uses, 4) + self.is_rest
        run = self.run
        features = history, _turn_bucket(run.num_before)
        return features if run.output == UNKNOWN_OUTPUT else (*features, run.output, _size_bucket(run.size))


class LearnedPolicy(EvictionPolicy):
    """Keeps groups by class, in the order of their last use; `ReuseModel` says in which class the oldest group is worth
    the least."""

    same_request_s = 5.0
    """Uses of one group within this time count as one request's, which may read its blocks in several calls."""
    evaluation_ttl_s = 0.01
    ranking_s = 1.0
    max_evictions_a_ranking = 64

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._model = ReuseModel()
        self._groups: dict[BlockKey, Group] = {}
        self._history: OrderedDict[BlockKey, tuple[Group, int]] = OrderedDict()
        """Group and index of blocks that were evicted or skipped."""
        self._queues: dict[int, AgeQueue[Group]] = {}
        self._split: dict[Group, None] = {}
        """Groups of which a use has moved some blocks and left some."""
        self._moves: OrderedDict[Group, Group] = OrderedDict()
        """The group to which uses move the blocks of each group, for `same_request_s`. It is not an attribute of the
        group, which would keep all later groups alive."""
        self._ranking: list[tuple[float, int, bool]] = []
        """A heap of (worth when last computed, class, true if the worth is of the newest group and not of the
        oldest)."""
        self._ranked_at, self._num_evictions_left = -math.inf, 0
        self._evaluated: Group | None = None
        """The group that the last block was evicted from, whose worth was computed at `_evaluated_at`."""
        self._evaluated_at = -math.inf

    def finish(self, keys: Iterable[BlockKey], num_output_tokens: int, now: float) -> None:
        """Record the length of the answer at the runs that this request inserted."""
        bucket = min(int(math.log2(num_output_tokens + 1) / 1.5), UNKNOWN_OUTPUT - 1)
        groups = dict.fromkeys(group for key in keys if (group := self._group_of(key)))
        for group in groups:
            if group.run.output == UNKNOWN_OUTPUT:
                group.run.output = bucket
        for group in groups:
            self._classify(group)

    def _insert(self, key: BlockKey, now: float, parent: BlockKey | None) -> None:
        past = self._history.pop(key, None)
        if past is not None:
            self._record_use(key, *past, now)
            return
        before = None if parent is None else self._group_of(parent)
        if before is not None and before.num_uses == 0 and not before.is_rest and before.run.last == parent:
            group = before
        else:
            group = Group(ReuseRun(None if before is None else before.run), 0, now)
        index = group.run.size
        group.run.size, group.run.last = index + 1, key
        self._add_to_group(key, group, index)
        if group.class_number < 0 or group.run.output != UNKNOWN_OUTPUT:  # else its size does not matter yet
            self._classify(group)

    def _access(self, key: BlockKey, now: float) -> None:
        group = self._groups[key]
        self._record_use(key, group, self._remove_from_group(key, group), now)

    def _record_use(self, key: BlockKey, group: Group, index: int, now: float) -> None:
        """Move a block of `group`, which it has left, to the group of the other blocks that the same request uses."""
        target = self._moves.get(group)
        if target is None or now - target.started > self.same_request_s:
            self._model.reused(group.trial, now)
            target = self._move(group, now)
        if group.keys:
            self._split[group] = None
        self._add_to_group(key, target, index)
        if target.class_number < 0:
            self._classify(target)

    def _move(self, group: Group, now: float) -> Group:
        """The group to which blocks of this group are moved from now on. Forgets the groups of uses that are over."""
        moves, target = self._moves, Group(group.run, group.num_uses + 1, now)
        group.moved_at = now
        moves[group] = target
        moves.move_to_end(group)
        while (
            now - next(iter(moves.values())).started > self.same_request_s or len(moves) > self.capacity + EXTRA_HISTORY
        ):
            moves.popitem(last=False)
        return target

    def _group_of(self, key: BlockKey) -> Group | None:
        """The block's group, also if the block was evicted."""
        group = self._groups.get(key)
        if group is None and (past := self._history.get(key)) is not None:
            group = past[0]
        return group

    def _remove(self, key: BlockKey) -> None:
        group = self._groups[key]
        self._history[key] = group, self._remove_from_group(key, group)
        if len(self._history) > self.capacity + EXTRA_HISTORY:
            self._history.popitem(last=False)

    def _victim(self, now: float) -> BlockKey | None:
        while self._groups:
            if self._num_evictions_left <= 0 or not self._ranking or now - self._ranked_at > self.ranking_s:
                self._rank(now)
            worth, class_number, newest = self._ranking[0]
            queue = self._queues.get(class_number)
            if queue is None:
                heapq.heappop(self._ranking)
                continue
            group = queue.newest() if newest else queue.oldest()
            if group is not self._evaluated or now - self._evaluated_at > self.evaluation_ttl_s:
                worth_now = self._model.worth(class_number, now - group.started)
                if worth_now > worth:  # another group is at that end now
                    heapq.heapreplace(self._ranking, (worth_now, class_number, newest))
                    continue
                self._evaluated, self._evaluated_at = group, now
            self._num_evictions_left -= 1
            key = group.last()
            self._remove(key)
            return key
        return None

    def _restore(self, key: BlockKey, now: float) -> None:
        past = self._history.pop(key, None)
        if past is None:  # pinned for so long that it was forgotten
            self._insert(key, now, None)
        else:
            self._add_to_group(key, *past)

    def _orders(self, key: BlockKey) -> bool:
        return key in self._groups

    def _num_ordered(self) -> int:
        return len(self._groups)

    def _rank(self, now: float) -> None:
        self._split_off_rests(now)
        self._model.refit(now)
        ranking = []
        for class_number, queue in self._queues.items():
            oldest, newest = queue.oldest(), queue.newest()
            ranking.append((self._model.worth(class_number, now - oldest.started), class_number, False))
            if newest is not oldest:
                ranking.append((self._model.worth(class_number, now - newest.started), class_number, True))
        heapq.heapify(ranking)
        self._ranking, self._ranked_at = ranking, now
        self._num_evictions_left = min(self.max_evictions_a_ranking, 1 + self.capacity // 64)

    def _split_off_rests(self, now: float) -> None:
        """Make groups of the blocks that a use of their group did not include."""
        for group in [group for group in self._split if group.moved_at < now]:
            del self._split[group]
            if not group.is_rest:
                rest = Group(group.run, group.num_uses, now)
                rest.is_rest = True
                for key in list(group.keys):
                    self._add_to_group(key, rest, self._remove_from_group(key, group))
                self._classify(rest)

    def _add_to_group(self, key: BlockKey, group: Group, index: int) -> None:
        run = group.run
        self._groups[key] = group
        run.num_kept += 1
        if run.num_kept == 1 and run.before is not None:
            run.before.num_kept_after += 1
            if run.before.num_kept_after == 1:
                for other in run.before.groups:
                    if not other.is_rest:
                        self._dequeue(other)
        group.add(key, index)
        if len(group.keys) == 1:
            run.groups[group] = None
            self._enqueue(group)

    def _remove_from_group(self, key: BlockKey, group: Group) -> int:
        """Remove a block from its group; returns its index in its run."""
        run = group.run
        del self._groups[key]
        index = group.keys.pop(key)
        run.num_kept -= 1
        if not group.keys:
            del run.groups[group]
            self._split.pop(group, None)  # nothing is left to be a rest
            self._dequeue(group)
        if run.num_kept == 0 and run.before is not None:
            run.before.num_kept_after -= 1
            if run.before.num_kept_after == 0:
                for other in run.before.groups:
                    self._enqueue(other)
        return index

    def _enqueue(self, group: Group) -> None:
        """Add the group to the queue of its class, if it can be evicted without making a run after it useless."""
        if group.class_number < 0 or not group.keys or (group.run.num_kept_after and not group.is_rest):
            return
        queue = self._queues.setdefault(group.class_number, AgeQueue())
        if group not in queue:
            queue.add(group)

    def _dequeue(self, group: Group) -> None:
        queue = self._queues.get(group.class_number)
        if queue is not None and group in queue:
            queue.discard(group)
            if not queue:
                del self._queues[group.class_number]

    def _classify(self, group: Group) -> None:
        """Update the group's class, which changes as more is known, and its position in the queue of the class."""
        number = self._model.class_number(group.describe())
        if number == group.class_number:
            return
        if group.class_number < 0:
            group.trial = self._model.start(number, group.started, 1.0 / (1 + group.num_uses))
        else:
            self._model.reclassify(group.trial, number)
            self._dequeue(group)
        group.class_number = number
        self._enqueue(group)


def _turn_bucket(num_before: int) -> int:
    return _BUCKET_OF_TURN[num_before] if num_before < len(_BUCKET_OF_TURN) else 5


def _size_bucket(num_blocks: int) -> int:
    """The bucket of a run's length: up to 2, 12, 40, or more blocks."""
    return 0 if num_blocks <= 2 else 1 if num_blocks <= 12 else 2 if num_blocks <= 40 else 3
