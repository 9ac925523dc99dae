"""Finding the end of a chunked body, cut in any way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import ProtocolError
from kvferry.http.answer import _Chunked
from kvferry.http.chunks import ChunkScanner, only_chunk, unchunked

PAYLOADS = st.lists(st.binary(min_size=1, max_size=40), max_size=6)


def framed(payloads: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    chunks = [b"%x%b\r\n%b\r\n" % (len(one), extension, one) for one in payloads]
    return b"".join([*chunks, b"0%b\r\n%b\r\n" % (extension, trailer)])


@given(PAYLOADS, st.sampled_from([b"", b";a=b"]), st.sampled_from([b"", b"X: y\r\n"]), st.data())
def test_the_end_is_found_however_it_is_cut(
    payloads: list[bytes], extension: bytes, trailer: bytes, data: st.DataObject
) -> None:
    whole = framed(payloads, extension, trailer)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=8)))
    scanner, place = ChunkScanner(), 0
    for cut in [*cuts, len(whole)]:
        end = scanner.scan(whole[place:cut]) if cut > place else -1
        if cut < len(whole):
            assert end == -1
        elif cut > place:
            assert end == cut - place
        place = cut
    assert scanner.done
    assert unchunked(whole) == b"".join(payloads)


@given(PAYLOADS, st.sampled_from([b"", b";a=b"]), st.sampled_from([b"", b"X: y\r\n"]), st.data())
def test_the_payload_is_the_same_however_it_is_cut(
    payloads: list[bytes], extension: bytes, trailer: bytes, data: st.DataObject
) -> None:
    whole = framed(payloads, extension, trailer)
    ends, place = [], 0
    for one in payloads:  # cuts between chunks are what mostly happens, and goes another way
        place += len(framed([one], extension)) - len(framed([], extension))
        ends.append(place)
    cuts = data.draw(st.sets(st.one_of(st.integers(0, len(whole)), st.sampled_from([0, *ends])), max_size=12))
    decode, found, place = _Chunked(), b"", 0
    for cut in [*sorted(cuts), len(whole)]:
        if cut > place:
            found += decode.payload(whole[place:cut])
        place = cut
    assert (found, decode.done) == (b"".join(payloads), True)
    with pytest.raises(ProtocolError):
        decode.payload(b"1\r\na\r\n")


@pytest.mark.parametrize(
    ("data", "payload"),
    [
        (b"3\r\nabc\r\n", b"abc"),
        (b"3\r\nabc\r\n0\r\n\r\n", b""),
        (b"3\r\nab\r\n", b""),
        (b"3\r\nabcde", b""),
        (b"3;a\r\nabc\r\n", b""),
        (b"-3\r\nabc\r\n", b""),
        (b" 3\r\nabc\r\n", b""),
        (b"\r\n", b""),
        (b"", b""),
        (b"0\r\n\r\n", b""),
        (b"0" * 15 + b"3\r\nabc\r\n", b""),
    ],
)
def test_one_whole_chunk(data: bytes, payload: bytes) -> None:
    assert only_chunk(data) == payload


def test_what_follows_is_seen() -> None:
    assert ChunkScanner().scan(framed([b"abc"]) + b"more") == len(framed([b"abc"]))


def test_whether_an_event_could_follow() -> None:
    scanner = ChunkScanner()
    assert not scanner.mid_chunk
    for piece, within in (
        (b"3", True),
        (b"\r", True),
        (b"\nab", True),
        (b"c\r", True),
        (b"\n", False),
        (b"0\r\n", True),
    ):
        scanner.scan(piece)
        assert scanner.mid_chunk == within


@pytest.mark.parametrize(
    "bad",
    [b"x\r\n", b"-1\r\n", b" 1\r\n", b"1 \r\n", b"\r\n", b"0x1\r\n", b"1\r\nabc\r\n", b"f" * 16 + b"\r\n", b"1" * 5000],
)
def test_what_is_no_chunk(bad: bytes) -> None:
    with pytest.raises(ProtocolError):
        ChunkScanner().scan(bad)
