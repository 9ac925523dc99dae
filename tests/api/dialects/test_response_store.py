"""Stored responses: whose they are, and when they are dropped."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.api.dialects.response_store import ResponseStore, StoredResponse, compress_items
from kvferry.core.clock import ManualClock
from kvferry.core.errors import Unavailable

MakeStore = Callable[..., ResponseStore]


def stored(name: str, owner: bytes = b"a", text: str = "x") -> StoredResponse:
    return StoredResponse(name, owner, f"session of {name}", compress_items([{"text": text}]), b"{}")


@pytest.fixture(params=["memory", "file"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "responses.sqlite" if request.param == "file" else None


def test_a_response_is_its_owners(path: Path | None) -> None:
    store = ResponseStore(path, ManualClock())
    store.put(stored("r1"))
    found = store.get("r1", b"a")
    assert found == stored("r1")
    assert found.input_items() == [{"text": "x"}]
    for owner in (b"", b"b", b"a\0"):
        assert store.get("r1", owner) is None
        assert not store.delete("r1", owner)
    for name in ("", "r2", "r1' OR 1=1 --", "%", "r\ud800"[:1]):
        assert store.get(name, b"a") is None
    assert store.delete("r1", b"a")
    assert store.get("r1", b"a") is None
    store.close()


def test_the_least_recently_used_is_dropped_first(path: Path | None) -> None:
    clock = ManualClock()
    store = ResponseStore(path, clock, max_responses=2)
    for name in ("r1", "r2"):
        clock.advance(1)
        store.put(stored(name))
    clock.advance(1)
    assert store.get("r1", b"a") is not None
    clock.advance(1)
    store.put(stored("r3"))
    assert [store.get(name, b"a") is not None for name in ("r1", "r2", "r3")] == [True, False, True]
    store.close()


def test_the_bytes_of_all_are_bounded(path: Path | None) -> None:
    size = len(stored("r1").items) + 2
    store = ResponseStore(path, ManualClock(), max_bytes=3 * size)
    for number in range(10):
        store.put(stored(f"r{number}"))
    assert store.statistics() == {"responses": 3, "bytes": 3 * size}
    store.put(StoredResponse("big", b"a", "", bytes(4 * size), b"{}"))
    assert store.get("big", b"a") is None
    assert store.statistics()["responses"] == 3
    store.close()


def test_a_response_expires_after_its_last_use(path: Path | None) -> None:
    clock = ManualClock()
    store = ResponseStore(path, clock, ttl_s=10)
    store.put(stored("r1"))
    clock.advance(9)
    assert store.get("r1", b"a") is not None
    clock.advance(9)
    assert store.get("r1", b"a") is not None
    clock.advance(10)
    assert store.get("r1", b"a") is None
    store.put(stored("r2"))
    assert store.statistics()["responses"] == 1
    store.close()


def test_nothing_is_stored_without_a_limit() -> None:
    store = ResponseStore(None, ManualClock(), max_responses=0)
    store.put(stored("r1"))
    assert store.statistics() == {"responses": 0, "bytes": 0}


def test_routers_of_a_port_share_it(tmp_path: Path) -> None:
    first, second = (ResponseStore(tmp_path / "responses.sqlite", ManualClock()) for _ in range(2))
    first.put(stored("r1"))
    assert second.get("r1", b"a") == stored("r1")
    assert second.delete("r1", b"a")
    assert first.get("r1", b"a") is None
    first.close()
    second.close()


def test_a_locked_database_is_an_error_and_answers_are_given_all_the_same(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "responses.sqlite", ManualClock())
    other = sqlite3.connect(tmp_path / "responses.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store.put(stored("r1"))
    with pytest.raises(Unavailable, match="stored responses"):
        store.get("r1", b"a")
    other.execute("ROLLBACK")
    other.close()
    assert store.get("r1", b"a") is None
    store.close()
