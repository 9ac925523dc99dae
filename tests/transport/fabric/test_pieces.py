"""Span lists as arrays: every byte goes where the plain way would put it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import ProtocolError
from kvferry.transport.memory import ANYWHERE, Region, RegionMap, columns, join

SIZES = (64, 100, 36)


def regions(base: int) -> list[Region]:
    """With gaps between them."""
    return [Region(base + 1000 * number, size) for number, size in enumerate(SIZES)]


def addresses(base: int, spans: list[tuple[int, int]]) -> list[int]:
    """Byte by byte, the plain way."""
    flat = [base + 1000 * number + byte for number, size in enumerate(SIZES) for byte in range(size)]
    return [address for offset, length in spans for address in flat[offset : offset + length]]


def cut(numbers: list[int]) -> list[tuple[int, int]]:
    """Spans within regions, of these many bytes each where there is room."""
    starts = [sum(SIZES[:number]) for number in range(len(SIZES))]
    return [
        (starts[number % 3] + number % 7, 1 + length % (SIZES[number % 3] - 7)) for number, length in enumerate(numbers)
    ]


@given(st.lists(st.integers(0, 10**6)), st.lists(st.integers(0, 10**6)), st.integers(1, 80))
def test_bytes_go_where_the_spans_say(remote_cuts: list[int], local_cuts: list[int], largest: int) -> None:
    remote, local = cut(remote_cuts), cut(local_cuts)
    theirs, ours = RegionMap(regions(0), "peer's"), RegionMap(regions(10**6), "own")
    num_remote, num_local = sum(n for _, n in remote), sum(n for _, n in local)
    if num_remote != num_local:
        with pytest.raises(ProtocolError, match=f"{num_remote} bytes cannot fill {num_local}"):
            join(remote, theirs, local, ours, largest)
        local = [(remote[0][0] if remote else 0, 0)][:0]
        remote = []
    pieces = join(remote, theirs, remote, ours, largest)
    found = [
        (int(source) + byte, int(target) + byte)
        for source, target, length in zip(pieces.remote, pieces.local, pieces.lengths, strict=True)
        for byte in range(length)
    ]
    assert found == list(zip(addresses(0, remote), addresses(10**6, remote), strict=True))
    assert all(0 < length <= largest for length in pieces.lengths)


@given(st.lists(st.integers(1, 40), min_size=1), st.lists(st.integers(1, 40), min_size=1))
def test_differently_cut_lists(remote_lengths: list[int], local_lengths: list[int]) -> None:
    num_bytes = min(sum(remote_lengths), sum(local_lengths))
    big = RegionMap([Region(0, 10**6)], "own")

    def spans(lengths: list[int], step: int) -> list[tuple[int, int]]:
        kept, left = [], num_bytes
        for number, length in enumerate(lengths):
            if left:
                kept.append((number * step, min(length, left)))
                left -= kept[-1][1]
        return kept

    remote, local = spans(remote_lengths, 50), spans(local_lengths, 77)
    pieces = join(remote, big, local, big, 1000)
    expected = [[start + byte for start, length in side for byte in range(length)] for side in (remote, local)]
    for side, plain in zip((pieces.remote, pieces.local), expected, strict=True):
        assert (
            np.concatenate([np.arange(a, a + n) for a, n in zip(side, pieces.lengths, strict=True)]).tolist() == plain
        )


def test_slices_keep_to_their_bounds() -> None:
    whole = RegionMap([Region(0, 10**6)], "own")
    spans = [(100 * number, 10) for number in range(50)] + [(9000, 400)]
    pieces = join(spans, whole, spans, whole, 10**6)
    parts = list(pieces.slices(95, 6))
    assert [len(part) for part in parts] == [6] * 8 + [2, 1]
    assert [len(part) for part in pieces.slices(95, 1000)] == [9] * 5 + [5, 1]
    assert np.concatenate([part.local for part in parts]).tolist() == pieces.local.tolist()
    assert list(join([], whole, [], whole, 8).slices(8, 8)) == []


@pytest.mark.parametrize("span", [(-1, 4), (0, 0), (0, -1), (199, 2), (60, 10), (2**63, 1), (2**62, 2**62), (0, 201)])
def test_spans_outside_of_a_region_are_refused(span: tuple[int, int]) -> None:
    own = RegionMap(regions(0), "own")
    with pytest.raises(ProtocolError, match="region"):
        own.locate(*columns([(0, 4), span]))


def test_pieces_one_by_one() -> None:
    remote, local = [(0, 10), (50, 10)], [(100, 4), (200, 16)]
    assert list(join(remote, ANYWHERE, local, ANYWHERE, 8).rows()) == [
        (0, 100, 4),
        (4, 200, 6),
        (50, 206, 8),
        (58, 214, 2),
    ]
    assert list(join([], ANYWHERE, [], ANYWHERE, 8).rows()) == []
