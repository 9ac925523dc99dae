"""Two lists of spans as one list of pieces, each contiguous on both sides: as arrays, so that a block costs little.

A read of one hand-off is thousands of spans. What Python does per span would cost as much as copying a small block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.core.errors import ProtocolError
from kvferry.transport.memory import Numbers, Region, RegionMap, Span, columns

ANYWHERE = RegionMap([Region(0, 2**62)], "peer's")
"""Where spans are that only their owner can place: an offset is its own address."""


@dataclass(frozen=True)
class Pieces:
    """Piece i is the `lengths[i]` bytes at `remote[i]`, which go to `local[i]`; addresses."""

    remote: Numbers
    local: Numbers
    lengths: Numbers

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """(remote, local, length), one by one."""
        return zip(self.remote.tolist(), self.local.tolist(), self.lengths.tolist(), strict=True)

    def slices(self, num_bytes: int, num_pieces: int) -> Iterator[Pieces]:
        """In order, with at most so many pieces each, and bytes (but one piece goes through whole)."""
        ends = np.cumsum(self.lengths)
        start = done = 0
        while start < len(self):
            fitting = int(np.searchsorted(ends, done + num_bytes, side="right"))
            end = min(max(fitting, start + 1), start + num_pieces)
            yield Pieces(self.remote[start:end], self.local[start:end], self.lengths[start:end])
            start, done = end, int(ends[end - 1])


def join(
    remote: Sequence[Span], remote_map: RegionMap, local: Sequence[Span], local_map: RegionMap, largest: int
) -> Pieces:
    """The pieces of at most `largest` bytes that fill `local` with `remote`.

    Raises `ProtocolError` when a span lies outside, or when one side has more bytes than the other.
    """
    (remote_offsets, remote_lengths), (local_offsets, local_lengths) = columns(remote), columns(local)
    remote_starts = remote_map.locate(remote_offsets, remote_lengths)
    local_starts = local_map.locate(local_offsets, local_lengths)
    if len(remote) == len(local) and (remote_lengths == local_lengths).all():
        pieces = Pieces(remote_starts, local_starts, local_lengths)
    else:
        pieces = _cut(remote_starts, remote_lengths, local_starts, local_lengths)
    return _split(pieces, largest) if len(pieces) and int(pieces.lengths.max()) > largest else pieces


def _cut(remote_starts: Numbers, remote_lengths: Numbers, local_starts: Numbers, local_lengths: Numbers) -> Pieces:
    """Cut both sides wherever either is cut."""
    remote_ends, local_ends = np.cumsum(remote_lengths), np.cumsum(local_lengths)
    num_remote, num_local = (int(ends[-1]) if len(ends) else 0 for ends in (remote_ends, local_ends))
    if num_remote != num_local:
        raise ProtocolError(f"{num_remote} bytes cannot fill {num_local}")
    ends = np.union1d(remote_ends, local_ends)
    lengths = np.diff(ends, prepend=0)

    def addresses(starts: Numbers, side_ends: Numbers) -> Numbers:
        last = np.searchsorted(side_ends, ends, side="left")
        found: Numbers = starts[last] + np.diff(side_ends, prepend=0)[last] - (side_ends[last] - ends) - lengths
        return found

    return Pieces(addresses(remote_starts, remote_ends), addresses(local_starts, local_ends), lengths)


def _split(pieces: Pieces, largest: int) -> Pieces:
    counts = -(-pieces.lengths // largest)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    skipped = number * largest
    lengths = np.minimum(np.repeat(pieces.lengths, counts) - skipped, largest)
    return Pieces(np.repeat(pieces.remote, counts) + skipped, np.repeat(pieces.local, counts) + skipped, lengths)
