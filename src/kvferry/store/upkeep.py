"""The operations of `kvferry cache` on the directory of a file store: list, verify, pin, remove, export, import.

Needs no model: the path of a record determines what it must contain: `<layout fingerprint>[.<codec>]/<first
byte>/<block hash>.kv`. Every function may run while instances use the store.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from kvferry.core.errors import ConfigError, StoreError
from kvferry.store.access import access_of
from kvferry.store.codecs.base import NAME
from kvferry.store.disk import DISK, TEMPORARY_SUFFIX
from kvferry.store.media.file_notes import note_files
from kvferry.store.media.file_room import PIN_SUFFIX, SUFFIX, block_files, folder_name
from kvferry.store.record import CorruptBlock, Label, read_label, verify_record

MAX_RECORD_BYTES = 2**32
"""Maximum bytes of a block's file."""
_LABEL_BYTES = 2**21
"""More bytes than any header has."""


@dataclass(frozen=True)
class Entry:
    """One block of the store. `used_s`: Unix time of its last use."""

    path: Path
    fingerprint: str
    """The fingerprint of the layout, followed by a dot and the name of the codec if there is one."""
    num_bytes: int
    used_s: float
    is_pinned: bool

    @property
    def name(self) -> str:
        """The block hash, in hexadecimal."""
        return self.path.stem


@dataclass
class Totals:
    """Sums over blocks. `last_used_s`: Unix time."""

    num_blocks: int = 0
    num_bytes: int = 0
    num_pinned: int = 0
    last_used_s: float = 0.0
    codecs: set[str] = field(default_factory=set)

    def add(self, entry: Entry) -> None:
        """Count one block."""
        self.num_blocks += 1
        self.num_bytes += entry.num_bytes
        self.num_pinned += entry.is_pinned
        self.last_used_s = max(self.last_used_s, entry.used_s)


@dataclass
class Verified:
    """The result of `verify`. `num_blocks`, `num_bytes`: of the blocks that verified; `removed`: damaged files that
    were removed, and why; `left`: files that could not be read or not be removed, and why; `num_orphans`: temporary
    files and pins that crashes left and that were removed."""

    num_blocks: int = 0
    num_bytes: int = 0
    removed: dict[Path, str] = field(default_factory=dict)
    left: dict[Path, str] = field(default_factory=dict)
    num_orphans: int = 0


def require_root(root: Path) -> Path:
    """The directory `root`. Raises `ConfigError` if there is none."""
    if not root.is_dir():
        raise ConfigError(f"there is no store at {root}: it is not a directory")
    return root


def entries(root: Path, prefix: str = "") -> Iterator[Entry]:
    """Every block whose hexadecimal hash begins with `prefix`, layout by layout."""
    for path in sorted(block_files(root, f"{prefix}*{SUFFIX}")):
        with suppress(OSError):  # removed meanwhile
            status = path.stat()
            pinned = path.with_suffix(PIN_SUFFIX).exists()
            yield Entry(path, path.parts[-3], status.st_size, status.st_mtime, pinned)


def totals(root: Path) -> dict[str, Totals]:
    """The sums of all blocks of each model, by `Entry.fingerprint`."""
    totals_by_fingerprint: dict[str, Totals] = {}
    for entry in entries(root):
        model_totals = totals_by_fingerprint.setdefault(entry.fingerprint, Totals())
        model_totals.add(entry)
        if not model_totals.codecs:
            with suppress(CorruptBlock, OSError):
                model_totals.codecs.add(label_of(entry).codec)
    return totals_by_fingerprint


def label_of(entry: Entry) -> Label:
    """The verified header of a block. Raises `CorruptBlock`, `OSError`."""
    with DISK.open(str(entry.path)) as descriptor:
        return read_label(DISK.head(descriptor, _LABEL_BYTES))


def verify(root: Path) -> Verified:
    """Read every block; remove the damaged ones, and the files that crashes left."""
    result = Verified()
    for entry in entries(root):
        try:
            _read_verified(entry)
        except FileNotFoundError:
            continue
        except CorruptBlock as error:
            if DISK.remove(str(entry.path)):
                DISK.remove(str(entry.path.with_suffix(PIN_SUFFIX)))
                result.removed[entry.path] = str(error)
            else:
                result.left[entry.path] = f"it is damaged ({error}) and cannot be removed"
        except OSError as error:
            result.left[entry.path] = f"it cannot be read: {error.strerror}"
        else:
            result.num_blocks += 1
            result.num_bytes += entry.num_bytes
    result.num_orphans = _sweep(root)
    return result


