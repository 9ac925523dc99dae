"""Which instances could hand off to each other through their stores, as far as their settings tell."""

from __future__ import annotations

from typing import Any

import pytest
from kv_support import make_layout

from kvferry.connectors.api import ConnectorContext
from kvferry.connectors.kv_store.scheduler import KVStoreSchedulerSide
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.messages.instance_facts import TicketKinds
from kvferry.core.settings.transfer_config import KVRole, KVTransferConfig
from kvferry.store.media import memory

FILE, VALKEY, MEMORY = "file:/kv", "valkey://a:1", "memory:8MiB"


def kinds(store: str | list[str], layout: KVLayout | None = None, role: KVRole = "kv_both") -> TicketKinds:
    extra = {"store": store}
    config = KVTransferConfig(kv_connector="KVStoreConnector", kv_role=role, kv_connector_extra_config=extra)
    side = KVStoreSchedulerSide(ConnectorContext(config, layout or make_layout(num_layers=2), "secret"))
    side.close()
    return side.tickets()


@pytest.mark.parametrize(
    ("prefill", "decode", "fits"),
    [
        (FILE, "file:/mounted/elsewhere", True),
        (VALKEY, "valkey://other-name:1/0", True),
        (VALKEY, "rediss://a:2", True),
        ("redis://a:1", "unix:/run/valkey.sock", True),
        (FILE, VALKEY, False),
        (FILE, [MEMORY, FILE], True),
        ([MEMORY, FILE], [FILE], True),
        (FILE, [FILE, MEMORY], True),
        ([FILE, VALKEY], [VALKEY, FILE], True),
        (MEMORY, "memory:8192KiB", True),
        (MEMORY, "memory:16MiB", False),
        (MEMORY, "memory:8MiB?name=other", False),
        (MEMORY, "memory:?num_blocks=64", False),
        (FILE, "file:/kv?codec=lossless", False),
        (FILE, "file:/kv?codec=fp8", False),
        ([VALKEY, FILE], [VALKEY, "file:/kv?codec=lossless"], True),
        ([VALKEY + "?codec=lossless", FILE], [FILE + "?codec=lossless"], False),
        ("lmcache://a:1", "lmcache://a:1?max_bytes=1GiB", False),
    ],
)
def test_what_two_stores_must_have_in_common(prefill: str | list[str], decode: str | list[str], fits: bool) -> None:
    """One tier is enough, whatever others call it, and wherever it is in the list."""
    assert kinds(prefill).is_readable_by(kinds(decode)) is fits
    assert kinds(decode).is_readable_by(kinds(prefill)) is fits


@pytest.mark.parametrize(
    ("other", "fits"), [({}, True), ({"block_size": 8}, False), ({"dtype": "bfloat16"}, False), ({"tp_size": 2}, False)]
)
def test_blocks_of_another_layout_are_not_read(other: dict[str, Any], fits: bool) -> None:
    def layout(**fields: Any) -> KVLayout:
        return make_layout(num_layers=2, **fields)

    assert kinds(FILE, layout=layout()).is_readable_by(kinds(FILE, layout=layout(**other))) is fits


def test_memory_is_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = kinds(MEMORY), kinds([MEMORY, FILE])
    monkeypatch.setattr(memory, "rendezvous_id", lambda: "another")
    there = kinds(MEMORY), kinds([MEMORY, FILE])
    assert [one.is_readable_by(other) for one, other in zip(here, there, strict=True)] == [False, True]


def test_a_store_that_nobody_shares_hands_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("examples")
    assert kinds("dict_store:DictStore") == TicketKinds(writes=(), reads=())


def test_a_role_writes_or_reads() -> None:
    both, producer, consumer = (kinds(FILE, role=role) for role in ("kv_both", "kv_producer", "kv_consumer"))
    assert producer == TicketKinds(writes=both.writes, reads=())
    assert consumer == TicketKinds(writes=(), reads=both.reads)
