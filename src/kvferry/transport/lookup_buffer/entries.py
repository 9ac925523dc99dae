"""The keys that a producer offers, and their leases. Pure bookkeeping under one lock: no socket, no thread of its own.

Owns the entries. The engine's thread inserts and drops, the transfer thread reads updates and takes. Each call returns
at once, with its effect complete. The fence relies on that: `take` and `drop` cannot both succeed."""

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
from kvferry.transport.lookup_buffer.messages import KeyUpdate, Part
from kvferry.transport.memory import BlockGeometry

MAX_IDS_PER_UPDATE = 2**17
"""Approximate maximum number of block ids in one message, well below the limit of a frame."""

EndReason = Literal["taken", "released", "unwanted", "expired", "dropped", "full"]
"""The reason why a key has ended: a consumer took it; a consumer released it ("unwanted": before it began); its lease
expired; the producer withdrew it; the table had no room for it."""


@dataclass
class Cursor:
    """The position in the changes of a key that one consumer has received."""

    key: str
    select_id: int = 0
    generation: int = -1
    num_parts: int = 0
    sealed: bool = False
    has_ended: bool = False


@dataclass(frozen=True)
class EntryBounds:
    """Bounds of a table. A lease of `lease_s` runs from the seal or the last renewal; an unsealed key expires
    `unsealed_s` after its last part. End reasons are kept for `unsealed_s` too.

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

    max_ended_keys = 4096
    """Maximum number of ended keys whose end reason is kept; the oldest are dropped first."""

    def __init__(self, geometry: BlockGeometry, clock: Clock, bounds: EntryBounds) -> None:
        self.bounds = bounds
        self.on_end: Callable[[], None] = lambda: None
        """Called after keys have ended."""
        self._geometry, self._clock = geometry, clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._end_reasons: OrderedDict[str, tuple[EndReason, float]] = (
            OrderedDict()
        )  # with the time of expiry; oldest first
        self._has_ended = False
        """True if keys have ended since `on_end` was called last."""
        self._generations = itertools.count()
        self._num_bytes = 0
        self._counts: Counter[str] = Counter()
        self._listeners: tuple[Callable[[], None], ...] = ()

    def listen(self, on_change: Callable[[], None]) -> None:
        """Have `on_change` called after every change except parts that are gathered (`EntryBounds.gather_bytes`)."""
        self._listeners = (*self._listeners, on_change)  # a new tuple: `_notify` may be iterating the old one

    def unlisten(self, on_change: Callable[[], None]) -> None:
        """Stop calling `on_change`."""
        self._listeners = tuple(listener for listener in self._listeners if listener != on_change)

    # The producer.

    def open(self, key: str) -> bool:
        """Begin a key. False: the table is at its bounds, and consumers get the reason "full".

        Bounds are checked here only: a key may always grow, since its blocks are held in the KV cache whether they are
        announced or not. A producer that prefers to wait has to count in advance, as the P2P scheduler side does.
        """
        with self._locked_and_notifying():
            is_unwanted = self._end_reason(key) == "unwanted"  # its consumer left before it began
            self._end_reasons.pop(key, None)
            if len(self._entries) >= self.bounds.max_keys or self._num_bytes >= self.bounds.capacity_bytes:
                self._counts["full"] += 1
                self._record_end(key, "full")
                return False
            assert key not in self._entries, f"{key} is open already"
            self._entries[key] = self._new_entry(self.bounds.lease_s)
            if is_unwanted:
                self._end(key, "released")
        return True

    def insert(self, key: str, part: Part) -> bool:
        """Announce a part. False: the key has ended already."""
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
        """Seal a key, which gets no more parts. The lease begins, of the table's length or of `lease_s`; `meta` is sent
        to the consumer."""
        with self._locked_and_notifying():
            entry = self._entries.get(key)
            if entry is not None:
                entry.meta, entry.lease_s = meta, entry.lease_s if lease_s is None else lease_s
                entry.deadline = self._clock.monotonic() + entry.lease_s

    def reset(self, key: str) -> None:
        """Withdraw all parts, which will be inserted again from the first one. The old ones can no longer be taken."""
        with self._locked_and_notifying():
            entry = self._entries.get(key)
            if entry is not None:
                self._num_bytes -= entry.num_bytes
                self._entries[key] = self._new_entry(entry.lease_s)

    def drop(self, key: str) -> None:
        """Withdraw a key: from now on no take is acknowledged. Consumers that wait for a key that was never opened, or
        come later, get the reason "dropped"."""
        with self._locked_and_notifying():
            if self._end_reason(key) == "unwanted":  # the request that was to open it will not begin now
                self._record_end(key, "released")
            self._end_or_record(key, "dropped")

    def ended(self, keys: Iterable[str]) -> list[str]:
        """The keys among these that are not open: their blocks may be reused. Keys whose lease has expired end now."""
        with self._locked_after_expiry():
            return [key for key in keys if key not in self._entries]

    def end_reason(self, key: str) -> EndReason | None:
        """The reason why a key has ended, or will not come, as long as it is kept. Keys whose lease has expired end
        now."""
        with self._locked_after_expiry():
            return self._end_reason(key)

    # The consumer, through the lookup buffer that serves it.

    def next_update(self, cursor: Cursor) -> KeyUpdate | None:
        """The changes of a key since the cursor, which advances; None if there are none, or the key is unknown."""
        with self._lock:
            entry = self._entries.get(cursor.key)
            if entry is not None:
                return _update(entry, cursor)
            reason = self._end_reason(cursor.key)
            if reason is None or cursor.has_ended:
                return None
            cursor.has_ended = True
            return KeyUpdate(
                cursor.select_id, cursor.generation, end_reason="released" if reason == "unwanted" else reason
            )

    def news(self, cursor: Cursor) -> KeyUpdate | None:
        """Deprecated name of `next_update`."""
        return self.next_update(cursor)

    def take(self, key: str, generation: int, reader: int = 0, num_readers: int = 1, consumer: str = "") -> bool:
        """The fence: true if all parts of this generation were kept until now. `reader` (a rank) has then taken them.

        The key ends as "taken" when all `num_readers` of one `consumer` (an engine id) have taken it. Another consumer
        with the same ticket, as after a retry, is counted separately. A reader that repeats its take counts once.
        """
        with self._locked_and_notifying():
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
        """Renew the leases of these keys: a consumer is still fetching them. An unsealed key has none yet."""
        with self._locked_after_expiry():
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and entry.meta is not None:
                    entry.deadline = self._clock.monotonic() + entry.lease_s

    def release(self, key: str) -> bool:
        """End a key, which will not be fetched, as "released". True if it was open; otherwise it ends as soon as it
        begins, and consumers that wait for it get the reason now."""
        with self._locked_and_notifying():
            is_open = key in self._entries
            self._end_or_record(key, "released" if is_open else "unwanted")
        return is_open

    def expire(self) -> None:
        """End the keys whose lease has expired."""
        with self._locked_after_expiry():
            pass

    # Insight.

    @property
    def is_empty(self) -> bool:
        """True if there is no open key."""
        return not self._entries

    def statistics(self) -> dict[str, float]:
        """Keys and bytes held now, and keys ended by reason."""
        with self._lock:
            gauges = {"num_keys": float(len(self._entries)), "held_bytes": float(self._num_bytes)}
            return gauges | {f"ended_{reason}": float(count) for reason, count in self._counts.items()}

    def audit(self, tolerance_s: float) -> None:
        """Raise `LeakError` if a lease lasts longer than its bound, or expired more than `tolerance_s` ago."""
        with self._lock:
            now = self._clock.monotonic()
            for key, entry in self._entries.items():
                bound = self.bounds.unsealed_s if entry.meta is None else entry.lease_s
                if not now - tolerance_s <= entry.deadline <= now + bound:
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
    def _locked_and_notifying(self) -> Iterator[None]:
        with self._lock:
            yield
        self._notify()

    @contextmanager
    def _locked_after_expiry(self) -> Iterator[None]:
        """Hold the lock, after expired keys have ended; listeners are called only if there were any."""
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
        """End the keys whose lease has expired; returns true if there were any."""
        now = self._clock.monotonic()
        expired = [key for key, entry in self._entries.items() if entry.deadline <= now]
        for key in expired:
            self._end(key, "expired")
        return bool(expired)

    def _end(self, key: str, reason: EndReason) -> None:
        self._num_bytes -= self._entries.pop(key).num_bytes
        self._has_ended = True
        self._counts[reason] += 1
        self._record_end(key, reason)

    def _end_or_record(self, key: str, reason: EndReason) -> None:
        """End a key that is open. For any other key, record that it will not come, unless it has an end reason."""
        if key in self._entries:
            self._end(key, reason)
        elif self._end_reason(key) is None:
            self._record_end(key, reason)

    def _record_end(self, key: str, reason: EndReason) -> None:
        """Keep the reason for later consumers."""
        now = self._clock.monotonic()
        self._end_reasons.pop(key, None)
        self._end_reasons[key] = (reason, now + self.bounds.unsealed_s)
        while len(self._end_reasons) > self.max_ended_keys or next(iter(self._end_reasons.values()))[1] <= now:
            self._end_reasons.popitem(last=False)

    def _end_reason(self, key: str) -> EndReason | None:
        reason, expires_at = self._end_reasons.get(key, (None, 0.0))
        return reason if self._clock.monotonic() < expires_at else None


def _update(entry: _Entry, cursor: Cursor) -> KeyUpdate | None:
    is_new_generation = cursor.generation != entry.generation
    if is_new_generation:
        cursor.generation, cursor.num_parts, cursor.sealed = entry.generation, 0, False
    start = end = cursor.num_parts
    num_ids = 0
    while end < len(entry.parts) and num_ids < MAX_IDS_PER_UPDATE:
        num_ids += len(entry.parts[end].block_ids)
        end += 1
    cursor.num_parts = end
    is_sealed = entry.meta is not None and end == len(entry.parts)
    if not (is_new_generation or end > start or is_sealed > cursor.sealed):
        return None
    meta = entry.meta if is_sealed and not cursor.sealed else None
    cursor.sealed = is_sealed
    return KeyUpdate(cursor.select_id, entry.generation, entry.parts[start:end], meta)
