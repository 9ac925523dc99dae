"""A real Mooncake store: records of wrong lengths, and pins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from servers import start_mooncake_master
from trouble import end, run

from kvferry.store.base import Put
from kvferry.store.table import find_store
from kvferry.store.tiered.tiers import TieredStore
from kvferry.testing.stores import LAYOUT, block_of, fetch, name_of, names_of

pytestmark = pytest.mark.short_deadlines


@pytest.mark.full
def test_values_of_any_length_at_a_mooncake_store_are_not_fetched(tmp_path: Path) -> None:
    address, master = start_mooncake_master(tmp_path)

    async def use(store: TieredStore) -> None:
        inner: Any = store.tiers[0].store
        enormous = bytes(inner.records.max_record_bytes + 1)
        assert inner._connected_client.put(inner._key(name_of(0)), enormous) == 0
        fetched: list[str] = []
        inner._client = _Listening(inner._client, fetched)
        assert await fetch(store, [0]) == [False]
        assert fetched == []
        assert store.statistics()["corrupt_blocks"] == 1
        assert await store.put([block_of(0)]) == [Put.STORED], "what was in the way is gone"
        assert await fetch(store, [0]) == [True]
        await store.write_note("one", b"two", 60.0)
        assert await store.read_note("one") == b"two"

    try:
        run([f"mooncake://{address}?segment_bytes=32MiB&buffer_bytes=16MiB"], use)
    finally:
        end(master)


@pytest.mark.full
def test_a_block_that_a_mooncake_store_does_not_pin_is_still_there(tmp_path: Path) -> None:
    address, master = start_mooncake_master(tmp_path)

    async def use(store: TieredStore) -> None:
        inner: Any = store.tiers[0].store
        assert await store.put([block_of(0)]) == [Put.STORED]
        client, inner._client = inner._client, _Unpinning(inner._client)
        assert await inner.pin([name_of(0)]) == 0
        assert await fetch(store, [0]) == [True]
        inner._client = client
        assert await inner.pin([name_of(0)]) == 1

    try:
        run([f"mooncake://{address}?segment_bytes=32MiB&buffer_bytes=16MiB"], use)
    finally:
        end(master)


@pytest.mark.full
@pytest.mark.parametrize("loss", ["lost and put again", "unpinned by another", "removed as damaged by another"])
def test_a_mooncake_store_pins_what_it_pinned_before_it_was_lost(tmp_path: Path, loss: str) -> None:
    address, master = start_mooncake_master(tmp_path)
    url = f"mooncake://{address}?segment_bytes=32MiB&buffer_bytes=16MiB"

    async def use(store: TieredStore) -> None:
        inner: Any = store.tiers[0].store
        another: Any = find_store(url).make(LAYOUT)
        await another.open()
        await store.put([block_of(0), block_of(1)])
        inner._client = _Pinning(inner._client)
        assert await inner.pin(names_of(2)) == 2
        if loss == "unpinned by another":
            assert await another.unpin(names_of(1)) == 1
        else:
            await another.delete(names_of(1))
            assert await inner.pin(names_of(2)) == 1
            assert inner._pinned == {name_of(1)}, "what is lost takes no room"
            await store.put([block_of(0)])
        inner._client.pinned.clear()
        assert await inner.pin(names_of(1)) == 1
        assert inner._client.pinned == [inner._key(name_of(0))]
        assert await fetch(store, [0, 1]) == [True, True]
        await another.close()

    try:
        run([url], use)
    finally:
        end(master)


class _Pinning:
    """A client, and which keys it put hard-pinned."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.pinned: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def put(self, key: str, record: bytes, *config: Any) -> Any:
        if config and config[0].with_hard_pin:
            self.pinned.append(key)
        return self._client.put(key, record, *config)


class _Unpinning:
    """A client whose master has no room for what is to be pinned."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def put(self, key: str, record: bytes, *config: Any) -> Any:
        return -200 if config and config[0].with_hard_pin else self._client.put(key, record, *config)


class _Listening:
    """A client, and which keys it fetched."""

    def __init__(self, client: Any, fetched: list[str]) -> None:
        self._client, self._fetched = client, fetched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def get(self, key: str) -> Any:
        self._fetched.append(key)
        return self._client.get(key)

    def batch_get_buffer(self, keys: list[str]) -> Any:
        self._fetched += keys
        return self._client.batch_get_buffer(keys)
