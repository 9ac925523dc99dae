"""The keys a producer offers, and their leases. Pure bookkeeping under one lock: no socket, no thread of its own.

The producer's methods return at once, from any thread.

Owns the entries. The engine's thread inserts and drops, the transfer thread lists changes and takes; each call is
complete when it returns, and that is what the fence rests on: `take` and `drop` cannot both succeed.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from kvferry.core.clock import Clock
from kvferry.core.errors import LeakError
from kvferry.transport.lookup_buffer.messages import Announced, Change, Over, Part, Sealed
from kvferry.transport.lookup_buffer.remembered import Remembered
from kvferry.transport.memory import BlockGeometry

MAX_IDS_PER_CHANGE = 2**17
"""Block ids in one change, to keep it well within a frame."""


EndReason = Literal["taken", "released", "expired", "dropped", "full"]
"""How a key ends: a consumer has it; nobody wants it; its lease was over; the producer withdrew it; no room for it."""


@dataclass(frozen=True)
class Ended:
    """A key is over: the blocks of its parts may be reused."""

    key: str
    reason: EndReason


@dataclass(frozen=True)
class Cursor:
    """How much of a key one consumer has been told."""

    generation: int = -1
    num_parts: int = 0
    complete: bool = False
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
    parts: list[Part] = field(default_factory=list)
    num_bytes: int = 0
    num_unheard_bytes: int = 0
    meta: bytes | None = None
    lease_s: float | None = None
    takers: set[int] = field(default_factory=set)


class EntryTable:
    """See the module. Listeners are called outside the lock, from whichever thread made the change."""

    def __init__(self, geometry: BlockGeometry, clock: Clock, bounds: EntryBounds) -> None:
        self.bounds = bounds
        self.on_end: Callable[[], None] = lambda: None
        """Called when `ended` has something to say."""
        self._geometry, self._clock = geometry, clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._over = Remembered[EndReason](clock, bounds.unsealed_s)  # so that who asks too late hears why at once
        self._unwanted = Remembered[bool](clock, bounds.unsealed_s)
        self._ended: list[Ended] = []
        self._generations = itertools.count()
        self._num_bytes = 0
        self._counts: Counter[str] = Counter()
        self._listeners: set[Callable[[], None]] = set()

    def listen(self, on_change: Callable[[], None]) -> None:
        """Have `on_change` called after every change, but for parts that are gathered (`EntryBounds`)."""
        self._listeners = self._listeners | {on_change}  # replaced, not changed: `_notify` may be iterating it

    def unlisten(self, on_change: Callable[[], None]) -> None:
        """Stop that."""
        self._listeners = self._listeners - {on_change}

    # The producer.

    def open(self, key: str) -> bool:
        """Begin a key. False: the table is at its bounds; the consumer will be told "full".

        A producer that wants to wait instead must count ahead, as the P2P connector's scheduler side does. The
        bound (keys, and bytes of blocks held) is looked at here only: a key once begun may always grow, since
        its blocks are pinned in the KV cache whether they are announced or not.
        """
        with self._lock:
            self._over.pop(key)
            is_unwanted = self._unwanted.pop(key)  # its consumer left before it began
            if len(self._entries) >= self.bounds.max_keys or self._num_bytes >= self.bounds.capacity_bytes:
                self._counts["full"] += 1
                self._over.set(key, "full")
                accepted = False
            else:
                assert key not in self._entries, f"{key} is open already"
                self._entries[key] = _Entry(next(self._generations), self._unsealed_deadline())
                accepted = True
                if is_unwanted:
                    self._end(key, "released")
        self._notify()
        return accepted

    def insert(self, key: str, part: Part) -> bool:
        """Announce a part. False: the key is over already, nobody wants more of it."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return False
            assert entry.meta is None, f"{key} is sealed"
            entry.parts.append(part)
            entry.deadline = self._unsealed_deadline()
            num_bytes = self._bytes_of(part)
            entry.num_bytes += num_bytes
            self._num_bytes += num_bytes
            entry.num_unheard_bytes += num_bytes
            if entry.num_unheard_bytes < self.bounds.gather_bytes:
                return True
            entry.num_unheard_bytes = 0
        self._notify()
        return True

    def seal(self, key: str, meta: bytes) -> None:
        """No more parts come. The lease begins; `meta` goes to the consumer."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.meta = meta
                entry.deadline = self._lease_deadline(entry)
        self._notify()

    def set_lease(self, key: str, lease_s: float) -> None:
        """Give a key a lease of its own length; before its seal."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.lease_s = lease_s

    def reset(self, key: str) -> None:
        """Withdraw all parts; they will be inserted again from the first. After this, no take of the old ones."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._num_bytes -= entry.num_bytes
                self._entries[key] = _Entry(next(self._generations), self._unsealed_deadline(), lease_s=entry.lease_s)
        self._notify()

    def drop(self, key: str) -> None:
        """Withdraw a key. After this returns no take is acknowledged any more. Of a key that was never opened, who
        waits for it, or comes later, is told "dropped" at once."""
        with self._lock:
            self._unwanted.pop(key)  # that was of the request which will not begin now
            self._end_or_remember(key, "dropped")
        self._notify()

    def ended(self) -> list[Ended]:
        """Keys that ended since the last call, each once; those whose time is over end now."""
        self.expire()
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    # The consumer, by way of whoever serves it.

    def changes(self, key: str, cursor: Cursor) -> tuple[list[Change], Cursor]:
        """What happened to a key since `cursor`, and where the cursor is now. Unknown keys have no news."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                reason = self._over.get(key)
                if reason is None or cursor.over:
                    return [], cursor
                return [Over(reason)], replace(cursor, over=True)
            return _news(entry, cursor)

    def take(self, key: str, generation: int, taker: int = 0, num_takers: int = 1) -> bool:
        """The fence: whether all parts of this generation were kept until now. If so, this taker has it.

        When each of the `num_takers` has it, the key ends as taken. A taker that asks again counts once.
        """
        with self._lock:
            self._expire()
            entry = self._entries.get(key)
            held = entry is not None and entry.meta is not None and entry.generation == generation
            if entry is not None and held:
                entry.takers.add(taker)
                if len(entry.takers) >= num_takers:
                    self._end(key, "taken")
        self._notify()
        return held

    def renew(self, key: str) -> None:
        """A consumer is at work on this key: its lease begins anew."""
        with self._lock:
            self._expire()
            entry = self._entries.get(key)
            if entry is not None and entry.meta is not None:
                entry.deadline = self._lease_deadline(entry)

    def release(self, key: str) -> bool:
        """Nobody will come for this key, nor for one of that name which is about to begin. True when it was there."""
        with self._lock:
            is_new = key not in self._entries and self._over.get(key) is None
            found = self._end_or_remember(key, "released")
            if is_new:
                self._unwanted.set(key, True)
        self._notify()
        return found

    # Time.

    def expire(self) -> None:
        """End the keys whose time is over."""
        with self._lock:
            num_before = len(self._ended)
            self._expire()
            changed = len(self._ended) != num_before
        if changed:
            self._notify()

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

    def _unsealed_deadline(self) -> float:
        return self._clock.monotonic() + self.bounds.unsealed_s

    def _lease_deadline(self, entry: _Entry) -> float:
        lease_s = self.bounds.lease_s if entry.lease_s is None else entry.lease_s
        return self._clock.monotonic() + lease_s

    def _bytes_of(self, part: Part) -> int:
        layers = range(part.first_layer, part.first_layer + part.num_layers)
        return sum(self._geometry.span_sizes[layer] for layer in layers) * len(part.block_ids)

    def _expire(self) -> None:
        now = self._clock.monotonic()
        for key in [key for key, entry in self._entries.items() if entry.deadline <= now]:
            self._end(key, "expired")

    def _end(self, key: str, reason: EndReason) -> None:
        self._num_bytes -= self._entries.pop(key).num_bytes
        self._ended.append(Ended(key, reason))
        self._counts[reason] += 1
        self._over.set(key, reason)

    def _end_or_remember(self, key: str, reason: EndReason) -> bool:
        """End a key. Of one that is not there it is remembered that it will not come, unless it is known to be over."""
        if key in self._entries:
            self._end(key, reason)
            return True
        if self._over.get(key) is None:
            self._over.set(key, reason)
        return False

    # Outside of it.

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
        if self._ended:
            self.on_end()


def _news(entry: _Entry, cursor: Cursor) -> tuple[list[Change], Cursor]:
    begun_anew = cursor.generation != entry.generation
    start = 0 if begun_anew else cursor.num_parts
    parts = _up_to(entry.parts, start, MAX_IDS_PER_CHANGE)
    complete = entry.meta is not None and start + len(parts) == len(entry.parts)
    changes: list[Change] = []
    if parts or begun_anew:
        changes.append(Announced(entry.generation, parts))
    if entry.meta is not None and complete and (begun_anew or not cursor.complete):
        changes.append(Sealed(entry.generation, entry.meta))
    return changes, Cursor(entry.generation, start + len(parts), complete)


def _up_to(parts: list[Part], start: int, max_ids: int) -> list[Part]:
    """Parts from `start` on, at least one if there is any, of about `max_ids` block ids."""
    num_ids, end = 0, start
    while end < len(parts) and num_ids < max_ids:
        num_ids += len(parts[end].block_ids)
        end += 1
    return parts[start:end]
