"""Least likely reused: the block with the smallest chance of being wanted again soon goes first.

Made for prefix trees. The blocks that one request inserts one after another are a *run*: a document, or a turn of a
conversation. They are wanted again together or not at all, so statistics are kept of runs, each counting once however
long it is. What a run is like says much about whether it comes back; a `ReuseModel` learns how much, by a class of

    uses since it was inserted · whether only a beginning of it was used last time · how many runs come before it (the
    turn of a conversation) · tokens of its request's answer · its length

all of which a store sees, but for the length of the answer. Where nobody tells (`finish`), and before it is told, the
class ends before it, and so stands for all whose answers were told.

Blocks of a run with one history are a *group*, given up from its end, and only when no run after it is kept: a block is
of no use without those before it, and a conversation's newest run says most about whether it goes on. Within a class,
worth rises and then falls with idle age, so that the group to give up is the class's oldest or its newest; giving up
the newest is what keeps some of a workload that does not fit. Until a model is first fitted, the order is LRU's.

All classes are looked at again after some evictions, not at each: between, an eviction looks at the least of them, and
every operation takes O(log n). Related: LHD (Beckmann, Chen and Cidon, NSDI 2018) evicts by hit density learnt by age.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable

from kvferry.store.eviction.age_queue import AgeQueue
from kvferry.store.eviction.base import EvictionPolicy, Key
from kvferry.store.eviction.reuse_model import ReuseModel

MOST_EVICTIONS_A_RANKING = 64
RANKING_S = 1.0
SAME_REQUEST_S = 5.0
"""Uses of one group within this time are taken for one request's, which may ask for its blocks in several calls."""
MORE_REMEMBERED = 65_536
"""How many blocks that are gone are remembered beyond as many as are kept."""
UNKNOWN_OUTPUT = 7
_BUCKET_OF_TURN = (0, 1, 2, 3, 4, 4)


class ReuseRun:
    """Blocks that one request inserted, one after the other."""

    __slots__ = ("before", "groups", "last", "num_before", "num_kept", "num_kept_after", "output", "size")

    def __init__(self, before: ReuseRun | None) -> None:
        self.before = before
        self.num_before: int = 0 if before is None else before.num_before + 1
        self.size, self.output = 0, UNKNOWN_OUTPUT
        self.last: Key | None = None
        self.num_kept = self.num_kept_after = 0
        """Blocks of this run that are kept, and runs right after it of which some are."""
        self.groups: dict[Group, None] = {}
        """Those with kept blocks."""


class Group:
    """Those blocks of a run that have been used together ever since; `keys` are the ones that are kept."""

    __slots__ = ("class_number", "is_rest", "keys", "moves_to", "num_uses", "run", "started", "trial")

    def __init__(self, run: ReuseRun, num_uses: int, now: float) -> None:
        self.run, self.num_uses, self.started = run, num_uses, now
        self.keys: dict[Key, None] = {}
        self.is_rest = False
        """Whether a use ended before these blocks, so that another text has gone on from there."""
        self.moves_to: Group | None = None
        self.class_number = self.trial = -1

    def describe(self) -> tuple[int, ...]:
        """The class, for `ReuseModel`."""
        history = 2 * min(self.num_uses, 4) + self.is_rest
        run = self.run
        known = history, _turn_bucket(run.num_before)
        return known if run.output == UNKNOWN_OUTPUT else (*known, run.output, _size_bucket(run.size))


