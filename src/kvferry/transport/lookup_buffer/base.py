"""The keyed hand-off: what one instance computes under a key, another takes, once.

The producer opens a key in its `EntryTable`, inserts parts of its blocks as they are computed, and seals it. The
consumer may ask at any time, also before the key exists, and is given each part as soon as it is announced; so layers
flow while the producer still computes. Nothing is copied until a consumer asks: the parts only name blocks, which stay
the producer's until the table says that the key has ended.

The *fence* makes this safe: the consumer reads freely, and in the end asks whether the producer kept all of it
until that moment. Only an acknowledged take counts; whatever was read without one is worth nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.core.errors import ConfigError, LeakError
from kvferry.core.layout import KVLayout
from kvferry.core.names import ExtensionPoint
from kvferry.core.transfer_config import KVTransferConfig
from kvferry.transport.connection import Identity, limited_to
from kvferry.transport.lookup_buffer.entries import EntryTable
from kvferry.transport.memory import BlockMemory
from kvferry.transport.options import TransportOptions


@dataclass(frozen=True)
class Source:
    """The address of a producer's rank. `engine_id`, where known, tells whether it is still the same one; `tp_rank`
    of `tp_size`, where known, whether it is the rank that was meant."""

    host: str
    port: int
    engine_id: str = ""
    tp_rank: int | None = None
    tp_size: int | None = None


def ignore(meta: bytes) -> None:
    """Nobody wants to know early."""


@dataclass(frozen=True)
class Want:
    """A hand-off that a consumer wants: our rank's share of all its parts, in our blocks `into`.

    `into` are in the request's order; the first `skip_blocks` of them have their KV already and are left alone. The
    producer may have sealed fewer blocks than `into` holds: see `Taken.num_tokens`. It may have more only where a
    `prefix` of them is wanted. `on_sealed` is told the seal's `meta`, on the `TransferLoop`, as soon as it is known,
    before all parts have come. `deadline` is monotonic, s.
    """

    key: str
    source: Source
    into: Sequence[int]
    deadline: float
    skip_blocks: int = 0
    prefix: bool = False
    on_sealed: Callable[[bytes], None] = ignore


@dataclass(frozen=True)
class Taken:
    """A hand-off that is complete and acknowledged. `seconds`: from the first part to the acknowledgement.

    `num_tokens`: the prompt's first so many, counted in blocks, have come or were here; None: all that `into` holds.
    """

    meta: bytes
    num_bytes: int
    seconds: float
    fabric: str
    num_tokens: int | None = None


@dataclass(frozen=True)
class LookupBufferContext:
    """What a lookup buffer is built from. `table` is the producer's; the buffer lets consumers know what is in it."""

    config: KVTransferConfig
    settings: TransportOptions
    memory: BlockMemory
    identity: Identity
    token: str
    table: EntryTable


class LookupBuffer(ABC):
    """How consumers hear of what is in a producer's table, and get it; an instance may be either.

    All that waits runs on the instance's `TransferLoop`.
    """

    def __init__(self, table: EntryTable) -> None:
        self.table = table
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._num_waiting = 0

    @classmethod
    @abstractmethod
    def build(cls, context: LookupBufferContext) -> LookupBuffer:
        """A buffer of this kind. Raises `ConfigError` when it does not work here."""

    @classmethod
    def check_settings(cls, settings: TransportOptions) -> None:
        """Raise `ConfigError` for what can be known to be wrong before anything is built. Default: nothing can."""

    # Consumer.

    async def drop_select(self, want: Want) -> Taken:
        """Wait for the key, read all its parts, and take it; the key ends on the producer when each of the ranks that
        read it has taken it.

        When this returns or raises, also by cancellation, none of the blocks is written to any more. Without a take
        the key stays with the producer for the rest of its lease, for another consumer or try.

        Raises `LeaseEnded` (taken by another, over, withdrawn), `PeerLost`, `TransferTimeout`, `ProtocolError`,
        `AuthenticationFailed`, `ChecksumMismatch`, `LayoutMismatch`, or `ConfigError` (the two share no transport).
        """
        self._num_waiting += 1
        try:
            async with limited_to(want.deadline, f"hand-off {want.key!r}"):
                taken = await self._take(want)
        finally:
            self._num_waiting -= 1
        self._counts["taken"] += 1
        self._counts[f"taken_bytes_{taken.fabric}"] += taken.num_bytes
        self._seconds += taken.seconds
        return taken

    @abstractmethod
    async def _take(self, want: Want) -> Taken:
        """What `drop_select` does, which limits its time and counts it."""

    async def layout_at(self, source: Source, *, deadline: float) -> KVLayout:
        """What the blocks of a producer's rank mean. Raises as `drop_select`."""
        raise ConfigError("this transport joins only instances of one tensor-parallel size")

    async def keep(self, key: str, source: Source) -> None:
        """Keep the key's lease alive until cancelled, or until there is nothing to keep. Raises as `drop_select`."""

    @abstractmethod
    async def release(self, key: str, source: Source, *, deadline: float) -> None:
        """Tell the producer that nobody will come for this key. Raises as `drop_select`."""

    # Producer.

    def end(self, key: str) -> bool:
        """The consumer will never come: end the key as "released". True when there was one; otherwise whoever waits for
        it hears the same, and it ends as soon as it begins. From any thread."""
        return self.table.release(key)

    def address(self) -> dict[str, Any]:
        """Where consumers find this producer; JSON-able."""
        return {}

    # Both.

    @abstractmethod
    async def run(self) -> None:
        """Serve until cancelled; then every connection is closed."""

    def close(self) -> None:
        """Give back what is held from the beginning on; also for a buffer that never ran."""

    def statistics(self) -> dict[str, float]:
        """Counters by name; bytes and seconds carry their unit in it."""
        counts = {name: float(count) for name, count in self._counts.items()}
        return self.table.statistics() | counts | {"taken_seconds": self._seconds}

    def check(self) -> None:
        """Raise `LeakError` when a key, or a consumer's wait, is left."""
        self.table.check()
        if self._num_waiting:
            raise LeakError(f"{self._num_waiting} hand-offs are still being fetched")


LOOKUP_BUFFERS = ExtensionPoint(
    "lookup_buffer",
    {"fabric": "kvferry.transport.lookup_buffer.fabric:FabricLookupBuffer"},
    "kvferry.lookup_buffers",
)


def lookup_buffer_class(settings: TransportOptions) -> type[LookupBuffer]:
    """The class that a configuration asks for. Raises `UnknownName`, or `ConfigError` when it cannot be imported."""
    found: type[LookupBuffer] = LOOKUP_BUFFERS.find(settings.lookup_buffer, LookupBuffer)
    return found


def check_lookup_buffer(settings: TransportOptions) -> None:
    """Raise `ConfigError` for what can be known to be wrong with the configuration before anything is built: names, and
    libraries that are not installed. Nothing is looked for that is named `module:Class`."""
    LOOKUP_BUFFERS.require_known(settings.lookup_buffer)
    if ":" not in settings.lookup_buffer:
        lookup_buffer_class(settings).check_settings(settings)
