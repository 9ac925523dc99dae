"""The operations of `kvferry cache … --key` on the directory of a file store: for the blocks that a client's key names.

Every function may run while instances use the store. Keys are found with the token of the instances that stored them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.store.access import access_of
from kvferry.store.disk import DISK
from kvferry.store.key_records import NAME_BYTES, BadKeyRecord, KeyNotes, KeyRecord
from kvferry.store.media.file_notes import NoteFiles
from kvferry.store.media.file_room import PIN_SUFFIX
from kvferry.store.upkeep import Entry, entries, pin_entry

PIN_TTL_S = 10 * 365 * 24 * 3600.0
"""Seconds after which a pinned key expires."""


@dataclass(frozen=True)
class KeyEntry:
    """A key in a store. `record`: the key's record of the first rank; `names`: the beginnings of the hashes of all
    blocks of this record."""

    record: KeyRecord
    names: frozenset[bytes]


class KeyFolder:
    """The keys of one tenant (`cache_salt`) in a store's directory. `token`: KVFERRY_AUTH_TOKEN of the instances."""

    def __init__(self, root: Path, token: str, tenant: str) -> None:
        self._root, self._tenant, self._notes = root, tenant, KeyNotes(token)
        self._files = NoteFiles(root / "notes", access_of(root / "notes", root))

    def find(self, key: str) -> KeyEntry:
        """Find a key. Raises `ConfigError` if there is none, or it cannot be read."""
        record = self._record(key, 0)
        if record is None:
            raise ConfigError(
                f"there is no key {key!r} in {self._root}: it was never stored, has expired, or was stored with another"
                " cache_salt or another KVFERRY_AUTH_TOKEN"
            )
        names = record.block_names()
        for page in range(1, record.num_pages + 1):
            name = self._notes.name(self._tenant, key, 0, page)
            note = self._files.read(name)
            names += self._notes.open_page(name, note, record) if note is not None else []
        return KeyEntry(record, frozenset(names))

    def blocks(self, key_entry: KeyEntry) -> Iterator[Entry]:
        """The stored blocks of the key, of all ranks and of all codecs."""
        digits = 2 * NAME_BYTES
        hashes = {name.hex() for name in key_entry.names}
        return (entry for entry in entries(self._root) if entry.name[:digits] in hashes)

    def set_pinned(self, key: str, key_entry: KeyEntry, pinned: bool, ttl_s: float) -> int:
        """Pin or unpin the key's blocks, and let the key itself expire after `ttl_s`. Returns the number of blocks.
        Raises `StoreError`."""
        count = 0
        for entry in self.blocks(key_entry):
            pin_entry(entry, pinned, count)
            count += 1
        now_s = SYSTEM_CLOCK.wall()
        for rank in range(key_entry.record.tp_size):
            record = self._record(key, rank)
            if record is not None:
                self._renew(key, rank, record, now_s + ttl_s)
        return count

    def remove(self, key: str, key_entry: KeyEntry, *, pinned_too: bool) -> tuple[int, int]:
        """Remove the key's blocks, pinned ones only with `pinned_too`, and the key itself unless some blocks are left.
        Returns how many blocks were removed, and how many are left."""
        removed = left = 0
        for entry in self.blocks(key_entry):
            if entry.is_pinned and not pinned_too:
                left += 1
                continue
            removed += DISK.remove(str(entry.path))
            DISK.remove(str(entry.path.with_suffix(PIN_SUFFIX)))
        for rank in range(0 if left else key_entry.record.tp_size):
            for page in range(key_entry.record.num_pages + 1):
                self._files.remove(self._notes.name(self._tenant, key, rank, page))
        return removed, left

    def _record(self, key: str, rank: int) -> KeyRecord | None:
        name = self._notes.name(self._tenant, key, rank)
        note = self._files.read(name)
        try:
            return None if note is None else self._notes.open(name, note, SYSTEM_CLOCK.wall())
        except BadKeyRecord as error:
            raise ConfigError(f"key {key!r} in {self._root} cannot be read: {error}") from error

    def _renew(self, key: str, rank: int, record: KeyRecord, expires_s: float) -> None:
        """Write a rank's record and its pages again, with another expiry."""
        ttl_s = expires_s - SYSTEM_CLOCK.wall()
        for page in range(1, record.num_pages + 1):
            name = self._notes.name(self._tenant, key, rank, page)
            if (note := self._files.read(name)) is not None:
                self._files.write(name, note, ttl_s)
        renewed = record.with_expiry(expires_s)
        name = self._notes.name(self._tenant, key, rank)
        self._files.write(name, self._notes.seal(name, renewed), ttl_s)
