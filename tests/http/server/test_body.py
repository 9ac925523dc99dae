"""A body on its way in, without a connection."""

from __future__ import annotations

import tracemalloc

import pytest

from kvferry.http.server.body import BUFFERED_BYTES, Body

CHUNKS = [b"ab", b"c" * 1024, b"d", b"", b"e" * 2**17, *[b"fg"] * 2**16]


def body_of(chunks: list[bytes]) -> Body:
    body = Body(2**24, lambda: None)
    for chunk in chunks:
        body.feed(chunk)
    body.end()
    return body


@pytest.mark.parametrize("chunks", [[], [b"a"], [b"a" * 1024], CHUNKS])
async def test_what_came_is_read_however_it_was_cut(chunks: list[bytes]) -> None:
    whole = await body_of(chunks).read()
    assert type(whole) is bytes
    assert whole == b"".join(chunks)


def test_a_body_in_tiny_chunks_takes_the_memory_of_its_bytes() -> None:
    body = Body(2**24, lambda: None)
    tracemalloc.start()
    for number in range(BUFFERED_BYTES):
        body.feed(number.to_bytes(2, "big", signed=False) if number < 2**16 else bytes([number % 251, 7]))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert body.num_bytes == 2 * BUFFERED_BYTES
    assert most < 2 * body.num_bytes
