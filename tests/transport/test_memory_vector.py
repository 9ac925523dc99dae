from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.transport.memory_vector import CALL_PIECES, MemoryVector


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    listening = socket.create_server(("127.0.0.1", 0))
    sending = socket.create_connection(listening.getsockname())
    receiving, _ = listening.accept()
    for sock in (sending, receiving):
        sock.setblocking(False)
    yield sending, receiving
    for sock in (listening, sending, receiving):
        sock.close()


def vector(memory: np.ndarray, spans: list[tuple[int, int]]) -> MemoryVector:
    table = np.array(spans, np.int64).reshape(-1, 2)
    return MemoryVector(table[:, 0] + memory.ctypes.data, table[:, 1])


def spans_of(rng: random.Random, lengths: list[int]) -> list[tuple[int, int]]:
    """Somewhere in memory, none touching another, in any order."""
    starts = np.cumsum([0, *(length + 1 for length in lengths)])[:-1].tolist()
    spans = list(zip(starts, lengths, strict=True))
    rng.shuffle(spans)
    return spans


@pytest.mark.parametrize("longest", [1, 40, 5000, 3 * 2**20])
def test_bytes_arrive_in_order_however_the_kernel_cuts_them(
    ends: tuple[socket.socket, socket.socket], longest: int
) -> None:
    rng = random.Random(longest)
    count = 5 if longest > 2**20 else 2 * CALL_PIECES + 3
    lengths = [rng.randint(1, longest) for _ in range(count)]
    source = np.frombuffer(rng.randbytes(sum(lengths) + count), np.uint8)
    target = np.zeros_like(source)
    from_order, to_order = spans_of(rng, lengths), spans_of(rng, lengths)
    sent, received = vector(source, from_order), vector(target, to_order)
    while received.num_left:
        for part, sock in ((sent, ends[0]), (received, ends[1])):
            try:
                if part.num_left:
                    part.send(sock) if part is sent else part.receive(sock)
            except BlockingIOError:
                pass
    assert sent.num_left == 0
    assert gathered(source, from_order) == gathered(target, to_order)
    assert np.count_nonzero(target) <= sum(lengths)


def gathered(memory: np.ndarray, spans: list[tuple[int, int]]) -> bytes:
    return b"".join(memory[offset : offset + length].tobytes() for offset, length in spans)


def test_what_the_socket_says(ends: tuple[socket.socket, socket.socket]) -> None:
    memory = np.zeros(100, np.uint8)
    with pytest.raises(BlockingIOError):
        vector(memory, [(0, 10)]).receive(ends[1])
    ends[0].send(b"abc")
    assert vector(memory, [(0, 2), (50, 20)]).receive(ends[1]) == (3, 22)
    assert bytes(memory[[0, 1, 50, 51]]) == b"abc\0"
    ends[0].close()
    assert vector(memory, [(0, 10)]).receive(ends[1]) == (0, 10)
    ends[1].close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        vector(memory, [(0, 10)]).send(ends[1])


def test_a_vector_of_nothing_is_done() -> None:
    assert vector(np.zeros(1, np.uint8), []).num_left == 0
