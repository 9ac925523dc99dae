"""Files in a store's folder, and archives, that are no blocks: pipes, and files that say that they are enormous."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.settings.files import TimedFile
from kvferry.store import upkeep

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