class Reuse(EvictionPolicy):
    """Groups by class, in the order of their last use; `ReuseModel` says which class's end is worth least."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._model = ReuseModel()
        self._kept: dict[Key, Group] = {}
        self._past: OrderedDict[Key, Group] = OrderedDict()
        self._queues: dict[int, AgeQueue[Group]] = {}
        self._split: dict[Group, None] = {}
        self._ranking: list[tuple[float, int, bool]] = []
        """A heap of worth when it was last looked at, class, and whether of its newest group or its oldest."""
        self._ranked_at, self._num_evictions_left = -math.inf, 0

    def finish(self, keys: Iterable[Key], num_output_tokens: int, now: float) -> None:
        """Runs that this request inserted learn how long its answer was."""
        bucket = min(int(math.log2(num_output_tokens + 1) / 1.5), UNKNOWN_OUTPUT - 1)
        groups = dict.fromkeys(group for key in keys if (group := self._kept.get(key) or self._past.get(key)))
        for group in groups:
            if group.run.output == UNKNOWN_OUTPUT:
                group.run.output = bucket
        for group in groups:
            self._classify(group)

    def _insert(self, key: Key, now: float, parent: Key | None) -> None:
        group = self._past.pop(key, None)
        if group is not None:
            self._use(key, group, now)
            return
        before = None if parent is None else self._kept.get(parent) or self._past.get(parent)
        if before is not None and before.num_uses == 0 and not before.is_rest and before.run.last == parent:
            group = before
        else:
            group = Group(ReuseRun(None if before is None else before.run), 0, now)
        group.run.size, group.run.last = group.run.size + 1, key
        self._join(key, group)
        self._classify(group)

    def _access(self, key: Key, now: float) -> None:
        group = self._kept[key]
        self._leave(key, group)
        self._use(key, group, now)

    def _use(self, key: Key, group: Group, now: float) -> None:
        """A block of `group`, which it has left, goes where the others go that are used by the same request."""
        target = group.moves_to
        if target is None or now - target.started > SAME_REQUEST_S:
            self._model.reused(group.trial, now)
            target = group.moves_to = Group(group.run, group.num_uses + 1, now)
        if group.keys:
            self._split[group] = None
        self._join(key, target)
        self._classify(target)

    def _remove(self, key: Key) -> None:
        group = self._kept[key]
        self._leave(key, group)
        self._past[key] = group
        if len(self._past) > self.capacity + MORE_REMEMBERED:
            self._past.popitem(last=False)

    def _victim(self, now: float) -> Key | None:
        while self._kept:
            if not self._ranking or self._num_evictions_left <= 0 or now - self._ranked_at > RANKING_S:
                self._rank(now)
            worth, class_number, newest = self._ranking[0]
            queue = self._queues.get(class_number)
            if queue is None:
                heapq.heappop(self._ranking)
                continue
            group = queue.newest() if newest else queue.oldest()
            worth_now = self._model.worth(class_number, now - group.started)
            if worth_now > worth:  # another group has its place now
                heapq.heapreplace(self._ranking, (worth_now, class_number, newest))
                continue
            self._num_evictions_left -= 1
            key = next(reversed(group.keys))
            self._remove(key)
            return key
        return None

    def _restore(self, key: Key, now: float) -> None:
        group = self._past.pop(key, None)
        if group is None:  # pinned for so long that it was forgotten
            self._insert(key, now, None)
        else:
            self._join(key, group)

    def _orders(self, key: Key) -> bool:
        return key in self._kept

    def _num_ordered(self) -> int:
        return len(self._kept)

    def _rank(self, now: float) -> None:
        self._tell_rests(now)
        self._model.refit(now)
        ranking = []
        for class_number, queue in self._queues.items():
            oldest, newest = queue.oldest(), queue.newest()
            ranking.append((self._model.worth(class_number, now - oldest.started), class_number, False))
            if newest is not oldest:
                ranking.append((self._model.worth(class_number, now - newest.started), class_number, True))
        heapq.heapify(ranking)
        self._ranking, self._ranked_at = ranking, now
        self._num_evictions_left = min(MOST_EVICTIONS_A_RANKING, 1 + self.capacity // 64)

    def _tell_rests(self, now: float) -> None:
        """Blocks that a use of their group has passed over are on their own from then on."""
        for group in [group for group in self._split if group.moves_to and group.moves_to.started < now]:
            del self._split[group]
            if group.keys and not group.is_rest:
                keys = list(group.keys)
                rest = Group(group.run, group.num_uses, now)
                rest.is_rest = True
                for key in keys:
                    self._leave(key, group)
                    self._join(key, rest)
                self._classify(rest)

    def _join(self, key: Key, group: Group) -> None:
        run = group.run
        self._kept[key] = group
        run.num_kept += 1
        if run.num_kept == 1 and run.before is not None:
            run.before.num_kept_after += 1
            if run.before.num_kept_after == 1:
                for other in run.before.groups:
                    if not other.is_rest:
                        self._dequeue(other)
        group.keys[key] = None
        if len(group.keys) == 1:
            run.groups[group] = None
            self._enqueue(group)

    def _leave(self, key: Key, group: Group) -> None:
        run = group.run
        del self._kept[key], group.keys[key]
        run.num_kept -= 1
        if not group.keys:
            del run.groups[group]
            self._dequeue(group)
        if run.num_kept == 0 and run.before is not None:
            run.before.num_kept_after -= 1
            if run.before.num_kept_after == 0:
                for other in run.before.groups:
                    self._enqueue(other)

    def _enqueue(self, group: Group) -> None:
        """Into the queue of its class, if it can be given up without a run after it becoming useless."""
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
        """Find its class, which changes as more is known, and its place in the queue of that class."""
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
    """Up to 2, 12, 40, or more blocks."""
    return 0 if num_blocks <= 2 else 1 if num_blocks <= 12 else 2 if num_blocks <= 40 else 3
