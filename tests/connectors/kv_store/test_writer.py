"""What the writer does when the store does not take what it is given."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kv_support import make_layout

from kvferry.connectors.kv_store import writer
from kvferry.connectors.kv_store.markers import Marker, Markers
from kvferry.connectors.kv_store.writer import StoreWriter
from kvferry.core.errors import StoreError
from kvferry.transport.transfer_loop import TransferLoop

LAYOUT = make_layout()


class Moody:
    """A store that refuses the first notes; `took` has the names of the others, and of what was removed."""

    def __init__(self, num_refused: int) -> None:
        self.num_left = num_refused
        self.took: list[str] = []
        self.changed = threading.Semaphore(0)

    async def write_note(self, name: str, note: bytes, seconds: float) -> None:
        self.num_left -= 1
        if self.num_left >= 0:
            self.changed.release()
            raise StoreError("not now")
        self.took.append(name)
        self.changed.release()

    async def remove_note(self, name: str) -> None:
        self.took.append(f"-{name}")
        self.changed.release()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[TransferLoop]:
    monkeypatch.setattr(writer, "AGAIN_S", 0.01)
    loop = TransferLoop("test")
    loop.start()
    yield loop
    loop.close()


def marker(name: str) -> Marker:
    return Marker(transfer_id=name, layout=LAYOUT, num_tokens=4, digest="d")


def writer_of(store: Any, loop: TransferLoop) -> StoreWriter:
    return StoreWriter(store, loop, Markers("secret"), 1e9)


def wait_for(store: Moody, times: int) -> None:
    for _ in range(times):
        assert store.changed.acquire(timeout=60)


def test_a_marker_that_the_store_did_not_take_is_tried_again(loop: TransferLoop) -> None:
    store = Moody(2)
    one = writer_of(store, loop)
    one.mark(marker("a"))
    wait_for(store, 3)
    assert store.took == ["a.0"]
    one.close()


def test_a_marker_that_nobody_wants_any_more_is_not_tried_again(
    loop: TransferLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "AGAIN_S", 3600.0)
    store = Moody(1)
    one = writer_of(store, loop)
    one.mark(marker("a"))
    wait_for(store, 1)
    one.forget("a", 0)
    wait_for(store, 1)
    assert store.took == ["-a.0"]
    assert not one._again
    one.close()


def test_there_is_an_end_to_it(loop: TransferLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MARK_S", 0.0)
    store = Moody(1)
    one = writer_of(store, loop)
    one.mark(marker("a"))
    one.mark(marker("b"))
    wait_for(store, 2)
    assert store.took == ["b.0"]
    assert not one._again
    one.close()
