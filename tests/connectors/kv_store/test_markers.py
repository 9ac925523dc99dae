"""What a producer reports of hand-offs, and what consumers find in the store meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from kv_support import make_layout

from kvferry.connectors.api import Saved
from kvferry.connectors.kv_store.markers import Marker, MarkerProducer, Markers, heartbeat_name
from kvferry.connectors.kv_store.writer import StoreWriter
from kvferry.core.errors import StoreError
from kvferry.store.base import Block, PutResult
from kvferry.transport.transfer_loop import TransferLoop

LAYOUT = make_layout()


class SlowStore:
    """Takes blocks when `gate` is open, and notes at once, unless `works` is false. `noted` has their names."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.works = True
        self.noted: list[str] = []
        self.changed = threading.Semaphore(0)
        self.taking_changed: Any = None

    async def put(self, blocks: list[Block]) -> list[PutResult]:
        await self.gate.wait()
        return [PutResult.STORED] * len(blocks)

    async def write_note(self, name: str, note: bytes, seconds: float) -> None:
        self.noted.append(name)
        self.changed.release()
        if not self.works:
            raise StoreError("not now")

    async def remove_note(self, name: str) -> None:
        self.noted.append(f"-{name}")

    def on_accepts_changed(self, call: Any) -> None:
        self.taking_changed = call

    def accepts_writes(self) -> list[int]:
        return [0, 2] if self.works else []


@pytest.fixture
def loop() -> Iterator[TransferLoop]:
    loop = TransferLoop("test")
    loop.start()
    yield loop
    loop.close()


def marker(name: str) -> Marker:
    return Marker(transfer_id=name, layout=LAYOUT, num_tokens=4, digest="d")


class QuickProducer(MarkerProducer):
    heartbeat_s, heartbeat_linger_s = 0.01, 0.05


class Producer:
    def __init__(self, loop: TransferLoop) -> None:
        self.store: Any = SlowStore()
        self.saved: list[Saved] = []
        self.told = threading.Semaphore(0)
        self.loop, self.writer = loop, StoreWriter(self.store, loop, 1e9)
        self.producer = QuickProducer(
            self.store, Markers("secret"), "p", is_writing=lambda: not self.writer.is_empty(), report=self._tell
        )

    def mark(self, name: str) -> None:
        self.loop.call(self.producer.start_heartbeats)
        self.writer.submit(partial(self.producer.write_marker, marker(name)))

    def _tell(self, saved: Saved) -> None:
        self.saved.append(saved)
        self.told.release()

    def wait_for_notes(self, times: int) -> None:
        for _ in range(times):
            assert self.store.changed.acquire(timeout=60)


def wait_for_the_last_sign(producer: Producer, loop: TransferLoop) -> None:
    async def wait(signs: asyncio.Task[None]) -> None:
        await asyncio.wait([signs])

    signs = producer.producer.heartbeats
    assert signs is not None
    loop.submit(wait(signs)).result(60)


def test_a_hand_off_is_told_with_the_stores_that_took_it(loop: TransferLoop) -> None:
    producer = Producer(loop)
    producer.mark("a")
    assert producer.told.acquire(timeout=60)
    producer.store.works = False
    producer.mark("b")
    assert producer.told.acquire(timeout=60)
    producer.store.works = True
    loop.call(producer.store.taking_changed)
    assert producer.told.acquire(timeout=60)
    assert producer.saved == [Saved("a", [0, 2]), Saved("b", []), Saved("b", [0, 2])]
    assert [one for one in producer.store.noted if one != heartbeat_name("p")][-1] == "b.0"
    producer.writer.close()


def test_a_producer_gives_signs_for_as_long_as_it_writes(loop: TransferLoop) -> None:
    producer = Producer(loop)
    producer.writer.put(Block(b"x", [memoryview(b"1234")]))
    producer.mark("a")
    producer.wait_for_notes(5)
    assert producer.store.noted[:5] == [heartbeat_name("p")] * 5
    loop.call(producer.store.gate.set)
    assert producer.told.acquire(timeout=60)
    wait_for_the_last_sign(producer, loop)
    assert "a.0" in producer.store.noted
    assert producer.store.noted[-1] == f"-{heartbeat_name('p')}"
    producer.writer.close()


def test_a_producer_whose_stores_take_nothing_gives_no_sign(loop: TransferLoop) -> None:
    producer = Producer(loop)
    producer.store.works = False
    producer.mark("a")
    assert producer.told.acquire(timeout=60)
    wait_for_the_last_sign(producer, loop)
    assert producer.store.noted == ["a.0"]
    producer.writer.close()
