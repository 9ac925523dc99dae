"""`kvferry cache ls`, `stat`, `verify`, `pin`, `unpin`, `rm`, `export`, `import`: manage the directory of a file store.

All of them work on a directory, also while instances use it, and need neither a model nor torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Annotated, cast

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from kvferry.connectors.kv_store.settings import StoreSettings
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.core.keys import shared_token
from kvferry.core.settings.files import TimedFile
from kvferry.core.settings.units import format_bytes
from kvferry.store import upkeep
from kvferry.store.media.file_room import path_of
from kvferry.store.table import BUILTIN
from kvferry.store.upkeep_keys import PIN_TTL_S, KeyEntry, KeyFolder

Folder = Annotated[
    Path, Parameter(help="The store: its directory, or file:/directory.", converter=lambda _, t: _path(t[0].value))
]
Prefix = Annotated[
    str,
    Parameter(help="Beginning of block hashes, in hexadecimal; all blocks if none is given.", show_default=False),
]
Key = Annotated[
    str | None,
    Parameter(
        help="The blocks of this key (kvcache_store_keys of a request) instead. KVFERRY_AUTH_TOKEN must be the"
        " instances' token.",
        show_default=False,
    ),
]
CacheSalt = Annotated[
    str, Parameter(help="With --key: the cache_salt of the requests that stored it.", show_default=False)
]
Json = Annotated[bool, Parameter(help="Print JSON instead of a table.", negative=())]


def list_blocks(
    store: Folder, prefix: Prefix = "", *, key: Key = None, cache_salt: CacheSalt = "", json: Json = False
) -> None:
    """List the blocks, layout by layout."""
    root, prefix = upkeep.require_root(store), _checked(prefix)
    if key is None:
        _list(upkeep.entries(root, prefix), json=json)
        return
    folder, entries = _find_key(root, prefix, key, cache_salt)
    blocks, record = list(folder.blocks(entries)), entries.record
    if not json:
        expires = max(0.0, record.expires_s - SYSTEM_CLOCK.wall())
        print(  # noqa: T201 - the answer
            f"key {key!r}: {record.num_blocks} blocks of a prefix of {record.num_tokens} tokens; expires in"
            f" {_duration(expires)}"
        )
    _list(blocks, json=json)


def _find_key(root: Path, prefix: str, key: str, cache_salt: str) -> tuple[KeyFolder, KeyEntry]:
    if prefix:
        raise ConfigError("kvferry cache: give the beginning of block hashes or --key, not both")
    folder = KeyFolder(root, shared_token(), cache_salt)
    return folder, folder.find(key)


def _list(entries: Iterable[upkeep.Entry], *, json: bool) -> None:
    rows = [(entry.fingerprint, entry.name, entry.num_bytes, entry.used_s, entry.is_pinned) for entry in entries]
    if json:
        keys = ("layout", "block", "bytes", "used_s", "pinned")
        _print_json([dict(zip(keys, row, strict=True)) for row in rows])
        return
    table = _table("layout", "block", "size", "last used", "pinned")
    for layout, name, num_bytes, used_s, pinned in rows:
        table.add_row(layout[:8], name, format_bytes(num_bytes), _ago(used_s), "pinned" if pinned else "")
    _console().print(table)


def stat(store: Folder, *, json: Json = False) -> None:
    """Show the number and size of the blocks of each layout (a model, its dtype, block size and ranks)."""
    totals = upkeep.totals(upkeep.require_root(store))
    if json:
        _print_json(totals)
        return
    table = _table("layout", "codec", "blocks", "size", "pinned", "last used")
    for layout, total in totals.items():
        size, used = format_bytes(total.num_bytes), _ago(total.last_used_s)
        table.add_row(layout, ", ".join(total.codecs), str(total.num_blocks), size, str(total.num_pinned), used)
    _console().print(table)


def verify(store: Folder) -> int:
    """Read every block; remove damaged ones and files that crashes left behind. Exit code 1 if any block was damaged or
    unreadable."""
    result = upkeep.verify(upkeep.require_root(store))
    for path, reason in result.removed.items():
        print(f"removed {path}: {reason}")  # noqa: T201 - the answer
    for path, reason in result.left.items():
        print(f"left {path}: {reason}")  # noqa: T201
    print(  # noqa: T201
        f"{result.num_blocks} blocks ({format_bytes(result.num_bytes)}) are right; {len(result.removed)} damaged ones"
        f" and {result.num_orphans} leftovers of crashes were removed"
        + (f"; {len(result.left)} could not be read or removed" if result.left else "")
    )
    return 1 if result.removed or result.left else 0


def pin(store: Folder, prefix: Prefix = "", *, key: Key = None, cache_salt: CacheSalt = "") -> None:
    """Protect blocks from eviction. A pinned key does not expire."""
    _print_count(_set_pinned(store, prefix, key, cache_salt, True), "pinned")


def unpin(store: Folder, prefix: Prefix = "", *, key: Key = None, cache_salt: CacheSalt = "") -> None:
    """Let blocks be evicted again. A key then expires a week later."""
    _print_count(_set_pinned(store, prefix, key, cache_salt, False), "no longer pinned")


def _set_pinned(store: Path, prefix: str, key: str | None, cache_salt: str, pinned: bool) -> int:
    root, prefix = upkeep.require_root(store), _checked(prefix)
    if key is None:
        return upkeep.set_pinned(root, prefix, pinned)
    folder, entries = _find_key(root, prefix, key, cache_salt)
    return folder.set_pinned(key, entries, pinned, PIN_TTL_S if pinned else StoreSettings().key_ttl_s)


def remove(
    store: Folder,
    prefix: Prefix = "",
    *,
    all_blocks: Annotated[
        bool, Parameter(name="--all", help="Remove all blocks, if no prefix is given.", negative=())
    ] = False,
    key: Key = None,
    cache_salt: CacheSalt = "",
    pinned: Annotated[bool, Parameter(help="Pinned ones too.", negative=())] = False,
) -> None:
    """Remove blocks of a directory, which are named by the beginning of their hash or by a key, and print their number.
    The blocks are lost for other keys, and for prompts with the same beginning, too."""
    if not prefix and not all_blocks and key is None:
        raise ConfigError("kvferry cache rm: name the blocks by the beginning of their hash or --key, or use --all")
    if all_blocks and key is not None:
        raise ConfigError("kvferry cache rm: give --all or --key, not both")
    root, prefix = upkeep.require_root(store), _checked(prefix)
    if key is not None:
        folder, entries = _find_key(root, prefix, key, cache_salt)
        count, left = folder.remove(key, entries, pinned_too=pinned)
        _print_count(count, "removed" + (f", {left} left: they are pinned (--pinned removes them)" if left else ""))
        return
    removed = upkeep.remove(root, prefix, pinned_too=pinned)
    num_pinned = 0 if pinned else sum(entry.is_pinned for entry in upkeep.entries(root, prefix))
    _print_count(
        removed, "removed" + (f", {num_pinned} left: they are pinned (--pinned removes them)" if num_pinned else "")
    )


def export(store: Folder, archive: Annotated[Path, Parameter(help="A tar file.")], prefix: Prefix = "") -> None:
    """Write blocks to an archive. Damaged blocks are left out."""
    root, prefix = upkeep.require_root(store), _checked(prefix)
    if archive.exists():
        raise ConfigError(f"{archive} already exists; choose another name")
    temporary = archive.with_name(f".{archive.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as file:
            written, left_out = upkeep.export(root, file, prefix)
        temporary.rename(archive)
    except OSError as error:
        raise ConfigError(f"cannot write {archive}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    _print_count(written, "written" + (f", {left_out} left out: damaged or unreadable" if left_out else ""))


def import_(store: Folder, archive: Annotated[Path, Parameter(help="What export wrote.")]) -> None:
    """Read blocks from an archive. Blocks that do not verify are refused."""
    try:
        with TimedFile(archive) as file:
            num_imported, num_refused = upkeep.import_(store, cast(IO[bytes], file))
    except OSError as error:
        raise ConfigError(f"cannot read {archive} into {store}: {error.strerror}") from error
    print(f"{num_imported} blocks taken, {num_refused} refused")  # noqa: T201


def add_to(cache: App) -> None:
    """Add these commands to `kvferry cache`."""
    cache.command(list_blocks, name="ls")
    cache.command(remove, name="rm")
    cache.command(import_, name="import")
    for function in (stat, verify, pin, unpin, export):
        cache.command(function)


def _path(text: str) -> Path:
    scheme, colon, rest = text.partition(":")
    if colon and scheme in BUILTIN and scheme != "file":
        raise ConfigError(f"kvferry cache manages file stores, and {scheme}: is another kind of store")
    return path_of(rest.partition("?")[0]) if scheme == "file" and colon else Path(text).expanduser()


def _checked(prefix: str) -> str:
    if not all(letter in "0123456789abcdef" for letter in prefix) or len(prefix) > 64:
        raise ConfigError(f"{prefix!r} is not the beginning of a block hash, which is hexadecimal")
    return prefix


def _print_count(count: int, noun: str) -> None:
    print(f"{count} blocks {noun}")  # noqa: T201


def _print_json(document: object) -> None:
    print(msgspec.json.encode(document).decode())  # noqa: T201


def _table(*columns: str) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _console() -> Console:
    return Console(file=sys.stdout)


def _ago(then_s: float) -> str:
    seconds = max(0.0, SYSTEM_CLOCK.wall() - then_s)
    return f"{_duration(seconds)} ago" if seconds >= 60.0 else "now"


def _duration(seconds: float) -> str:
    for unit, length_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
