"""Markers: small files that say a hand-off's blocks are in the store.

    root/transfers/<SHA-256 of the transfer id>.<rank>.mark      msgpack of a `Marker`; complete, or not there

Each rank of the producer writes one when all blocks of a prompt are there; the consumer waits for all of them, and
removes them once used. Those that nobody came for are swept by age.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from kvferry.core.errors import StoreError
from kvferry.core.hand_off import PrefillResult
from kvferry.core.layout import KVLayout
from kvferry.store.access import OWNER, Access

MAX_MARKER_BYTES = 2**20
SWEEP_AGE_S = 3600.0
_SUFFIX = ".mark"


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What the producer leaves for the consumer. No `prefill_result`: the prefill was given up."""

    transfer_id: str
    layout: KVLayout
    num_tokens: int
    prefill_result: PrefillResult | None = None


class MarkerFolder:
    """The markers of one store. Any thread; every call may block on the disk, and raises `StoreError` when it fails."""

    def __init__(self, root: Path, access: Access = OWNER) -> None:
        self._folder, self._access = root / "transfers", access

    def write(self, marker: Marker) -> None:
        """Leave a marker, instead of one that may be there."""
        path = self._path(marker.transfer_id, marker.layout.tp_rank)
        temporary = path.with_suffix(f".{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            self._access.make_folder(self._folder)
            try:
                self._write(temporary, msgspec.msgpack.encode(marker))
                temporary.rename(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise StoreError(f"cannot announce a hand-off in {self._folder}: {error.strerror}") from error

    def _write(self, path: Path, content: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, self._access.file_mode), "wb") as file:
            file.write(content)

    def read(self, transfer_id: str, rank: int) -> Marker | None:
        """A rank's marker, or None when there is none yet."""
        path = self._path(transfer_id, rank)
        try:
            with path.open("rb") as file:
                content = file.read(MAX_MARKER_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
        try:
            marker = msgspec.msgpack.decode(content, type=Marker)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StoreError(f"{path} is no marker of a hand-off: {error}") from error
        if marker.transfer_id != transfer_id:
            raise StoreError(f"{path} is the marker of another hand-off")
        return marker

    def remove(self, transfer_id: str, rank: int) -> None:
        """Remove a rank's marker, if it is there."""
        with suppress(OSError):  # what cannot be removed now is swept later
            self._path(transfer_id, rank).unlink(missing_ok=True)

    def sweep(self, age_s: float = SWEEP_AGE_S) -> None:
        """Remove what is older than `age_s`."""
        oldest = time.time() - age_s
        with suppress(OSError):
            for path in self._folder.iterdir():
                with suppress(OSError):  # another process swept it first
                    if path.stat().st_mtime < oldest:
                        path.unlink()

    def _path(self, transfer_id: str, rank: int) -> Path:
        # The id is the client's: hashed, it cannot name anything outside of this folder.
        return self._folder / f"{hashlib.sha256(transfer_id.encode()).hexdigest()}.{rank}{_SUFFIX}"
