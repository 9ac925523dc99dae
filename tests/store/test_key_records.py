"""Records of keys: signed under their names, in pages, and never those of others."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.store.key_records import (
    NAME_BYTES,
    NAMES_PER_NOTE,
    BadKeyRecord,
    KeyNotes,
    KeyRecord,
    make_record,
    salt_digest,
)
from kvferry.testing.stores import LAYOUT, names_of


def record_of(num_blocks: int, ttl_s: float = 60.0) -> tuple[KeyRecord, list[bytes]]:
    return make_record(LAYOUT, "salt", names_of(num_blocks), 0, 4 * num_blocks, 1000.0, ttl_s)


@pytest.mark.parametrize(
    ("num_blocks", "num_pages"),
    [(0, 0), (1, 0), (NAMES_PER_NOTE, 0), (NAMES_PER_NOTE + 1, 1), (2 * NAMES_PER_NOTE + 5, 2)],
)
def test_a_long_list_goes_on_in_pages(num_blocks: int, num_pages: int) -> None:
    record, pages = record_of(num_blocks)
    assert (record.num_blocks, record.num_pages, len(pages)) == (num_blocks, num_pages, num_pages)
    names = record.block_names() + [page[i : i + NAME_BYTES] for page in pages for i in range(0, len(page), NAME_BYTES)]
    assert names == [name[:NAME_BYTES] for name in names_of(num_blocks)]


def test_a_record_is_read_until_it_expires() -> None:
    notes, (record, _) = KeyNotes("token"), record_of(3)
    name = notes.name("tenant", "key", 0)
    note = notes.seal(name, record)
    assert notes.open(name, note, 1030.0) == record
    assert notes.open(name, note, 1e9) is None
    assert notes.open(name, notes.seal(name, record.with_expiry(2e9)), 1e9) is not None


def test_names_are_of_one_tenant_key_rank_and_page() -> None:
    notes = KeyNotes("token")
    names = {
        notes.name("a", "bc", 0),
        notes.name("ab", "c", 0),
        notes.name("a", "bc", 1),
        notes.name("a", "bc", 0, 1),
        notes.name("", "abc", 0),
        KeyNotes("another").name("a", "bc", 0),
    }
    assert len(names) == 6
    assert all(name.startswith("key ") for name in names)
    assert notes.name("\ud800", "\udfff", 0), "whatever clients send has a name"


def test_what_is_not_sealed_under_the_name_is_refused() -> None:
    notes, (record, _) = KeyNotes("token"), record_of(3)
    name, other = notes.name("", "a", 0), notes.name("", "b", 0)
    note = notes.seal(name, record)
    wrong = [note[:-1], note + b"x", bytes([note[0] ^ 1]) + note[1:], b"", note[:10], msgspec.msgpack.encode(record)]
    for content in wrong:
        with pytest.raises(BadKeyRecord):
            notes.open(name, content, 1000.0)
    with pytest.raises(BadKeyRecord):
        notes.open(other, note, 1000.0)
    with pytest.raises(BadKeyRecord):
        KeyNotes("another").open(name, note, 1000.0)


def test_salts_have_digests() -> None:
    assert len(salt_digest("")) == NAME_BYTES
    assert salt_digest("a") != salt_digest("b")
    assert salt_digest("\ud800") != salt_digest("?")