def _read_verified(entry: Entry) -> bytearray:
    """The content of a block's file. Raises `CorruptBlock`, `OSError`."""
    with DISK.open(str(entry.path)) as descriptor:
        num_bytes = DISK.num_bytes(descriptor)
        if num_bytes > MAX_RECORD_BYTES or num_bytes != read_label(DISK.head(descriptor, _LABEL_BYTES)).record_bytes:
            raise CorruptBlock("its length is not what it says")
        content = bytearray(num_bytes)
        DISK.read(descriptor, [memoryview(content)], 0)
    label = verify_record(memoryview(content))
    if folder_name(label.fingerprint, label.codec) != entry.fingerprint or label.block_hash.hex() != entry.name:
        raise CorruptBlock("it is another block, or of another layout, than its path says")
    return content


def _sweep(root: Path) -> int:
    count = 0
    for path in [*block_files(root, f"*{TEMPORARY_SUFFIX}"), *note_files(root / "notes", f"*{TEMPORARY_SUFFIX}")]:
        with suppress(OSError):
            count += DISK.is_stale(path, path.stat().st_mtime) and DISK.remove(str(path))
    for path in list(block_files(root, f"*{PIN_SUFFIX}")):
        count += not path.with_suffix(SUFFIX).exists() and DISK.remove(str(path))
    return count


def set_pinned(root: Path, prefix: str, pinned: bool) -> int:
    """Pin or unpin the blocks whose hash begins with `prefix`. Returns their number. Raises `StoreError`."""
    count = 0
    for entry in entries(root, prefix):
        pin_entry(entry, pinned, count)
        count += 1
    return count


def pin_entry(entry: Entry, pinned: bool, count: int) -> None:
    """Pin or unpin a block, after `count` other blocks. Raises `StoreError`."""
    mark = entry.path.with_suffix(PIN_SUFFIX)
    try:
        if pinned:
            DISK.write(str(mark), [], access_of(entry.path.parent))
        else:
            mark.unlink(missing_ok=True)
    except OSError as error:
        action = "pin" if pinned else "unpin"
        raise StoreError(f"cannot {action} {entry.path}, after {count} blocks: {error.strerror}") from error


def remove(root: Path, prefix: str, *, pinned_too: bool = False) -> int:
    """Remove the blocks whose hash begins with `prefix`, pinned ones only with `pinned_too`. Returns the number that
    were removed."""
    count = 0
    for entry in entries(root, prefix):
        if pinned_too or not entry.is_pinned:
            count += DISK.remove(str(entry.path))
            DISK.remove(str(entry.path.with_suffix(PIN_SUFFIX)))
    return count


def export(root: Path, file: IO[bytes], prefix: str = "") -> tuple[int, int]:
    """Write blocks to a tar archive. Returns how many were written, and how many were left out because they are damaged
    or cannot be read."""
    written = left_out = 0
    with tarfile.open(fileobj=file, mode="w|") as archive:
        for entry in entries(root, prefix):
            try:
                content = _read_verified(entry)
            except FileNotFoundError:  # removed meanwhile
                continue
            except (CorruptBlock, OSError):
                left_out += 1
                continue
            member = tarfile.TarInfo("/".join(entry.path.parts[-3:]))
            member.size, member.mtime = len(content), int(entry.used_s)
            archive.addfile(member, io.BytesIO(content))
            written += 1
    return written, left_out


def import_(root: Path, file: IO[bytes]) -> tuple[int, int]:
    """Store the blocks of an archive that `export` wrote. Returns how many were stored, and how many were refused. The
    files get the access of the layout's directory, or of the root's.

    The archive is not trusted: only blocks that verify are written, each to the path that its own header determines.
    Raises `ConfigError` if it is not an archive.
    """
    stored = refused = 0
    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                # `export` writes no sparse files: their size can exceed the bytes that the archive has.
                is_block = member.isreg() and not member.issparse() and member.size <= MAX_RECORD_BYTES
                content = archive.extractfile(member) if is_block else None
                path = _path_for(root, content.read()) if content is not None else None
                if path is None:
                    refused += 1
                    continue
                DISK.write(str(path[0]), [memoryview(path[1])], access_of(path[0].parents[1], root))
                stored += 1
    except tarfile.TarError as error:
        raise ConfigError(f"this is no archive of blocks: {error}") from error
    return stored, refused


def _path_for(root: Path, content: bytes) -> tuple[Path, bytes] | None:
    try:
        label = verify_record(memoryview(content))
    except CorruptBlock:
        return None
    if len(label.fingerprint) != 32 or not all(letter in "0123456789abcdef" for letter in label.fingerprint):
        return None
    if not NAME.fullmatch(label.codec):
        return None
    name = label.block_hash.hex()
    return root / folder_name(label.fingerprint, label.codec) / name[:2] / f"{name}{SUFFIX}", content
