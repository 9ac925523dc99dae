"""What consumer and producer of a fabric lookup buffer say to each other, after the handshake.

producer ── Offer ─────────────────────────────► consumer     once: where its blocks lie, and how to read them
         ◄───────────────── Select(id, key) ────
         ── News(id, [Announced, Sealed, Over]) ►             as it happens
         ◄────────────────────── Renew([ids]) ──              now and then, while at work
         ◄────────────── Verify(id, spans) ────               what do you have there? (with checksums only)
         ── VerifyAnswer(id, digest) ─────────►
         ◄──────────── Take(id, generation) ────              everything is read
         ── TakeAnswer(id, generation, held) ───►             the fence
         ◄───────────────────── Unselect(id) ───              no more news, please
         ◄────────────────── ReleaseKey(key) ───              nobody will come
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvferry.transport.memory import LayerPlace, Span
from kvferry.transport.wire import Message

PURPOSE = "lookup"

LeaseSeconds = Annotated[float, msgspec.Meta(ge=0.01, le=10_000_000.0)]
"""A lease as a peer states it. It is renewed at a part of it, so without bounds it would keep this loop busy."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Blocks `first_block, first_block + 1, …` of a request, of some layers, are computed: in these of P's blocks."""

    first_layer: int
    num_layers: int
    first_block: int
    block_ids: list[int]


class Announced(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """More parts. A generation other than that of earlier parts: those are void."""

    generation: int
    parts: list[Part]


class Sealed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """No more parts come."""

    generation: int
    meta: bytes


class Over(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The key has ended."""

    reason: str


Change = Announced | Sealed | Over


class Offer(Message, frozen=True):
    """The producer's blocks: how many and where, how long its leases are (s), and its fabrics, by name."""

    num_blocks: int
    places: tuple[LayerPlace, ...]
    lease_s: LeaseSeconds
    fabrics: dict[str, dict[str, Any]]


class Select(Message, frozen=True):
    """Tell me of this key, from its first part on."""

    select_id: int
    key: str


class Unselect(Message, frozen=True):
    """No more news of this one."""

    select_id: int


class Renew(Message, frozen=True):
    """I am at work on these: begin their leases anew."""

    select_ids: list[int]


class Take(Message, frozen=True):
    """I have read all I want of this generation. Was it kept until now? I am `taker` of `num_takers` that want it."""

    select_id: int
    generation: int
    taker: int
    num_takers: int


class Verify(Message, frozen=True):
    """I have read these spans. What is their digest with you?"""

    select_id: int
    spans: list[Span]


class VerifyAnswer(Message, frozen=True):
    """The digest of the spans of the selection's last `Verify`. News of a reset before it was sent before it."""

    select_id: int
    digest: bytes


class TakeAnswer(Message, frozen=True):
    """`held`: they were, and the key is yours. Otherwise what was read is worth nothing."""

    select_id: int
    generation: int
    held: bool


class ReleaseKey(Message, frozen=True):
    """Nobody will come for this key."""

    key: str


class News(Message, frozen=True):
    """What happened to a selected key."""

    select_id: int
    changes: list[Change]


FromConsumer = Select | Unselect | Renew | Verify | Take | ReleaseKey
FromProducer = News | TakeAnswer | VerifyAnswer
