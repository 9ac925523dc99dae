"""The keyed hand-off: what one instance computes under a key, another takes, once.

The producer opens a key, inserts parts of its blocks as they are computed, and seals it. The consumer may ask at any
time, also before the key exists, and is given each part as soon as it is announced; so layers flow while the
producer still computes. Nothing is copied until a consumer asks: the parts only name blocks, which stay the
producer's until `ended` names the key.

The *fence* makes this safe: the consumer reads freely, and in the end asks whether the producer kept all of it
until that moment. Only an acknowledged take counts; whatever was read without one is worth nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.layout import KVLayout

EndReason = Literal["taken", "stored", "released", "expired", "dropped", "full"]
"""How a key ends: a consumer has it; a server keeps it for one; nobody wants it; its lease was over; the producer
withdrew it; no room for it."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Blocks `first_block, first_block + 1, …` of a request, of some layers, are computed: in these of P's blocks."""

    first_layer: int
    num_layers: int
    first_block: int
    block_ids: list[int]


@dataclass(frozen=True)
class Source:
    """The address of a producer's rank. `engine_id`, where known, tells whether it is still the same one; `tp_rank`
    of `tp_size`, where known, whether it is the rank that was meant."""

    host: str
    port: int
    engine_id: str = ""
    tp_rank: int | None = None
    tp_size: int | None = None


OnSealed = Callable[[bytes], None]
"""Told what a key was sealed with; on the `TransferLoop`."""


def ignore(meta: bytes) -> None:
    """Nobody wants to know early."""


@dataclass(frozen=True)
class Ended:
    """A key is over: the blocks of its parts may be reused."""

    key: str
    reason: EndReason


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


class LookupBuffer(ABC):
    """Both ends of the hand-off, since an instance may be either.

    The producer's methods return at once, from any thread. The consumer's run on the instance's `TransferLoop`.
    """

    # Producer.

    @abstractmethod
    def open(self, key: str) -> bool:
        """Begin a key. False: the buffer is at its bounds; the consumer will be told "full".

        A producer that wants to wait instead must count ahead, as the P2P connector's scheduler side does. The
        bound (keys, and bytes of blocks held) is looked at here only: a key once begun may always grow, since
        its blocks are pinned in the KV cache whether they are announced or not.
        """

    @abstractmethod
    def insert(self, key: str, part: Part) -> bool:
        """Announce a part. False: the key is over already, nobody wants more of it."""

    @abstractmethod
    def seal(self, key: str, meta: bytes) -> None:
        """No more parts come. The lease begins; `meta` goes to the consumer."""

    def set_lease(self, key: str, lease_s: float) -> None:
        """Give this key a lease of its own length; before its seal. A buffer without leases has nothing to do."""

    @abstractmethod
    def reset(self, key: str) -> None:
        """Withdraw all parts; they will be inserted again from the first. After this, no take of the old ones."""

    @abstractmethod
    def drop(self, key: str) -> None:
        """Withdraw the key. After this returns no take is acknowledged any more. Of a key that was never opened, who
        waits for it, or comes later, is told "dropped" at once."""

    @abstractmethod
    def end(self, key: str) -> bool:
        """The consumer will never come: end the key as "released". True when there was one; otherwise whoever waits for
        it hears the same, and it ends as soon as it begins."""

    @abstractmethod
    def ended(self) -> list[Ended]:
        """Keys that ended since the last call, each once."""

    # Consumer.

    @abstractmethod
    async def drop_select(
        self,
        key: str,
        source: Source,
        into: Sequence[int],
        *,
        skip_blocks: int = 0,
        prefix: bool = False,
        on_sealed: OnSealed = ignore,
        deadline: float,
    ) -> Taken:
        """Wait for the key, read our rank's share of all its parts into our blocks `into`, and take it.

        `into` are our blocks, in the request's order; the first `skip_blocks` of them have their KV already and
        are left alone. The producer may have sealed fewer blocks than `into` holds: see `Taken.num_tokens`. It may
        have more only where a `prefix` of them is wanted. `on_sealed` is told the seal's `meta` as soon as it is
        known, before all parts have come. The key ends on the producer when each of the ranks that read it has
        taken it.

        `deadline` is monotonic, s. When this returns or raises, also by cancellation, none of the blocks is written
        to any more. Without a take the key stays with the producer for the rest of its lease, for another consumer
        or try.

        Raises `LeaseEnded` (taken by another, over, withdrawn), `PeerLost`, `TransferTimeout`, `ProtocolError`,
        `AuthenticationFailed`, `ChecksumMismatch`, `LayoutMismatch`, or `ConfigError` (the two share no transport).
        """

    async def layout_at(self, source: Source, *, deadline: float) -> KVLayout:
        """What the blocks of a producer's rank mean. Raises as `drop_select`."""
        raise ConfigError("this transport joins only instances of one tensor-parallel size")

    async def keep(self, key: str, source: Source) -> None:
        """Keep the key's lease alive until cancelled, or until there is nothing to keep. Raises as `drop_select`."""

    @abstractmethod
    async def release(self, key: str, source: Source, *, deadline: float) -> None:
        """Tell the producer that nobody will come for this key. Raises as `drop_select`."""

    # Both.

    @abstractmethod
    async def run(self) -> None:
        """Serve until cancelled; then every connection is closed."""

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Counters by name; bytes and seconds carry their unit in it."""

    @abstractmethod
    def check(self) -> None:
        """Raise `LeakError` when a key, or a consumer's wait, is left."""


def describe_ended(key: str, reason: str) -> str:
    """For `LeaseEnded`: what happened to a key, in words."""
    words: dict[str, Any] = {
        "taken": "another consumer has taken it",
        "released": "it was released",
        "expired": "its lease was over",
        "dropped": "the producer withdrew it",
        "full": "the producer's buffer is full (kv_buffer_size)",
    }
    return f"hand-off {key!r} is over: {words.get(reason, reason)}"
