"""The messages between consumer and producer of a fabric lookup buffer, after the handshake.

producer ── ProducerInfo ──────────────────────► consumer     once: the addresses of its blocks, and how to read them
         ◄───────────────── Select(id, key) ────
         ── News(id, generation, parts, …) ────►              as it happens; with the seal its `meta`
         ◄─────────────────────── Renew() ─────               now and then, while any key is selected
         ── Renew() ───────────────────────────►              the answer: this producer has not stopped
         ◄────────────── Verify(id, spans) ────               the digest of these spans? (with checksums only)
         ── News(id, digest) ──────────────────►
         ◄──────────── Take(id, generation) ────              everything is read
         ── News(id, held) ────────────────────►              the fence; if not kept, other news has the reason
         ◄───────────────────── Unselect(id) ───              no more news, please
         ◄────────────────── ReleaseKey(key) ───              it will not be fetched
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.core.messages.wire import Message
from kvferry.transport.memory import LayerPlace, Span
from kvferry.transport.options import Seconds

PURPOSE = "lookup"
MAX_SELECTS = 4096
"""Keys that one consumer may have selected at a time."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Blocks `first_block, first_block + 1, …` of a request are computed in some layers: `block_ids` of P's blocks."""

    first_layer: int
    num_layers: int
    first_block: int
    block_ids: list[int]


class ProducerInfo(Message, frozen=True):
    """The producer's blocks: their number and addresses, the length of its leases (s), and its fabrics, by name."""

    num_blocks: int
    places: tuple[LayerPlace, ...]
    lease_s: Seconds
    fabrics: dict[str, dict[str, Any]]


class News(Message, frozen=True):
    """News of a selected key.

    `parts`: further ones; parts of another `generation` are void. `meta`: the key is sealed, no more parts come.
    `over`: the reason why the key has ended. `held`: the answer to `Take`: everything was kept until now, and the key
    is the consumer's. `digest`: the answer to the last `Verify`; news of a reset that came before it is sent before it.
    """

    select_id: int
    generation: int
    parts: list[Part] = msgspec.field(default_factory=list)
    meta: bytes | None = None
    over: str = ""
    held: bool = False
    digest: bytes = b""


class Select(Message, frozen=True):
    """Send news about this key, from its first part on."""

    select_id: int
    key: str


class Unselect(Message, frozen=True):
    """No more news about this key."""

    select_id: int


class Renew(Message, frozen=True):
    """Renew the leases of all keys that this consumer has selected. The producer sends it back."""


class Verify(Message, frozen=True):
    """Request the digest of these spans of the producer's memory, which the consumer has read."""

    select_id: int
    spans: list[Span]


class Take(Message, frozen=True):
    """Take a key after all parts of this generation were read, if they were kept until now. `reader`: one of
    `num_readers` ranks."""

    select_id: int
    generation: int
    reader: int
    num_readers: int


class ReleaseKey(Message, frozen=True):
    """The key need not be kept for this consumer, which will not fetch it."""

    key: str


FromConsumer = Select | Unselect | Renew | Verify | Take | ReleaseKey
