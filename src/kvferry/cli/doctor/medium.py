"""Measured rates of the media between two processes of this machine."""

from __future__ import annotations

import mmap
import os
import socket
from contextlib import suppress

from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.runtime.threads import Thread

NUM_BYTES = 64 * 2**20
_CHUNK = 2**20


def shared_memory_rate(num_bytes: int = NUM_BYTES, clock: Clock = SYSTEM_CLOCK) -> float:
    """Bytes a second that one core copies out of shared memory, as D does. Raises `OSError`."""
    descriptor = os.memfd_create("kvferry-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
        with mmap.mmap(descriptor, num_bytes) as shared:
            shared[:] = bytes(num_bytes)
            target, best_s = bytearray(num_bytes), float("inf")
            for _ in range(3):
                begun = clock.monotonic()
                with memoryview(shared) as view:
                    target[:] = view
                best_s = min(best_s, clock.monotonic() - begun)
    finally:
        os.close(descriptor)
    return num_bytes / max(best_s, 1e-9)


def loopback_rate(num_bytes: int = NUM_BYTES, clock: Clock = SYSTEM_CLOCK) -> float:
    """Bytes a second of one TCP connection within this machine. Raises `OSError`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = Thread(_send, server.getsockname(), num_bytes, name="sends")
        server.settimeout(10.0)
        sender.start()
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10.0)
            buffer, received, begun = bytearray(_CHUNK), 0, clock.monotonic()
            while received < num_bytes:
                count = connection.recv_into(buffer)
                if not count:
                    raise ConnectionResetError("the connection ended early")
                received += count
            seconds = clock.monotonic() - begun
        sender.join(10.0)
    return num_bytes / max(seconds, 1e-9)


def _send(address: tuple[str, int], num_bytes: int) -> None:
    chunk = bytes(_CHUNK)
    with suppress(OSError), socket.create_connection(address, timeout=10.0) as connection:
        for _ in range(num_bytes // _CHUNK):
            connection.sendall(chunk)
