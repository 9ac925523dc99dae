"""Looking after a file store from the command line."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from kvferry.cli.main import main
from kvferry.store.table import find_store
from kvferry.testing.stores import LAYOUT, block_of, fetch, name_of

NUM_BLOCKS = 5


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with blocks 0 to 4."""
    root = tmp_path / "kv"

    async def fill() -> None:
        store = find_store(f"file:{root}").make(LAYOUT)
        await store.open()
        await store.put([block_of(index) for index in range(NUM_BLOCKS)])
        await store.close()

    asyncio.run(fill())
    return root


def found(root: Path) -> list[bool]:
    async def look() -> list[bool]:
        store = find_store(f"file:{root}").make(LAYOUT)
        await store.open()
        there = await fetch(store, range(NUM_BLOCKS))
        await store.close()
        return there

    return asyncio.run(look())


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["cache", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_what_is_there(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, "ls", f"file:{root}?max_bytes=1GB", "--json")
    assert code == 0
    assert {row["block"] for row in json.loads(said)} == {name_of(index).hex() for index in range(NUM_BLOCKS)}
    code, said = run(capsys, "stat", root)
    assert code == 0
    assert " 5 " in said
    assert "none" in said


def test_pins(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = name_of(2).hex()
    assert run(capsys, "pin", root, name[:12]) == (0, "1 blocks pinned\n")
    assert run(capsys, "rm", root, "--all") == (0, "4 blocks removed\n")
    assert found(root) == [False, False, True, False, False]
    assert run(capsys, "unpin", root, name) == (0, "1 blocks not pinned any more\n")
    assert run(capsys, "rm", root, name) == (0, "1 blocks removed\n")


def test_verify(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "verify", root)[0] == 0
    [path] = root.rglob(f"{name_of(1).hex()}.kv")
    path.write_bytes(path.read_bytes()[:-1])
    code, said = run(capsys, "verify", root)
    assert code == 1
    assert f"removed {path}" in said
    assert found(root) == [True, False, True, True, True]


def test_export_and_import(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive, other = tmp_path / "blocks.tar", tmp_path / "other"
    assert run(capsys, "export", root, archive) == (0, "5 blocks written\n")
    assert run(capsys, "export", root, archive)[0] == 2, "nothing is overwritten"
    assert run(capsys, "import", other, archive) == (0, "5 blocks taken, 0 refused\n")
    assert found(other) == [True] * NUM_BLOCKS


def test_a_stranger_s_archive_writes_nothing_that_is_no_block(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [path] = root.rglob(f"{name_of(0).hex()}.kv")
    record = path.read_bytes()
    members = {"../../evil": b"x", "/etc/evil": b"", "a/b/c.kv": record[:-1], "any/name/at-all": record}
    archive, other = tmp_path / "forged.tar", tmp_path / "other"
    with tarfile.open(archive, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("link.kv")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert run(capsys, "import", other, archive) == (0, "1 blocks taken, 4 refused\n")
    assert [file.name for file in other.rglob("*") if file.is_file()] == [path.name]
    archive.write_bytes(b"no archive")
    assert run(capsys, "import", other, archive)[0] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls", "/no/such/store"], "there is no store at /no/such/store"),
        (["ls", "valkey://host"], "file stores"),
        (["ls", "lmcache://host:1"], "file stores"),
        (["ls", "file:/no%20such/store"], "there is no store at /no such/store"),
        (["ls", "file:/a%00b"], "give a directory"),
        (["rm", "{root}"], "--all"),
        (["pin", "{root}", "xyz"], "hexadecimal"),
    ],
)
def test_what_is_wrong_is_one_line(
    root: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(capsys, *(argument.replace("{root}", str(root)) for argument in arguments))
    assert code == 2
    assert said in text
    assert len(text.strip().splitlines()) == 1


def test_it_needs_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; import kvferry.cli.cache_folder"
    subprocess.run([sys.executable, "-c", script], check=True)
