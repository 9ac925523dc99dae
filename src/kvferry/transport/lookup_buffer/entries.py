"""The keys that a producer offers, and their leases. Pure bookkeeping under one lock: no socket, no thread of its own.

Owns the entries. The engine's thread inserts and drops, the transfer thread asks for news and takes. Each call returns
at once, with its effect complete. The fence relies on that: `take` and `drop` cannot both succeed.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from kvferry.core.clock import Clock
from kvferry.core.errors import LeakError
from kvferry.transport.lookup_buffer.messages import News, Part
from kvferry.transport.memory import BlockGeometry

MAX_IDS_PER_NEWS = 2**17
"""About the most block ids in one message, which keeps it well below the limit of a frame."""
MAX_REMEMBERED = 4096
"""The most keys of which the table remembers why they are over; the oldest are forgotten first."""

EndReason = Literal["taken", "released", "unwanted", "expired", "dropped", "full"]
"""Why a key is over: a consumer has it; nobody wants it ("unwanted": released before it began); its lease expired; the
producer withdrew it; the table had no room for it."""


@dataclass
class Cursor:
    """How much of a key's news one consumer has been sent."""

    key: str
    select_id: int = 0
    generation: int = -1
    num_parts: int = 0
    sealed: bool = False
    over: bool = False


