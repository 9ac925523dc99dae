"""The messages between consumer and producer of a fabric lookup buffer, after the handshake.

producer ── ProducerInfo ──────────────────────► consumer     once: the addresses of its blocks, and how to read them
         ◄───────────────── Select(id, key) ────
         ── KeyUpdate(id, generation, parts, …) ►             as it happens; with the seal its `meta`
         ◄─────────────────────── Renew() ─────               now and then, while any key is selected
         ── Renew() ───────────────────────────►              the answer: this producer has not stopped
         ◄────────────── Verify(id, spans) ────               the digest of these spans? (with checksums only)
         ── KeyUpdate(id, digest) ─────────────►
         ◄──────────── Take(id, generation) ────              everything is read
         ── KeyUpdate(id, take_confirmed) ─────►              the fence; else `end_reason` says why the lease has ended
         ◄───────────────────── Unselect(id) ───              no more updates, please
         ◄────────────────── ReleaseKey(key) ───              it will not be fetched
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.core.messages.wire import Message
from kvferry.transport.memory import LayerPlace, Span
from kvferry.transport.options import Seconds

PURPOSE = "lookup"
"""Purpose of the connections that carry these messages (`Listener.handle`, `dial`)."""
MAX_SELECTS = 4096
"""Maximum number of keys that one consumer may have selected at a time."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Announces that the blocks `first_block, first_block + 1, …` of a request are computed in the layers `first_layer,
    …, first_layer + num_layers - 1`. `block_ids`: where they are among P's blocks."""

    first_layer: int
    num_layers: int
    first_block: int
    block_ids: list[int]


class ProducerInfo(Message, frozen=True):
    """The producer's blocks: their number and addresses; the length of its leases in seconds; and its fabrics, by
    name."""

    num_blocks: int
    places: tuple[LayerPlace, ...]
    lease_s: Seconds
    fabrics: dict[str, dict[str, Any]]


class KeyUpdate(Message, frozen=True, tag="News"):
    """Changes about a selected key.

    `parts`: new parts; parts of another `generation` are void. `meta`: the key is sealed, and no more parts come; these
    bytes are what the producer passed to `seal`, and the lookup buffer does not interpret them. `end_reason`: the key
    has ended, for this reason. `take_confirmed`: the answer to `Take`: the producer has kept all parts until now, and
    the key is now the consumer's. `digest`: the answer to the last `Verify`. The update about a reset that came before
    the digest is sent before it.
    """

    select_id: int
    generation: int
    parts: list[Part] = msgspec.field(default_factory=list)
    meta: bytes | None = None
    end_reason: str = ""
    take_confirmed: bool = False
    digest: bytes = b""


class Select(Message, frozen=True):
    """The consumer wants updates about this key, from its first part on."""

    select_id: int
    key: str


class Unselect(Message, frozen=True):
    """The consumer wants no more updates about this key."""

    select_id: int


class Renew(Message, frozen=True):
    """Renew the leases of all keys that this consumer has selected. The producer sends it back."""


class Verify(Message, frozen=True):
    """The consumer requests the digest of these spans of the producer's memory. It compares this digest with the digest
    of the bytes that it has read."""

    select_id: int
    spans: list[Span]


class Take(Message, frozen=True):
    """The consumer has read all parts of this generation, and takes the key if the producer has kept them until now.
    `reader`: index of this rank of the consumer among its `num_readers` ranks that read."""

    select_id: int
    generation: int
    reader: int
    num_readers: int


class ReleaseKey(Message, frozen=True):
    """The consumer will not fetch the key, so that the producer need not keep it."""

    key: str


FromConsumer = Select | Unselect | Renew | Verify | Take | ReleaseKey
