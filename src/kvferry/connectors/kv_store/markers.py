"""Markers: notes in a store that say a hand-off's blocks are there.

Each rank of the producer leaves one, in its own share of the store, when all blocks of a prompt are there; the consumer
waits for all of them, and removes them once used. Those that nobody came for end by time. A producer that is about to
leave one gives signs meanwhile, and is not waited for without.

What lies in a store may be anybody's, and put back later: a marker is signed with the fleet's token under its transfer
id, and says until when it holds and of which prompt it is. So whoever finds one too late, or under an id that was used
before, has no KV or first token of another prompt. That two take the same hand-off does no harm: blocks under a hash
never change, and both have the same first token.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from kvferry.connectors.api import Saved
from kvferry.core import entropy
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import KvferryError, LayoutMismatch, LeaseEnded, ProtocolError, StoreError
from kvferry.core.keys import derive
from kvferry.core.messages.hand_off import OTHER_PROMPT, PrefillResult, prefix_digests
from kvferry.store.base import KVStore
from kvferry.store.tiers import TieredStore

MARKER_S = 3600.0
SKEW_S = 60.0
"""How much the clocks of two machines may differ (s)."""
SIGN_BYTES = 8
SIGN_EVERY_S, SIGNS_S = 0.1, 2.0
"""How often a producer gives a sign that it writes to the store, and for how long after the last thing."""
_CODE_BYTES = 16


class BadMarker(StoreError):
    """What lies in a marker's place is not a valid marker, and will not become one."""


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What the producer leaves for the consumer. No `prefill_result`: the prefill was given up.

    `digest`: of the prompt's tokens and salt. `expires_s`: since the epoch, of the producer's clock; set when it is
    written.
    """

    transfer_id: str
    layout: KVLayout
    num_tokens: int
    digest: str
    expires_s: float = 0.0
    prefill_result: PrefillResult | None = None


def explain_mismatch(marker: Marker | None, tokens: Sequence[int], salt: str, layout: KVLayout) -> KvferryError | None:
    """Why a marker is not for the KV of this prompt in this layout; None if it is, or if there is no marker."""
    if marker is None:
        return None
    if marker.prefill_result is None:
        return LeaseEnded(f"the prefill of hand-off {marker.transfer_id!r} was aborted")
    if marker.num_tokens != len(tokens):
        return ProtocolError(f"the hand-off is of {marker.num_tokens} prompt tokens, this request has {len(tokens)}")
    if prefix_digests(tokens, [len(tokens)], salt)[0][1] != marker.digest:
        return ProtocolError(OTHER_PROMPT)
    try:
        layout.require_same(marker.layout)
    except LayoutMismatch as error:
        return error
    return None


class Markers:
    """Writes and reads markers. Every method raises `StoreError` when the store cannot be asked."""

    def __init__(self, token: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._key, self._clock = derive(token, "markers"), clock

    async def write(self, store: KVStore, marker: Marker) -> None:
        """Leave a marker, which replaces an earlier one."""
        name = _name(marker.transfer_id, marker.layout.tp_rank)
        body = msgspec.msgpack.encode(msgspec.structs.replace(marker, expires_s=self._clock.wall() + MARKER_S))
        await store.write_note(name, self._code(name, body) + body, MARKER_S)

    async def read(self, store: KVStore, transfer_id: str, rank: int) -> Marker | None:
        """A rank's marker; None if there is none yet, or it has expired."""
        name = _name(transfer_id, rank)
        note = await store.read_note(name)
        if note is None:
            return None
        if not hmac.compare_digest(note[:_CODE_BYTES], self._code(name, note[_CODE_BYTES:])):
            raise BadMarker(
                f"the marker of hand-off {transfer_id!r} was not written with this instance's token; start all"
                " instances with the same KVFERRY_AUTH_TOKEN"
            )
        try:
            marker = msgspec.msgpack.decode(note[_CODE_BYTES:], type=Marker)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadMarker(f"what is under {transfer_id!r} is no marker of a hand-off: {error}") from error
        return marker if self._clock.wall() <= marker.expires_s + SKEW_S else None

    async def remove(self, store: KVStore, transfer_id: str, rank: int) -> None:
        """Remove a rank's marker, if it is there."""
        await store.remove_note(_name(transfer_id, rank))

    def _code(self, name: str, body: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + body, "sha256")[:_CODE_BYTES]


class MarkerProducer:
    """Writes markers, and heartbeats while the producer writes blocks, so that a consumer knows how long to wait. A
    store that accepts nothing gets no heartbeats. Reports which stores took a marker, and later changes of that. Used
    on the store's loop."""

    def __init__(
        self,
        store: TieredStore,
        markers: Markers,
        engine_id: str,
        *,
        is_writing: Callable[[], bool],
        report: Callable[[Saved], None],
    ) -> None:
        self._store, self._markers, self._engine_id = store, markers, engine_id
        self._is_writing, self._report = is_writing, report
        self._marked_last: str | None = None
        self._wrote_at = 0.0
        store.on_takes(self._taking_changed)
        self.signs: asyncio.Task[None] | None = None

    def writes(self) -> None:
        """The producer has something to write."""
        self._wrote_at = SYSTEM_CLOCK.monotonic()
        if self.signs is None or self.signs.done():
            self.signs = asyncio.create_task(self._give_signs())

    async def mark(self, marker: Marker) -> None:
        """Leave a marker, and report which stores took it."""
        try:
            await self._markers.write(self._store, marker)
        finally:
            self._marked_last = marker.transfer_id
            self._report(Saved(marker.transfer_id, self._store.takes()))

    def _taking_changed(self) -> None:
        if self._marked_last is not None:
            self._report(Saved(self._marked_last, self._store.takes()))

    async def _give_signs(self) -> None:
        name, gave = sign_of(self._engine_id), False
        while self._is_writing() or SYSTEM_CLOCK.monotonic() < self._wrote_at + SIGNS_S:
            await asyncio.sleep(SIGN_EVERY_S)
            if self._store.takes():
                with suppress(KvferryError):
                    await self._store.write_note(name, entropy.token_bytes(SIGN_BYTES), 10 * SIGNS_S)
                    gave = True
        if gave:
            with suppress(KvferryError):
                await self._store.remove_note(name)


def sign_of(engine_id: str) -> str:
    """The name of the note that a producer changes all the time while it writes to the store."""
    return f"{engine_id} writes"


def _name(transfer_id: str, rank: int) -> str:
    return f"{transfer_id}.{rank}"
