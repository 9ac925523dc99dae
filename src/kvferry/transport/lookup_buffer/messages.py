"""What consumer and producer of a fabric lookup buffer say to each other, after the handshake.

producer ── Offer ─────────────────────────────► consumer     once: where its blocks lie, and how to read them
         ◄───────────────── Select(id, key) ────
         ── News(id, generation, parts, …) ────►              as it happens; with the seal its `meta`
         ◄─────────────────────── Renew() ─────               now and then, while any key is selected
         ◄────────────── Verify(id, spans) ────               what do you have there? (with checksums only)
         ── News(id, digest) ──────────────────►
         ◄──────────── Take(id, generation) ────              everything is read
         ── News(id, held) ────────────────────►              the fence; if not held, other news says why
         ◄───────────────────── Unselect(id) ───              no more news, please
         ◄────────────────── ReleaseKey(key) ───              nobody will come
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvferry.transport.connection import Message
from kvferry.transport.memory import LayerPlace, Span

PURPOSE = "lookup"

LeaseSeconds = Annotated[float, msgspec.Meta(ge=0.01, le=10_000_000.0)]
"""A lease as a peer states it. It is renewed at a part of it, so without bounds it would keep this loop busy."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Blocks `first_block, first_block + 1, …` of a request, of some layers, are computed: in these of P's blocks."""

    first_layer: int
    num_layers: int
    first_block: int
    block_ids: list[int]


class Offer(Message, frozen=True):
    """The producer's blocks: how many and where, how long its leases are (s), and its fabrics, by name."""

    num_blocks: int
    places: tuple[LayerPlace, ...]
    lease_s: LeaseSeconds
    fabrics: dict[str, dict[str, Any]]


class News(Message, frozen=True):
    """What is new of a selected key.

    `parts`: more of them, or the first of a `generation` that makes void what came of another. `meta`: it is sealed, no
    more parts come. `over`: why the key has ended. `held`: the answer to `Take`, all was kept until now, and the key is
    the consumer's. `digest`: the answer to the last `Verify`; news of a reset before it was sent before it.
    """

    select_id: int
    generation: int
    parts: list[Part] = msgspec.field(default_factory=list)
    meta: bytes | None = None
    over: str = ""
    held: bool = False
    digest: bytes = b""


class Select(Message, frozen=True):
    """Tell me of this key, from its first part on."""

    select_id: int
    key: str


class Unselect(Message, frozen=True):
    """No more news of this one."""

    select_id: int


class Renew(Message, frozen=True):
    """I am at work on all that I have selected: begin their leases anew."""


class Verify(Message, frozen=True):
    """I have read these spans. What is their digest with you?"""

    select_id: int
    spans: list[Span]


class Take(Message, frozen=True):
    """I have read all I want of this generation. Was it kept until now? I am `taker` of `num_takers` that want it."""

    select_id: int
    generation: int
    taker: int
    num_takers: int


class ReleaseKey(Message, frozen=True):
    """Nobody will come for this key."""

    key: str


FromConsumer = Select | Unselect | Renew | Verify | Take | ReleaseKey
