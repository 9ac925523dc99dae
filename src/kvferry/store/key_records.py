"""Key records: the notes in which a store lists the blocks that a client's key names.

A record lists block hashes with their model, layout and salt. A reader never trusts the hashes of a record: it computes
the hashes of its own prompt, and compares. So a key that was stored for another prompt, model, adapter or configuration
is a miss, and a malicious writer can only cause misses.

A record's name is a digest of the tenant and the key, made with the fleet's token: no key can name anything else of
the store, tenants do not see each other's keys, and no bytes of a key appear in a path. A record is signed under its
name. Each rank has its own record, in its own share of the store. A list that is too long for one note continues in
further ones (pages).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import StoreError
from kvferry.core.keys import derive
from kvferry.core.messages.kv_keys import num_equal

NAME_BYTES = 16
"""Bytes of each block hash in a list."""
NAMES_PER_NOTE = 960
"""Block hashes in one note: every store has room for a note of this length."""
_CODE_BYTES = 16
Content = TypeVar("Content", bound=msgspec.Struct)


class BadKeyRecord(StoreError):
    """The note with a key's name is not a record of this fleet."""


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The blocks `[first, first + num_blocks)` of a prompt, which one key names.

    `salt`: a digest of everything else that the KV depends on besides model and tokens. `names`: the beginnings of the
    block hashes, as many as one note has room for; `num_pages` notes have the others. `created_s`, `expires_s`: since
    the epoch.
    """

    layout: str
    model: str
    block_size: int
    tp_size: int
    salt: bytes
    num_tokens: int
    first: int
    num_blocks: int
    created_s: float
    expires_s: float
    names: bytes
    num_pages: int = 0

    def with_expiry(self, expires_s: float) -> KeyRecord:
        """The same record with another expiry."""
        return msgspec.structs.replace(self, expires_s=expires_s)

    def block_names(self) -> list[bytes]:
        """The beginnings of the block hashes in this note."""
        return _split(self.names)


class _Page(msgspec.Struct, frozen=True, array_like=True):
    created_s: float
    names: bytes


def salt_digest(salt: str) -> bytes:
    """A digest of a request's salt."""
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()[:NAME_BYTES]


def make_record(
    layout: KVLayout, salt: str, hashes: Sequence[BlockHash], first: int, num_tokens: int, now_s: float, ttl_s: float
) -> tuple[KeyRecord, list[bytes]]:
    """A record of these blocks, which begin with block `first` of a prompt, and the lists of its further pages."""
    names = [block_hash[:NAME_BYTES] for block_hash in hashes]
    lists = [b"".join(names[start : start + NAMES_PER_NOTE]) for start in range(0, len(names), NAMES_PER_NOTE)]
    record = KeyRecord(
        layout=layout.fingerprint(),
        model=layout.model_fingerprint,
        block_size=layout.block_size,
        tp_size=layout.tp_size,
        salt=salt_digest(salt),
        num_tokens=num_tokens,
        first=first,
        num_blocks=len(hashes),
        created_s=now_s,
        expires_s=now_s + ttl_s,
        names=lists[0] if lists else b"",
        num_pages=max(0, len(lists) - 1),
    )
    return record, lists[1:]


class KeyNotes:
    """The names and contents of the notes of keys. `token`: the fleet's; empty: it has none."""

    skew_s = 60.0
    """Maximum difference between the clocks of two machines, in seconds."""
    max_pages = 4096

    def __init__(self, token: str) -> None:
        self._secret = derive(token, "keys")

    def name(self, tenant: str, key: str, rank: int, page: int = 0) -> str:
        """The name of a note. It contains a space, which no marker name chosen by a client does."""
        parts = [part.encode("utf-8", "surrogatepass") for part in (tenant, key)]
        digest = hmac.digest(self._secret or b"kvferry", msgspec.msgpack.encode(parts), "sha256").hex()
        return f"key {digest} {rank} {page}"

    def seal(self, name: str, content: KeyRecord) -> bytes:
        """The content of the note with a record."""
        return self._seal(name, msgspec.msgpack.encode(content))

    def seal_page(self, name: str, record: KeyRecord, names: bytes) -> bytes:
        """The content of a further page of a record."""
        return self._seal(name, msgspec.msgpack.encode(_Page(record.created_s, names)))

    def open(self, name: str, note: bytes, now_s: float) -> KeyRecord | None:
        """The record in a note; None if it has expired. Raises `BadKeyRecord`."""
        record = self._open(name, note, KeyRecord)
        sizes = (record.num_blocks, record.first, record.block_size, record.num_tokens, record.tp_size)
        if min(sizes) < 0 or not 0 <= record.num_pages <= self.max_pages or len(record.names) % NAME_BYTES:
            raise BadKeyRecord("a key's record has impossible numbers")
        return record if now_s <= record.expires_s + self.skew_s else None

    def open_page(self, name: str, note: bytes, record: KeyRecord) -> list[bytes]:
        """The beginnings of the block hashes on a further page. Raises `BadKeyRecord`."""
        page = self._open(name, note, _Page)
        if page.created_s != record.created_s or len(page.names) % NAME_BYTES:
            raise BadKeyRecord("a page of a key's record is of another record")
        return _split(page.names)

    def _seal(self, name: str, body: bytes) -> bytes:
        return self._code(name, body) + body

    def _open(self, name: str, note: bytes, kind: type[Content]) -> Content:
        body = note[_CODE_BYTES:]
        if not hmac.compare_digest(note[:_CODE_BYTES], self._code(name, body)):
            raise BadKeyRecord(
                "it was not stored with this instance's token; start all instances with the same KVFERRY_AUTH_TOKEN"
            )
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadKeyRecord(f"what is stored there is no key's record: {error}") from error

    def _code(self, name: str, body: bytes) -> bytes:
        return hmac.digest(self._secret, name.encode() + b"\0" + body, "sha256")[:_CODE_BYTES]


def explain_mismatch(record: KeyRecord, hashes: Sequence[BlockHash], salt: str, layout: KVLayout) -> str | None:
    """The reason why a key does not match a prompt with these block hashes in this layout, as a phrase that follows
    "the key"; None if it matches, or names no block."""
    if record.layout != layout.fingerprint():
        if record.model != layout.model_fingerprint:
            return "is of another model, or of another configuration of it"
        if record.block_size != layout.block_size:
            return f"is of blocks of {record.block_size} tokens, and this instance has blocks of {layout.block_size}"
        return "is of KV in another layout (dtype, ranks, layers)"
    if record.salt != salt_digest(salt):
        return "is of another LoRA adapter, or of other images"
    prompt_names = [block_hash[:NAME_BYTES] for block_hash in hashes[record.first : record.first + record.num_blocks]]
    record_names = record.block_names()
    num_same = num_equal(record_names, prompt_names)
    if num_same == min(len(record_names), len(prompt_names)) and (prompt_names or not record_names):
        return None
    same = f", whose first {(record.first + num_same) * record.block_size} tokens are the same" if num_same else ""
    return f"is of another prompt{same}"


def _split(names: bytes) -> list[bytes]:
    return [names[start : start + NAME_BYTES] for start in range(0, len(names), NAME_BYTES)]
