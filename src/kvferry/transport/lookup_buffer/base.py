"""The keyed hand-off: one instance computes KV under a key, and another one takes it, once.

The producer opens a key in its `EntryTable`, inserts parts of its blocks as they are computed, and seals it. The
consumer may select a key at any time, even before it exists, and gets each part as it is announced, so that layers are
transferred while the producer still computes. Parts only name blocks, which the producer keeps until the key has ended;
nothing is copied before a consumer selects it.

The *fence* makes this safe: the consumer reads without locks, and then sends a take, which the producer acknowledges if
it has kept everything until then. The bytes may only be used after an acknowledged take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ConfigError
from kvferry.core.names import ExtensionPoint
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.transport import control
from kvferry.transport.connection import Identity
from kvferry.transport.fabric.base import require_gpu
from kvferry.transport.lookup_buffer.entries import EntryTable
from kvferry.transport.memory import BlockMemory
from kvferry.transport.options import TransportOptions, options_of


@dataclass(frozen=True)
class Source:
    """The address of a producer's rank. `engine_id`, `tp_rank` and `tp_size`, if known, are compared when a connection
    is made, since another engine or rank may listen there by now."""

    host: str
    port: int
    engine_id: str = ""
    tp_rank: int | None = None
    tp_size: int | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def ignore(meta: bytes) -> None:
    """The default of `Want.on_sealed`."""


@dataclass(frozen=True)
class Want:
    """A consumer's request for a hand-off: this rank's share of all parts, written to its blocks `into`.

    `into` is in the request's order; the first `skip_blocks` have their KV already and are not written to. The producer
    may seal fewer blocks than `into` holds (`Taken.num_tokens`), and more only with `prefix`. `on_sealed` is called on
    the `TransferLoop` with the seal's `meta` as soon as it is known. `deadline`: monotonic, s.
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
    """A hand-off that is complete and acknowledged. `seconds`: from the first read to the acknowledgement.

    `num_tokens`: number of leading tokens of the prompt, in whole blocks, that have their KV now; None: all that `into`
    holds.
    """

    meta: bytes
    num_bytes: int
    seconds: float
    fabric: str
    num_tokens: int | None = None


@dataclass(frozen=True)
class LookupBufferContext:
    """The arguments from which a lookup buffer is built. `table`: this instance's own keys, which the buffer offers to
    consumers."""

    config: KVTransferConfig
    settings: TransportOptions
    memory: BlockMemory
    identity: Identity
    token: str
    table: EntryTable


class LookupBuffer(ABC):
    """One instance's end: offers the keys of `table` to consumers, and fetches from other instances.

    Coroutines run on the instance's `TransferLoop`.
    """

    def __init__(self, table: EntryTable) -> None:
        self.table = table

    @classmethod
    @abstractmethod
    def build(cls, context: LookupBufferContext) -> LookupBuffer:
        """A buffer of this kind. Raises `ConfigError` if it does not work on this machine."""

    @classmethod
    def check_settings(cls, settings: TransportOptions) -> None:
        """Raise `ConfigError` for mistakes that can be found before anything is built. Default: none."""

    # Consumer.

    @abstractmethod
    async def drop_select(self, want: Want) -> Taken:
        """Wait for the key, read all its parts, and take it. On the producer, the key ends when all ranks that read it
        have taken it.

        When this returns or raises, also by cancellation, none of the blocks is written to any more. A key that was not
        taken stays with the producer for the rest of its lease, for another consumer or attempt.

        Raises `LeaseEnded` (taken by another, expired, withdrawn), `PeerLost`, `TransferTimeout`, `ProtocolError`,
        `AuthenticationFailed`, `ChecksumMismatch`, `LayoutMismatch`, or `ConfigError` (no transport in common).
        """

    async def layout_at(self, source: Source, *, deadline: float) -> KVLayout:
        """The layout of a producer's rank, for a producer of another tensor-parallel size. Raises as `drop_select`."""
        raise ConfigError("this transport joins only instances of one tensor-parallel size")

    async def keep(self, key: str, source: Source, on_sealed: Callable[[], None]) -> None:
        """Renew the key's lease until cancelled, or until the key has ended; call `on_sealed` once it is sealed.
        Default: does nothing. Raises as `drop_select`."""

    @abstractmethod
    async def release(self, key: str, source: Source, *, deadline: float) -> None:
        """Release the producer's key, which will not be fetched. Raises as `drop_select`."""

    # Producer. The entries of `table` are managed by its owner.

    def address(self) -> dict[str, Any]:
        """The address of this producer for consumers; JSON-able."""
        return {}

    # Both.

    @abstractmethod
    async def run(self) -> None:
        """Serve until cancelled; then close every connection."""

    def close(self) -> None:
        """Release the constructor's resources; also for a buffer that never ran."""

    def statistics(self) -> dict[str, float]:
        """Metrics of the buffer itself, in the form of `HasStatistics.statistics`, without the metrics of `table` and
        of loads."""
        return {}


LOOKUP_BUFFERS = ExtensionPoint(
    "lookup_buffer",
    {"fabric": "kvferry.transport.lookup_buffer.fabric:FabricLookupBuffer"},
    "kvferry.lookup_buffers",
)


def lookup_buffer_class(settings: TransportOptions) -> type[LookupBuffer]:
    """The class that a configuration names. Raises `UnknownName`, or `ConfigError` if it cannot be imported."""
    buffer_class: type[LookupBuffer] = LOOKUP_BUFFERS.find(settings.lookup_buffer, LookupBuffer)
    return buffer_class


def check(config: KVTransferConfig) -> None:
    """Raise `ConfigError` for mistakes that can be found before anything is built: keys, names, missing libraries. A
    lookup buffer that is named `module:Class` is not imported."""
    settings = options_of(config)
    LOOKUP_BUFFERS.require_known(settings.lookup_buffer)
    if ":" not in settings.lookup_buffer:
        lookup_buffer_class(settings).check_settings(settings)


def check_here(config: KVTransferConfig, *, has_token: bool) -> None:
    """Raise `ConfigError` if this machine lacks what the transport needs, or as `control.check_here`."""
    require_gpu(options_of(config).transport)
    control.check_here(config, has_token=has_token)
