"""Markers: notes in a store which state that a hand-off's blocks are stored.

Each rank of the producer writes one, in its own share of the store, when all blocks of a prompt are stored; the
consumer waits for all of them, and removes them once used. Unused ones expire. A producer that is about to write one
sends heartbeats until then; without heartbeats, consumers stop waiting.

The content of a store may be forged or replayed. So a marker is signed with the fleet's token for its transfer id, and
contains its expiry and a digest of its prompt. An expired marker, or one of a reused id, never gives a consumer the KV
or the first token of another prompt. It is harmless if two consumers use the same hand-off: blocks under a hash never
change, and both have the same first token.
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
from kvferry.store.tiered.tiers import TieredStore

MARKER_S = 3600.0
HEARTBEAT_BYTES = 8
_CODE_BYTES = 16


class BadMarker(StoreError):
    """The note with a marker's name is not a valid marker, and waiting does not help."""


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """The producer's message to the consumer. `prefill_result` None: the prefill was aborted.

    `digest`: digest of the prompt's tokens and salt. `expires_s`: expiry in seconds since 1970, by the producer's
    clock; set when the marker is written.
    """

    transfer_id: str
    layout: KVLayout
    num_tokens: int
    digest: str
    expires_s: float = 0.0
    prefill_result: PrefillResult | None = None


def mismatch_error(marker: Marker | None, tokens: Sequence[int], salt: str, layout: KVLayout) -> KvferryError | None:
    """The reason why a marker does not fit this prompt and layout; None: it fits, or there is no marker."""
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
    """Writes and reads markers. Every method raises `StoreError` when the store is unreachable."""

    skew_s = 60.0
    """Maximum difference between the clocks of two machines, in seconds."""

    def __init__(self, token: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._key, self._clock = derive(token, "markers"), clock

    async def write(self, store: TieredStore, marker: Marker) -> None:
        """Write a marker. It replaces an earlier one."""
        name = _name(marker.transfer_id, marker.layout.tp_rank)
        body = msgspec.msgpack.encode(msgspec.structs.replace(marker, expires_s=self._clock.wall() + MARKER_S))
        await store.write_note(name, self._code(name, body) + body, MARKER_S)

    async def read(self, store: TieredStore, transfer_id: str, rank: int) -> Marker | None:
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
        return marker if self._clock.wall() <= marker.expires_s + self.skew_s else None

    async def remove(self, store: TieredStore, transfer_id: str, rank: int) -> None:
        """Remove a rank's marker, if it exists."""
        await store.remove_note(_name(transfer_id, rank))

    def _code(self, name: str, body: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + body, "sha256")[:_CODE_BYTES]


class MarkerProducer:
    """Writes markers, and heartbeats while the producer writes blocks, so that a consumer knows how long to wait. A
    store that accepts no writes gets no heartbeats. Reports the stores that accepted a marker, and later changes of
    this set. Used on the store's loop."""

    heartbeat_s, heartbeat_linger_s = 0.1, 2.0
    """Seconds between two heartbeats while the producer writes to the store; and seconds after its last write for which
    they continue."""

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
        self._last_marked: str | None = None
        self._last_write_at = 0.0
        store.on_accepts_changed(self._report_stores)
        self.heartbeats: asyncio.Task[None] | None = None

    def start_heartbeats(self) -> None:
        """Send heartbeats from now on, because the producer has blocks or markers to write."""
        self._last_write_at = SYSTEM_CLOCK.monotonic()
        if self.heartbeats is None or self.heartbeats.done():
            self.heartbeats = asyncio.create_task(self._send_heartbeats())

    async def write_marker(self, marker: Marker) -> None:
        """Write a marker, and report the stores that accepted it."""
        try:
            await self._markers.write(self._store, marker)
        finally:
            self._last_marked = marker.transfer_id
            self._report(Saved(marker.transfer_id, self._store.accepts_writes()))

    def _report_stores(self) -> None:
        if self._last_marked is not None:
            self._report(Saved(self._last_marked, self._store.accepts_writes()))

    async def _send_heartbeats(self) -> None:
        name, has_written = heartbeat_name(self._engine_id), False
        while self._is_writing() or SYSTEM_CLOCK.monotonic() < self._last_write_at + self.heartbeat_linger_s:
            await asyncio.sleep(self.heartbeat_s)
            if self._store.accepts_writes():
                with suppress(KvferryError):
                    beat = entropy.token_bytes(HEARTBEAT_BYTES)
                    await self._store.write_note(name, beat, 10 * self.heartbeat_linger_s)
                    has_written = True
        if has_written:
            with suppress(KvferryError):
                await self._store.remove_note(name)


def heartbeat_name(engine_id: str) -> str:
    """The name of a producer's heartbeat: a note that it changes periodically while it writes to the store."""
    return f"{engine_id} writes"


def _name(transfer_id: str, rank: int) -> str:
    return f"{transfer_id}.{rank}"
