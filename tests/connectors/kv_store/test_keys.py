"""Keys of requests on several ranks, in stores that lose blocks, and on disks with many of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeRequest
from kv_support import make_layout, sharded

from kvferry.core.messages.kv_keys import KVTransferParams
from kvferry.store.access import ACCESS
from kvferry.store.key_records import BadKeyRecord, KeyNotes, explain_mismatch, make_record
from kvferry.store.media.file_notes import NoteFiles

LAYOUT = sharded(make_layout(2), 2)
PROMPT = list(range(100, 119))
Make = Callable[..., FakeEngine]


@pytest.fixture
def make(make_engine: Make, tmp_path: Path) -> Make:
    def made(**options: Any) -> FakeEngine:
        options = {"layout": LAYOUT, "store": f"file:{tmp_path}?deadline_s=5", "timeout_s": 20.0} | options
        return make_engine("KVStoreConnector", **options)

    return made


def storing(tokens: list[int], *keys: str | None) -> FakeRequest:
    return FakeRequest("store", tokens, transfer_params=KVTransferParams(kvcache_store_keys=keys))


def loading(tokens: list[int], *keys: str, wait_s: float = 0.0) -> FakeRequest:
    params = KVTransferParams(kvcache_load_keys=keys, kvcache_wait_s=wait_s)
    return FakeRequest("load", tokens, transfer_params=params)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "keys do not bring" in record.getMessage()]


def test_a_step_that_stores_keys_ends_when_they_are_stored_on_every_rank(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """In an engine that cannot delay one answer, such as vLLM."""
    producer, consumer = make(), make()
    producer.run(storing(PROMPT, "k"))
    decode = consumer.run(loading(PROMPT, "k"))
    assert (decode.error, decode.num_computed_here) == (None, len(PROMPT) % LAYOUT.block_size)
    consumer.require_right(decode)
    assert said(caplog) == []


def test_a_key_of_one_rank_alone_is_missing(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = make(), make()
    producer.run(storing(PROMPT, "k"))
    NoteFiles(tmp_path / "notes", ACCESS["owner"]).remove(KeyNotes("secret").name("", "k", 1))
    decode = consumer.run(loading(PROMPT, "k"))
    assert decode.num_computed_here == len(PROMPT) % LAYOUT.block_size  # its blocks are there all the same
    assert "'k' is not in the store" in said(caplog)[0]


def test_another_number_of_ranks_computes(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = make(), make(layout=make_layout(2))
    producer.run(storing(PROMPT, "k"))
    decode = consumer.run(loading(PROMPT, "k"))
    assert (decode.error, decode.num_computed_here) == (None, len(PROMPT))
    assert "is of KV in another layout" in said(caplog)[0]


def test_keys_of_blocks_that_the_store_did_not_take_are_not_stored(
    make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    tokens = list(range(1000, 1200))
    producer, consumer = make(store=f"memory:?num_blocks=6&name={tmp_path.name}"), make()
    producer.run(storing(tokens, *(f"k{number}" for number in range(50))))
    figures = producer.worker.statistics()
    assert figures.get("stored_keys", 0) + figures["dropped_keys"] == 50
    assert figures["dropped_keys"] >= 44
    assert any("keys are not stored" in record.getMessage() for record in caplog.records)
    decode = consumer.run(loading(tokens, *(f"k{number}" for number in range(50))))
    assert (decode.error, decode.num_computed_here) == (None, len(tokens))


def test_a_long_list_continues_on_further_notes() -> None:
    notes, now_s = KeyNotes("secret"), time.time()
    hashes = [number.to_bytes(32, "big")[::-1] for number in range(3000)]
    record, pages = make_record(LAYOUT, "", hashes, 0, 48_000, now_s, 60.0)
    assert (record.num_blocks, record.num_pages, len(pages)) == (3000, 3, 3)
    names = record.block_names()
    for page, listed in enumerate(pages, 1):
        name = notes.name("t", "k", 0, page)
        sealed = notes.seal_page(name, record, listed)
        assert len(sealed) <= 2**14
        names += notes.open_page(name, sealed, record)
    assert names == [block_hash[:16] for block_hash in hashes]
    name = notes.name("t", "k", 0)
    assert notes.open(name, notes.seal(name, record), now_s) == record
    assert notes.open(name, notes.seal(name, record), now_s + 1000) is None


def test_many_notes_are_swept_some_at_a_time(tmp_path: Path) -> None:
    """A sweep of all of them would take longer than a store may for a note."""
    from kvferry.store.access import OWNER

    files = NoteFiles(tmp_path, OWNER)
    for number in range(300):
        files.write(f"old {number}", b"", -1.0)
    left = len(list(tmp_path.iterdir()))
    files = NoteFiles(tmp_path, OWNER)
    for number in range(40):
        files.write("new", b"", 60.0)
        before, left = left, len(list(tmp_path.iterdir()))
        assert before - left <= 64, number
    assert left == 1


def test_what_else_the_kv_depends_on_is_compared() -> None:
    """In vLLM, the salt of a request stands for its LoRA adapter and images too; the tenant's is its `cache_salt`."""
    hashes = [bytes([number]) * 32 for number in range(4)]
    record, _ = make_record(LAYOUT, "an adapter", hashes, 0, 16, 0.0, 60.0)
    assert explain_mismatch(record, hashes, "an adapter", LAYOUT) is None
    assert explain_mismatch(record, hashes[:2], "an adapter", LAYOUT) is None
    assert "another LoRA adapter" in (explain_mismatch(record, hashes, "", LAYOUT) or "")
    changed = [*hashes[:3], bytes(32)]
    assert explain_mismatch(record, changed, "an adapter", LAYOUT) == (
        "is of another prompt, whose first 12 tokens are the same"
    )
    behind, _ = make_record(LAYOUT, "", hashes[2:], 2, 16, 0.0, 60.0)
    assert explain_mismatch(behind, hashes, "", LAYOUT) is None
    assert explain_mismatch(behind, hashes[:2], "", LAYOUT) == "is of another prompt"
    empty, _ = make_record(LAYOUT, "", [], 0, 3, 0.0, 60.0)
    assert explain_mismatch(empty, [], "", LAYOUT) is None


@pytest.mark.parametrize("change", ["code", "body", "name", "length"])
def test_a_changed_record_is_not_believed(change: str) -> None:
    notes = KeyNotes("secret")
    record, _ = make_record(LAYOUT, "", [bytes(32)], 0, 4, 0.0, 60.0)
    name = notes.name("", "k", 0)
    sealed = bytearray(notes.seal(name, record))
    if change == "name":  # put back under another key
        name = notes.name("", "other", 0)
    elif change == "length":
        sealed = sealed[:20]
    else:
        sealed[0 if change == "code" else -1] ^= 1
    with pytest.raises(BadKeyRecord):
        notes.open(name, bytes(sealed), 0.0)
    with pytest.raises(BadKeyRecord):
        KeyNotes("another").open(name, bytes(sealed), 0.0)


def test_names_of_keys_are_apart() -> None:
    notes = KeyNotes("secret")
    names = [
        notes.name(*parts)
        for parts in [("", "ab", 0), ("a", "b", 0), ("ab", "", 0), ("", "ab", 1), ("", "ab", 0, 1), ("", "a\0b", 0)]
    ]
    assert len(set(names)) == len(names)
    assert all(" " in name for name in names)  # which no transfer id has, under which clients can leave markers
