"""One `drop_select` on the consumer's side: what was announced, what has been read, and whether it may be used.

Owns the state of one hand-off's arrival. It does not know how announcements come (a socket, or the same process), how
blocks are read (the `Reader` it is given) or where they lie (the `ArrivalMap`); all of it lives on the transfer loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from kvferry.core.errors import ChecksumMismatch, KvferryError, LeaseEnded
from kvferry.transport.lookup_buffer.arrival_map import ArrivalMap
from kvferry.transport.lookup_buffer.base import Taken, Want, describe_ended
from kvferry.transport.lookup_buffer.messages import Announced, Change, Over, Part, Sealed
from kvferry.transport.memory import Span
from kvferry.transport.tasks import translated

MAX_BATCH_BYTES = 32 * 2**20
MAX_BATCH_SPANS = 2**16
"""What waits is read together, up to this much: one round trip for all of it."""

Reader = Callable[[Sequence[Span], Sequence[Span]], Awaitable[bool]]
"""Fills local spans with remote ones; False: what came is not what the producer had."""
Taker = Callable[[int], Awaitable[None]]
"""Asks the producer for an acknowledged take of a generation; the answer comes through `answered`."""


class Selection:
    """See the module. `arrivals` is this hand-off's own."""

    def __init__(self, want: Want, arrivals: ArrivalMap) -> None:
        self.key, self._on_sealed = want.key, want.on_sealed
        self.num_bytes = 0
        self.share = arrivals.share
        self._map = arrivals
        self._generation = -1
        self._waiting: deque[tuple[Part, int]] = deque()
        self._num_tokens = 0
        self._meta: bytes | None = None
        self._asked = False
        self._held = False
        self._error: KvferryError | None = None
        self._changed = asyncio.Event()
        self._started: float | None = None

    # Fed by whoever hears the producer.

    def feed(self, changes: Sequence[Change]) -> None:
        """The producer's news."""
        try:
            for change in changes:
                self._feed_one(change)
        except Exception as error:  # noqa: BLE001 - this hand-off's, and not of the others on its connection
            self.fail(translated(error))
        self._changed.set()

    def _feed_one(self, change: Change) -> None:
        match change:
            case Announced():
                self._announced(change)
            case Sealed() if change.generation == self._generation:
                self._meta = change.meta
                self._on_sealed(change.meta)
            case Over() if not self._held:
                self.fail(LeaseEnded(describe_ended(self.key, change.reason)))

    def answered(self, generation: int, held: bool) -> None:
        """The fence's answer. When not held, more news follows: the end, or a new generation."""
        if self._asked and generation == self._generation and held:
            self._held = True
        self._changed.set()

    def fail(self, error: KvferryError) -> None:
        """It will not come."""
        self._error = self._error or error
        self._changed.set()

    @property
    def failed(self) -> bool:
        """Whether it will not come."""
        return self._error is not None

    # Driven by `drop_select`.

    async def load(self, read: Reader, take: Taker, fabric: str) -> Taken:
        """Read what is announced until all is here and acknowledged. Raises what `drop_select` raises."""
        loop = asyncio.get_running_loop()
        while not self._held:
            if self._error is not None:
                raise self._error
            if self._waiting:
                self._started = self._started or loop.time()
                await self._read_batch(read)
            elif self._meta is not None and not self._asked:
                self._num_tokens = self._map.num_tokens()
                self._asked = True
                await take(self._generation)
            else:
                await self._changed.wait()
                self._changed.clear()
        seconds = 0.0 if self._started is None else loop.time() - self._started
        return Taken(self._meta or b"", self.num_bytes, seconds, fabric, self._num_tokens)

    async def _read_batch(self, read: Reader) -> None:
        generation, remote, local = self._generation, list[Span](), list[Span]()
        num_bytes = 0
        while self._waiting and num_bytes < MAX_BATCH_BYTES and len(remote) + len(local) < MAX_BATCH_SPANS:
            remote_spans, local_spans = self._map.spans(*self._waiting.popleft())
            remote += remote_spans
            local += local_spans
            num_bytes += sum(length for _, length in local_spans)
        intact = not local or await read(remote, local)
        if generation != self._generation:
            return  # the producer began again meanwhile: what was read is void
        self.num_bytes += num_bytes
        if not intact:
            self.fail(ChecksumMismatch(f"hand-off {self.key!r}: the bytes that came are not those that were sent"))

    def _announced(self, change: Announced) -> None:
        if change.generation != self._generation:  # the producer began again: forget what was read
            self._generation = change.generation
            self._waiting.clear()
            self._map.clear()
            self._meta, self._asked, self.num_bytes = None, False, 0
        for part in change.parts:
            self._map.cover(part)
            self._waiting.extend((part, layer) for layer in range(part.first_layer, part.first_layer + part.num_layers))


class Watch:
    """A key that is followed, not read: as long as it is, its connection renews the key's lease. Stands where a
    `Selection` may."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._over = asyncio.Event()
        self._error: KvferryError | None = None

    def feed(self, changes: Sequence[Change]) -> None:
        """The producer's news: only the end matters."""
        if any(isinstance(change, Over) for change in changes):
            self._over.set()

    def answered(self, generation: int, held: bool) -> None:
        """Nothing was asked."""

    def fail(self, error: KvferryError) -> None:
        """The producer is lost."""
        self._error = self._error or error
        self._over.set()

    async def over(self) -> None:
        """Wait until the key is over. Raises why the producer is lost."""
        await self._over.wait()
        if self._error is not None:
            raise self._error
