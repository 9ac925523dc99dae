"""Files in a store's folder, and archives, that are no blocks: pipes, and files that say that they are enormous."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from trouble import run

from kvferry.core.errors import ConfigError
from kvferry.core.settings.files import TimedFile
from kvferry.store import upkeep
from kvferry.store.base import PutResult
from kvferry.store.table import find_stores
from kvferry.store.tiered.tiers import TieredStore
from kvferry.store.upkeep import export, import_, verify
from kvferry.testing.stores import LAYOUT, block_of, fetch, name_of

NAME = "ab" * 32


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    folder = tmp_path / ("0" * 32 + ".none") / NAME[:2]
    folder.mkdir(parents=True)
    return folder / f"{NAME}.kv"


@pytest.mark.parametrize("what", ["pipe", "sparse"])
def test_what_is_no_block_is_passed_over(what: str, planted: Path, tmp_path: Path) -> None:
    if what == "pipe":
        os.mkfifo(planted)
    else:
        planted.write_bytes(b"x")
        os.truncate(planted, 4 * 2**30 - 1)
    assert [one.path for one in upkeep.entries(tmp_path)] == [planted]
    upkeep.totals(tmp_path)
    assert upkeep.export(tmp_path, io.BytesIO()) == (0, 1)
    found = upkeep.verify(tmp_path)
    assert len(found.left if what == "pipe" else found.removed) == 1


def test_a_sparse_member_of_an_archive_is_refused(tmp_path: Path) -> None:
    """Ten kilobytes could ask for gigabytes of zeros."""
    member = tarfile.TarInfo("block.kv")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as file:
        member.type, member.size = tarfile.GNUTYPE_SPARSE, 0
        file.addfile(member)
    content = bytearray(archive.getvalue())
    content[483:495] = b"%011o\0" % (2**30 - 1)  # the real size, in the header's own field
    content[148:156] = b"%06o\0 " % (sum(content[:148]) + 256 + sum(content[156:512]))
    with tarfile.open(fileobj=io.BytesIO(content)) as file:
        assert [one.size for one in file] == [2**30 - 1]
    assert upkeep.import_(tmp_path, io.BytesIO(content)) == (0, 1)


def test_a_pipe_that_nobody_writes_to_is_no_archive(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with TimedFile(tmp_path / "pipe", wait_s=0.05) as file, pytest.raises(ConfigError, match="nothing was written"):
        upkeep.import_(tmp_path, file)  # type: ignore[arg-type]


def test_a_pipe_is_read_as_a_file_is(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"abcdef")
    os.close(writer)
    try:
        with TimedFile(Path(f"/dev/fd/{reader}")) as file:
            assert (file.read(4), file.read(4), file.read(4)) == (b"abcd", b"ef", b"")
    finally:
        os.close(reader)


pytestmark = pytest.mark.short_deadlines


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "zeroed range": lambda content: content[:400] + bytes(len(content) - 400),
    "grown": lambda content: content + b"more",
    "garbage": lambda content: os.urandom(len(content)),
    "a bit of the payload": lambda content: content[:-9] + bytes([content[-9] ^ 16]) + content[-8:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_verify_finds_and_removes_what_is_damaged(tmp_path: Path, damage: str) -> None:
    async def use(store: TieredStore) -> None:
        await store.put([block_of(index) for index in range(6)])

    run([f"file:{tmp_path}"], use)
    [path] = tmp_path.rglob(f"{name_of(3).hex()}.kv")
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    (path.parent / f"x.kv.elsewhere.{os.getpid()}.0.tmp").write_bytes(b"half")
    os.utime(path.parent / f"x.kv.elsewhere.{os.getpid()}.0.tmp", (1, 1))
    found = verify(tmp_path)
    assert list(found.removed) == [path]
    assert (found.num_blocks, found.num_orphans) == (5, 1)
    assert verify(tmp_path).removed == {}


def test_a_block_written_with_another_codec_is_a_miss_and_stays(tmp_path: Path) -> None:
    async def put_and_look() -> None:
        plain, coded = (find_stores(f"file:{tmp_path}{query}")[0].make(LAYOUT) for query in ("", "?codec=lossless"))
        for store, other in ((plain, coded), (coded, plain)):
            await store.open()
            assert await store.put([block_of(0)]) == [PutResult.STORED]
            assert await fetch(other, [1]) == [False]
        assert await fetch(plain, [0]) == await fetch(coded, [0]) == [True]
        await plain.close()
        await coded.close()

    asyncio.run(put_and_look())
    found = verify(tmp_path)
    assert (found.num_blocks, found.removed) == (2, {})
    with (tmp_path / "kv.tar").open("wb") as archive:
        assert export(tmp_path, archive) == (2, 0)
    with (tmp_path / "kv.tar").open("rb") as archive:
        assert import_(tmp_path / "other", archive) == (2, 0)
    assert verify(tmp_path / "other").num_blocks == 2
