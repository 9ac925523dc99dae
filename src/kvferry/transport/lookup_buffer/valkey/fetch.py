"""One `drop_select` from the server: follows a hand-off's news, reads pieces into our blocks, and takes it.

Owns the state of one arrival. Blocks are named by their place in the request; that a span of a `Selection` is in
which piece is worked out here.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import xxhash

from kvferry.core.errors import ConfigError, KvferryError, LeaseEnded, ProtocolError
from kvferry.transport.fabric.copying import MEMORY
from kvferry.transport.fabric.pieces import ANYWHERE, join
from kvferry.transport.lookup_buffer import messages
from kvferry.transport.lookup_buffer.arrival_map import ArrivalMap
from kvferry.transport.lookup_buffer.base import Taken, Want, describe_ended
from kvferry.transport.lookup_buffer.messages import Part
from kvferry.transport.lookup_buffer.selection import Selection
from kvferry.transport.lookup_buffer.valkey.records import (
    Begun,
    Over,
    Piece,
    Record,
    Sealed,
    Stored,
    decode_record,
    encode_record,
)
from kvferry.transport.lookup_buffer.valkey.server import BLOCK_S, Server
from kvferry.transport.lookup_buffer.valkey.uploads import MAX_PIECE_BLOCKS, REMEMBER_S
from kvferry.transport.memory import BlockGeometry, BlockMemory, Span

MAX_BLOCKS = 2**24
RENEWALS_PER_LEASE = 3
READ_FIELDS = 16
"""Pieces asked for at once."""


class Fetch:
    """See the module."""

    def __init__(self, server: Server, token: str, memory: BlockMemory, want: Want, place: str) -> None:
        self._server, self._token, self._memory = server, token, memory
        self._want, self._place = want, place
        self._after = "0"
        self._number = 0
        self._generation = -1
        self._remote: BlockGeometry
        self._pieces = _Pieces()
        self._lease_s = 0.0
        self._sealed = asyncio.Event()

    async def run(self) -> Taken:
        """Wait for the hand-off, read it, take it. Raises what `drop_select` raises."""
        records = await self._first_news()
        selection = self._begin(records)
        helpers = [asyncio.create_task(self._listen(selection)), asyncio.create_task(self._renew())]
        try:
            self._feed(selection, records)
            return await selection.load(self._read, partial(self._take, selection), "valkey")
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    # News.

    async def _first_news(self) -> list[Record]:
        while True:
            records = await self._next()
            if records:
                return records

    async def _next(self) -> list[Record]:
        """The next records, or none for now."""
        found = await self._server.news(self._place, self._after, BLOCK_S)
        if found:
            self._after = found[-1][0]
        return [decode_record(encoded, self._place, self._token) for _, encoded in found]

    def _begin(self, records: list[Record]) -> Selection:
        first = records[0]
        if isinstance(first, Over):
            raise LeaseEnded(describe_ended(self._want.key, first.reason))
        if not isinstance(first, Begun):
            raise ProtocolError(f"the server has lost the beginning of hand-off {self._want.key!r}")
        layout, theirs = self._memory.layout, first.layout
        layout.require_reconcilable(theirs)
        if (layout.tp_size, layout.tp_rank) != (theirs.tp_size, theirs.tp_rank):
            raise ConfigError("lookup_buffer valkey joins only instances of one tensor-parallel size")
        self._remote = BlockGeometry.dense(theirs, MAX_BLOCKS)
        return Selection(self._want, ArrivalMap(self._want, self._remote, self._memory.geometry))

    async def _listen(self, selection: Selection) -> None:
        try:
            while not selection.failed:
                self._feed(selection, await self._next())
        except KvferryError as error:
            selection.fail(error)

    def _feed(self, selection: Selection, records: list[Record]) -> None:
        for record in records:
            match record:
                case Begun():
                    self._begun(record, selection)
                case Stored() if record.generation == self._generation:
                    self._stored(record, selection)
                case Sealed() if record.generation == self._generation:
                    self._count(record.number)
                    self._lease_s = record.lease_s
                    self._sealed.set()
                    selection.feed([messages.Sealed(record.generation, record.meta)])
                case Over():
                    selection.feed([messages.Over(record.reason)])

    def _begun(self, record: Begun, selection: Selection) -> None:
        if record.layout != self._remote.layout:
            raise ProtocolError(f"hand-off {self._want.key!r} began anew with another layout")
        self._generation, self._number = record.generation, 0
        self._pieces = _Pieces()
        selection.feed([messages.Announced(record.generation, [])])

    def _stored(self, record: Stored, selection: Selection) -> None:
        self._count(record.number)
        parts = []
        for piece in record.pieces:
            last = piece.first_block + piece.num_blocks
            if not (0 <= piece.layer < self._remote.layout.num_layers and 0 <= piece.first_block < last <= MAX_BLOCKS):
                raise ProtocolError(f"hand-off {self._want.key!r} announces layers or blocks that do not exist")
            if piece.num_blocks > MAX_PIECE_BLOCKS:
                raise ProtocolError(f"hand-off {self._want.key!r} announces {piece.num_blocks} blocks at once")
            block_ids = list(range(piece.first_block, last))
            parts.append(Part(piece.layer, 1, piece.first_block, block_ids))
            [(start, length)] = self._remote.spans(piece.layer, block_ids)
            self._pieces.add(start, length, piece)
        selection.feed([messages.Announced(record.generation, parts)])

    def _count(self, number: int) -> None:
        if number != self._number:
            raise ProtocolError(f"the server has lost a part of hand-off {self._want.key!r}")
        self._number += 1

    # Blocks.

    async def _read(self, remote: Sequence[Span], local: Sequence[Span]) -> bool:
        """Fill our spans; False when a piece is not what was stored. As `FabricPeer.read`."""
        generation, pieces = self._generation, self._pieces
        names = pieces.covering(remote)
        for start in range(0, len(names), READ_FIELDS):
            wanted = names[start : start + READ_FIELDS]
            there, state, found = await self._server.pieces(self._place, [piece.field for piece in wanted])
            if not state:
                raise LeaseEnded(describe_ended(self._want.key, "expired"))
            if there != str(generation) or self._generation != generation:
                return True  # over, or begun anew: the news says so, and no take can follow
            for piece, data in zip(wanted, found, strict=True):
                if data is None:
                    raise ProtocolError(f"the server has lost blocks of hand-off {self._want.key!r}")
                if xxhash.xxh3_128_digest(data) != piece.digest:
                    return False
                pieces.data[piece.field] = data
        self._copy(pieces, remote, local)
        pieces.data.clear()
        return True

    def _copy(self, pieces: _Pieces, remote: Sequence[Span], local: Sequence[Span]) -> None:
        for source, target, length in join(remote, ANYWHERE, local, self._memory.map, self._memory.num_bytes).rows():
            while length:
                data = pieces.bytes_at(source)[:length]
                MEMORY[target : target + len(data)] = data
                source, target, length = source + len(data), target + len(data), length - len(data)

    # The end.

    async def _take(self, selection: Selection, generation: int) -> None:
        """The fence, as one step of the server."""
        place = self._place
        record = encode_record(Over("taken"), place, self._token)
        selection.answered(generation, await self._server.take(place, generation, record, REMEMBER_S))

    async def _renew(self) -> None:
        """Keep the lease while we are at work."""
        await self._sealed.wait()
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            with suppress(KvferryError):  # whoever reads meets the same, and says so
                await self._server.renew(self._place, self._lease_s)


class _Pieces:
    """The pieces of a generation, by where their blocks would lie; and the data of those at hand."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self._starts: list[int] = []
        self._found: list[tuple[int, Piece]] = []

    def add(self, start: int, length: int, piece: Piece) -> None:
        """A piece whose blocks would lie from `start` on. Of two for the same blocks, the later counts."""
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start:
            self._found[index] = (start + length, piece)
        else:
            self._starts.insert(index, start)
            self._found.insert(index, (start + length, piece))

    def covering(self, spans: Sequence[Span]) -> list[Piece]:
        """The pieces in which these spans lie, each once. Raises `ProtocolError` when some bytes are in none."""
        found: dict[str, Piece] = {}
        for offset, length in spans:
            end = offset + length
            while offset < end:
                offset, piece = self._at(offset)
                found[piece.field] = piece
        return list(found.values())

    def bytes_at(self, offset: int) -> memoryview:
        """The bytes from `offset` to the end of its piece."""
        end, piece = self._at(offset)
        data = memoryview(self.data[piece.field])
        return data[len(data) - (end - offset) :]

    def _at(self, offset: int) -> tuple[int, Piece]:
        """(where it ends, the piece) of the piece with this byte."""
        index = bisect_right(self._starts, offset) - 1
        if index < 0 or self._found[index][0] <= offset:
            raise ProtocolError("the server has announced fewer blocks than were asked for")
        return self._found[index]
