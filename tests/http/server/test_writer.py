"""Output to a client that reads slowly, or has left."""

from __future__ import annotations

import asyncio
from typing import Any

from kvferry.http.server.writer import ClientWriter


class Transport(asyncio.Transport):
    """Keeps what is written until the test takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.unsent, self.closing = b"", 0, False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None
        assert low is not None
        assert low < high

    def write(self, data: Any) -> None:
        self.sent += data

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closing


class Source:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")


async def test_a_slow_client_pauses_its_source_and_is_waited_for() -> None:
    writer, source = ClientWriter(Transport()), Source()
    writer.set_producer(source)
    assert writer.is_writable
    writer.pause(1.0)
    assert (writer.is_writable, writer.slow, source.calls) == (False, True, ["pause"])
    waiting = asyncio.create_task(writer.drain())
    await asyncio.sleep(0)
    assert not waiting.done()
    writer.resume()
    await waiting
    assert source.calls == ["pause", "resume"]


async def test_a_source_that_comes_later_is_paused_at_once() -> None:
    writer, source = ClientWriter(Transport()), Source()
    writer.pause(1.0)
    writer.set_producer(source)
    assert source.calls == ["pause"]


async def test_a_client_that_has_left_gets_nothing_and_holds_nobody_up() -> None:
    transport = Transport()
    writer = ClientWriter(transport)
    writer.write(b"")
    writer.write(b"before")
    writer.pause(1.0)
    waiting = asyncio.create_task(writer.drain())
    await asyncio.sleep(0)
    writer.lose()
    await waiting
    writer.write(b"after")
    await writer.drain()
    assert transport.sent == b"before"


def test_a_stall_is_counted_from_the_last_byte_that_was_read() -> None:
    transport = Transport()
    writer = ClientWriter(transport)
    assert writer.stalled_s(100.0) == 0.0
    transport.unsent = 500
    writer.pause(10.0)
    assert writer.stalled_s(15.0) == 5.0
    transport.unsent = 400
    assert writer.stalled_s(16.0) == 0.0
    assert writer.stalled_s(18.0) == 2.0
    transport.unsent = 450
    assert writer.stalled_s(19.0) == 3.0, "more that waits is nothing that was read"
    writer.resume()
    assert writer.stalled_s(20.0) == 0.0
