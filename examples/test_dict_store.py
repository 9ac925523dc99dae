"""How a package shows that its store does what a store must: `pytest examples`."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.core.errors import ConfigError
from kvferry.store.base import KVStore, PutResult
from kvferry.store.table import find_store
from kvferry.testing.stores import LAYOUT, StoreContract, block_of, fetch, name_of

URL = "dict_store:DictStore"


class TestDictStore(StoreContract):
    url = f"{URL}?max_blocks=100"
    outlives_instances = False


class TestDictStoreWithCodec(StoreContract):
    url = f"{URL}?codec=lossless"
    outlives_instances = False


def test_the_least_recently_used_goes_first_and_pinned_ones_stay() -> None:
    async def main() -> None:
        store: KVStore = find_store(f"{URL}?max_blocks=2").make(LAYOUT)
        await store.put([block_of(0), block_of(1)])
        await store.pin([name_of(0)])
        assert await store.put([block_of(2)]) == [PutResult.STORED]
        assert await fetch(store, range(3)) == [True, False, True]
        await store.pin([name_of(2)])
        assert await store.put([block_of(3)]) == [PutResult.DROPPED]

    asyncio.run(main())


def test_its_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_blocks must be at least 1"):
        find_store(f"{URL}?max_blocks=0")
    with pytest.raises(ConfigError, match="did you mean 'max_blocks'"):
        find_store(f"{URL}?max_block=1")
