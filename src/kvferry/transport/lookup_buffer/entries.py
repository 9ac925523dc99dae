"""The keys a producer offers, and their leases. Pure bookkeeping under one lock: no socket, no thread of its own.

Owns the entries. The engine's thread inserts and drops, the transfer thread looks for news and takes; each call returns
at once, and is complete when it returns. The fence rests on that: `take` and `drop` cannot both succeed.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from kvferry.core.clock import Clock
from kvferry.core.errors import LeakError
from kvferry.transport.lookup_buffer.messages import News, Part
from kvferry.transport.memory import BlockGeometry

MAX_IDS_PER_NEWS = 2**17
"""Block ids in one message, to keep it well within a frame."""
MAX_REMEMBERED = 4096
"""Keys of which it is known why they are over; beyond, the oldest are forgotten."""

EndReason = Literal["taken", "released", "unwanted", "expired", "dropped", "full"]
"""How a key ends: a consumer has it; nobody wants it, or did before it began; its lease was over; the producer withdrew
it; no room for it."""


@dataclass
class Cursor:
    """How much of a key one consumer has been told."""

    key: str
    select_id: int = 0
    generation: int = -1
    num_parts: int = 0
    sealed: bool = False
    over: bool = False


@dataclass(frozen=True)
class EntryBounds:
    """Bounds of a table. `lease_s` runs from the seal or last renewal, `unsealed_s` from the last part; as long
    is remembered why a key is over, and that nobody wants one which has not begun.

    `gather_bytes`: parts are heard of when there are so many bytes of them, or at the seal. To be told costs the
    producer's cores, and of a little nothing is gained: it is read in no time.
    """

    lease_s: float = 30.0
    unsealed_s: float = 300.0
    max_keys: int = 4096
    capacity_bytes: float = float("inf")
    gather_bytes: int = 0


@dataclass
class _Entry:
    generation: int
    deadline: float
    lease_s: float
    parts: list[Part] = field(default_factory=list)
    num_bytes: int = 0
    num_unheard_bytes: int = 0
    meta: bytes | None = None
    takers: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # by consumer


class EntryTable:
    """A producer's keys: their parts, leases and ends. Listeners are called outside the lock, from the thread that made
    the change."""

    def __init__(self, geometry: BlockGeometry, clock: Clock, bounds: EntryBounds) -> None:
        self.bounds = bounds
        self.on_end: Callable[[], None] = lambda: None
        """Called when `ended` has something to say."""
        self._geometry, self._clock = geometry, clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._over: OrderedDict[str, tuple[EndReason, float]] = OrderedDict()  # until when it is known; oldest first
        self._ended: list[tuple[str, EndReason]] = []
        self._generations = itertools.count()
        self._num_bytes = 0
        self._counts: Counter[str] = Counter()
        self._listeners: frozenset[Callable[[], None]] = frozenset()

    def listen(self, on_change: Callable[[], None]) -> None:
        """Have `on_change` called after every change, but for parts that are gathered (`EntryBounds`)."""
        self._listeners |= {on_change}  # a new set: `_notify` may be iterating the old one

    def unlisten(self, on_change: Callable[[], None]) -> None:
        """Stop that."""
        self._listeners -= {on_change}

    # The producer.

    def open(self, key: str) -> bool:
        """Begin a key. False: the table is at its bounds; the consumer will be told "full".

        A producer that wants to wait instead must count ahead, as the P2P connector's scheduler side does. The
        bound (keys, and bytes of blocks held) is looked at here only: a key once begun may always grow, since
        its blocks are pinned in the KV cache whether they are announced or not.
        """
        with self._changing():
            is_unwanted = self._why_over(key) == "unwanted"  # its consumer left before it began
            self._over.pop(key, None)
            if len(self._entries) >= self.bounds.max_keys or self._num_bytes >= self.bounds.capacity_bytes:
                self._counts["full"] += 1
                self._remember(key, "full")
                return False
            assert key not in self._entries, f"{key} is open already"
            self._entries[key] = self._new_entry(self.bounds.lease_s)
            if is_unwanted:
                self._end(key, "released")
        return True

    def insert(self, key: str, part: Part) -> bool:
        """Announce a part. False: the key is over already, nobody wants more of it."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return False
            assert entry.meta is None, f"{key} is sealed"
            entry.parts.append(part)
            entry.deadline = self._clock.monotonic() + self.bounds.unsealed_s
            layers = range(part.first_layer, part.first_layer + part.num_layers)
            num_bytes = sum(self._geometry.span_sizes[layer] for layer in layers) * len(part.block_ids)
            entry.num_bytes += num_bytes
            self._num_bytes += num_bytes
            entry.num_unheard_bytes += num_bytes
            if entry.num_unheard_bytes < self.bounds.gather_bytes:
                return True
            entry.num_unheard_bytes = 0
        self._notify()
        return True

    def seal(self, key: str, meta: bytes, lease_s: float | None = None) -> None:
        """No more parts come. The lease begins, of the table's length or its own; `meta` goes to the consumer."""
        with self._changing():
            entry = self._entries.get(key)
            if entry is not None:
                entry.meta, entry.lease_s = meta, entry.lease_s if lease_s is None else lease_s
                entry.deadline = self._clock.monotonic() + entry.lease_s

    def reset(self, key: str) -> None:
        """Withdraw all parts; they will be inserted again from the first. After this, no take of the old ones."""
        with self._changing():
            entry = self._entries.get(key)
            if entry is not None:
                self._num_bytes -= entry.num_bytes
                self._entries[key] = self._new_entry(entry.lease_s)

    def drop(self, key: str) -> None:
        """Withdraw a key. After this returns no take is acknowledged any more. Of a key that was never opened, who
        waits for it, or comes later, is told "dropped" at once."""
        with self._changing():
            if self._why_over(key) == "unwanted":  # that was of the request which will not begin now
                self._remember(key, "released")
            self._end_or_remember(key, "dropped")

    def ended(self) -> list[tuple[str, EndReason]]:
        """Keys that ended since the last call, each once: the blocks of their parts may be reused. Those whose time is
        over end now."""
        self.expire()
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    # The consumer, by way of whoever serves it.

    def news(self, cursor: Cursor) -> News | None:
        """What is new of a key since the cursor, which moves on. Nothing of unknown keys."""
        with self._lock:
            entry = self._entries.get(cursor.key)
            if entry is not None:
                return _news(entry, cursor)
            reason = self._why_over(cursor.key)
            if reason is None or cursor.over:
                return None
            cursor.over = True
            return News(cursor.select_id, cursor.generation, over="released" if reason == "unwanted" else reason)

    def take(self, key: str, generation: int, taker: int = 0, num_takers: int = 1, consumer: str = "") -> bool:
        """The fence: whether all parts of this generation were kept until now. If so, this taker has it.

        When each of the `num_takers` of one `consumer` (an `engine_id`) has it, the key ends as taken: another that has
        the same ticket, as after a retry, counts for itself. A taker that asks again counts once.
        """
        with self._changing():
            self._expire()
            entry = self._entries.get(key)
            if entry is None or entry.meta is None or entry.generation != generation:
                return False
            takers = entry.takers[consumer]
            takers.add(taker)
            if len(takers) >= num_takers:
                self._end(key, "taken")
        return True

    def renew(self, *keys: str) -> None:
        """A consumer is at work on these keys: their leases begin anew."""
        with self._expiring():
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and entry.meta is not None:
                    entry.deadline = self._clock.monotonic() + entry.lease_s

    def release(self, key: str) -> bool:
        """Nobody will come for this key, nor for one of that name which is about to begin. True when it was there."""
        with self._changing():
            is_open = key in self._entries
            self._end_or_remember(key, "released" if is_open else "unwanted")
        return is_open

    def expire(self) -> None:
        """End the keys whose time is over."""
        with self._expiring():
            pass

    # Insight.

    def statistics(self) -> dict[str, float]:
        """Keys and bytes held now, and keys ended by reason."""
        with self._lock:
            gauges = {"num_keys": float(len(self._entries)), "held_bytes": float(self._num_bytes)}
            return gauges | {f"ended_{reason}": float(count) for reason, count in self._counts.items()}

    def check(self) -> None:
        """Raise `LeakError` when a key is left."""
        with self._lock:
            if self._entries:
                raise LeakError(f"hand-offs are still held: {', '.join(sorted(self._entries)[:8])}")
            if self._num_bytes:
                raise LeakError(f"{self._num_bytes} bytes are counted as held, by no key")

    # Under the lock.

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            yield
        self._notify()

    @contextmanager
    def _expiring(self) -> Iterator[None]:
        """Keys whose time is over end first; listeners are called only when there were any."""
        with self._lock:
            num_before = len(self._ended)
            self._expire()
            has_ended = len(self._ended) != num_before
            yield
        if has_ended:
            self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
        if self._ended:
            self.on_end()

    def _new_entry(self, lease_s: float) -> _Entry:
        return _Entry(next(self._generations), self._clock.monotonic() + self.bounds.unsealed_s, lease_s)

    def _expire(self) -> None:
        now = self._clock.monotonic()
        for key in [key for key, entry in self._entries.items() if entry.deadline <= now]:
            self._end(key, "expired")

    def _end(self, key: str, reason: EndReason) -> None:
        self._num_bytes -= self._entries.pop(key).num_bytes
        self._ended.append((key, reason))
        self._counts[reason] += 1
        self._remember(key, reason)

    def _end_or_remember(self, key: str, reason: EndReason) -> None:
        """End a key. Of one that is not there it is remembered that it will not come, unless it is known to be over."""
        if key in self._entries:
            self._end(key, reason)
        elif self._why_over(key) is None:
            self._remember(key, reason)

    def _remember(self, key: str, reason: EndReason) -> None:
        """So that who asks too late hears why at once."""
        now = self._clock.monotonic()
        self._over.pop(key, None)
        self._over[key] = (reason, now + self.bounds.unsealed_s)
        while len(self._over) > MAX_REMEMBERED or next(iter(self._over.values()))[1] <= now:
            self._over.popitem(last=False)

    def _why_over(self, key: str) -> EndReason | None:
        reason, until = self._over.get(key, (None, 0.0))
        return reason if self._clock.monotonic() < until else None


def _news(entry: _Entry, cursor: Cursor) -> News | None:
    begun_anew = cursor.generation != entry.generation
    if begun_anew:
        cursor.generation, cursor.num_parts, cursor.sealed = entry.generation, 0, False
    start = end = cursor.num_parts
    num_ids = 0
    while end < len(entry.parts) and num_ids < MAX_IDS_PER_NEWS:
        num_ids += len(entry.parts[end].block_ids)
        end += 1
    cursor.num_parts = end
    is_sealed = entry.meta is not None and end == len(entry.parts)
    if not (begun_anew or end > start or is_sealed > cursor.sealed):
        return None
    meta = entry.meta if is_sealed and not cursor.sealed else None
    cursor.sealed = is_sealed
    return News(cursor.select_id, entry.generation, entry.parts[start:end], meta)