@dataclass(frozen=True)
class EntryBounds:
    """Bounds of a table. A lease of `lease_s` runs from the seal or the last renewal; an unsealed key expires
    `unsealed_s` after its last part. For `unsealed_s` it is also remembered why a key is over.

    `gather_bytes`: parts are sent to consumers when they have this size together, or at the seal. A message costs
    the producer CPU time, and a consumer gains nothing from an early announcement of a few bytes.
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
    num_gathered_bytes: int = 0
    meta: bytes | None = None
    readers: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # by consumer


class EntryTable:
    """A producer's keys: their parts, leases and ends. Listeners are called without the lock, on the thread that made
    the change."""

    def __init__(self, geometry: BlockGeometry, clock: Clock, bounds: EntryBounds) -> None:
        self.bounds = bounds
        self.on_end: Callable[[], None] = lambda: None
        """Called after keys have ended."""
        self._geometry, self._clock = geometry, clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._over: OrderedDict[str, tuple[EndReason, float]] = OrderedDict()  # until when it is known; oldest first
        self._has_ended = False
        """Whether keys have ended since `on_end` was called last."""
        self._generations = itertools.count()
        self._num_bytes = 0
        self._counts: Counter[str] = Counter()
        self._listeners: tuple[Callable[[], None], ...] = ()

    def listen(self, on_change: Callable[[], None]) -> None:
        """Have `on_change` called after every change but parts that are gathered (`EntryBounds.gather_bytes`)."""
        self._listeners = (*self._listeners, on_change)  # a new tuple: `_notify` may be iterating the old one

    def unlisten(self, on_change: Callable[[], None]) -> None:
        """Stop calling `on_change`."""
        self._listeners = tuple(one for one in self._listeners if one != on_change)

    # The producer.

    def open(self, key: str) -> bool:
        """Begin a key. False: the table is at its bounds, and consumers get the reason "full".

        Bounds are checked here only: a key may always grow, since its blocks are held in the KV cache whether they are
        announced or not. A producer that would rather wait has to count ahead, as the P2P scheduler side does.
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
        """Announce a part. False: the key is over already."""
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
            entry.num_gathered_bytes += num_bytes
            if entry.num_gathered_bytes < self.bounds.gather_bytes:
                return True
            entry.num_gathered_bytes = 0
        self._notify()
        return True

    def seal(self, key: str, meta: bytes, lease_s: float | None = None) -> None:
        """No more parts will come. The lease begins, of the table's length or of `lease_s`; `meta` goes to the
        consumer."""
        with self._changing():
            entry = self._entries.get(key)
            if entry is not None:
                entry.meta, entry.lease_s = meta, entry.lease_s if lease_s is None else lease_s
                entry.deadline = self._clock.monotonic() + entry.lease_s

    def reset(self, key: str) -> None:
        """Withdraw all parts, which will be inserted again from the first one. The old ones can no longer be taken."""
        with self._changing():
            entry = self._entries.get(key)
            if entry is not None:
                self._num_bytes -= entry.num_bytes
                self._entries[key] = self._new_entry(entry.lease_s)

    def drop(self, key: str) -> None:
        """Withdraw a key: from now on no take is acknowledged. Consumers that wait for one that was never opened, or
        come later, get the reason "dropped"."""
        with self._changing():
            if self._why_over(key) == "unwanted":  # the request that was to open it will not begin now
                self._remember(key, "released")
            self._end_or_remember(key, "dropped")

    def over(self, keys: Iterable[str]) -> list[str]:
        """The keys among these that are not open: their blocks may be reused. Keys whose lease is over expire now."""
        with self._expiring():
            return [key for key in keys if key not in self._entries]

    def why_over(self, key: str) -> EndReason | None:
        """Why a key has ended, or will not come, as long as that is remembered. Keys whose lease is over expire now."""
        with self._expiring():
            return self._why_over(key)

    # The consumer, through the lookup buffer that serves it.

    def news(self, cursor: Cursor) -> News | None:
        """What is new of a key since the cursor, which advances; None if nothing is, or the key is unknown."""
        with self._lock:
            entry = self._entries.get(cursor.key)
            if entry is not None:
                return _news(entry, cursor)
            reason = self._why_over(cursor.key)
            if reason is None or cursor.over:
                return None
            cursor.over = True
            return News(cursor.select_id, cursor.generation, over="released" if reason == "unwanted" else reason)

    def take(self, key: str, generation: int, reader: int = 0, num_readers: int = 1, consumer: str = "") -> bool:
        """The fence: whether all parts of this generation were kept until now. If so, `reader` (a rank) has taken them.

        The key ends as "taken" when all `num_readers` of one `consumer` (an engine id) have taken it. Another consumer
        with the same ticket, as after a retry, is counted separately. A reader that asks again counts once.
        """
        with self._changing():
            self._expire()
            entry = self._entries.get(key)
            if entry is None or entry.meta is None or entry.generation != generation:
                return False
            readers = entry.readers[consumer]
            readers.add(reader)
            if len(readers) >= num_readers:
                self._end(key, "taken")
        return True

    def renew(self, *keys: str) -> None:
        """Begin the leases of these keys again: a consumer is still fetching them. An unsealed key has none yet."""
        with self._expiring():
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and entry.meta is not None:
                    entry.deadline = self._clock.monotonic() + entry.lease_s

    def release(self, key: str) -> bool:
        """End a key, which nobody will fetch, as "released". True if it was there; otherwise it ends as soon as it
        begins, and consumers that wait for it get the reason now."""
        with self._changing():
            is_open = key in self._entries
            self._end_or_remember(key, "released" if is_open else "unwanted")
        return is_open

    def expire(self) -> None:
        """End the keys whose time is over."""
        with self._expiring():
            pass

    # Insight.

    @property
    def is_empty(self) -> bool:
        """Whether there is no key."""
        return not self._entries

    def statistics(self) -> dict[str, float]:
        """Keys and bytes held now, and keys ended by reason."""
        with self._lock:
            gauges = {"num_keys": float(len(self._entries)), "held_bytes": float(self._num_bytes)}
            return gauges | {f"ended_{reason}": float(count) for reason, count in self._counts.items()}

    def audit(self, late_s: float) -> None:
        """Raise `LeakError` if a lease lasts longer than its bound, or has been over for more than `late_s`."""
        with self._lock:
            now = self._clock.monotonic()
            for key, entry in self._entries.items():
                bound = self.bounds.unsealed_s if entry.meta is None else entry.lease_s
                if not now - late_s <= entry.deadline <= now + bound:
                    left_s = entry.deadline - now
                    raise LeakError(f"the lease of {key} ends in {left_s:.3f} s, with a bound of {bound:g} s")

    def check(self) -> None:
        """Raise `LeakError` if a key is left."""
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
        """Keys whose time is over end before the body; listeners are called only if there were any."""
        with self._lock:
            has_expired = self._expire()
            yield
        if has_expired:
            self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
        if self._has_ended:
            self._has_ended = False
            self.on_end()

    def _new_entry(self, lease_s: float) -> _Entry:
        return _Entry(next(self._generations), self._clock.monotonic() + self.bounds.unsealed_s, lease_s)

    def _expire(self) -> bool:
        """End the keys whose time is over; returns whether there were any."""
        now = self._clock.monotonic()
        expired = [key for key, entry in self._entries.items() if entry.deadline <= now]
        for key in expired:
            self._end(key, "expired")
        return bool(expired)

    def _end(self, key: str, reason: EndReason) -> None:
        self._num_bytes -= self._entries.pop(key).num_bytes
        self._has_ended = True
        self._counts[reason] += 1
        self._remember(key, reason)

    def _end_or_remember(self, key: str, reason: EndReason) -> None:
        """End a key that is open. For any other key, remember that it will not come, unless it is known to be over."""
        if key in self._entries:
            self._end(key, reason)
        elif self._why_over(key) is None:
            self._remember(key, reason)

    def _remember(self, key: str, reason: EndReason) -> None:
        """Keep the reason for consumers that ask later."""
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
