"""Looking after a file store from the command line."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from kvferry.cli.main import main
from kvferry.store.key_records import KeyNotes, make_record
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
    assert run(capsys, "rm", root, "--all") == (
        0,
        "4 blocks removed, 1 left: they are pinned (--pinned removes them)\n",
    )
    assert found(root) == [False, False, True, False, False]
    assert run(capsys, "unpin", root, name) == (0, "1 blocks no longer pinned\n")
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
    assert [path.name for path in tmp_path.iterdir()] == ["kv", archive.name]
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


def unreadable(path: Path) -> Path:
    """A folder in place of a block's file, which not even root can read."""
    path.unlink()
    path.mkdir()
    return path


def block_file(root: Path, index: int) -> Path:
    [path] = root.rglob(f"{name_of(index).hex()}.kv")
    return path


def test_what_cannot_be_read_is_named_and_the_rest_is_looked_at(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = unreadable(block_file(root, 1))
    code, said = run(capsys, "verify", root)
    assert code == 1
    assert f"left {bad}: it cannot be read" in said
    assert "4 blocks" in said
    code, said = run(capsys, "export", root, tmp_path / "blocks.tar")
    assert (code, said) == (0, "4 blocks written, 1 left out: damaged or unreadable\n")
    assert run(capsys, "import", tmp_path / "other", tmp_path / "blocks.tar")[0] == 0
    assert found(tmp_path / "other") == [True, False, True, True, True]


def test_an_export_that_cannot_be_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "export", tmp_path / "absent", tmp_path / "out.tar")[0] == 2
    (tmp_path / "kv").mkdir()
    assert run(capsys, "export", tmp_path / "kv", tmp_path / "out.tar", "xyz")[0] == 2
    assert run(capsys, "export", tmp_path / "kv", tmp_path / "absent" / "out.tar")[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_a_mark_that_cannot_be_written_is_one_line(
    root: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = block_file(root, 1).with_suffix(".pin")
    mark.mkdir()
    code, said = run(capsys, command, root, name_of(1).hex())
    assert code == 1
    assert said.startswith(f"kvferry: error: cannot {command} {mark.with_suffix('.kv')}")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o700, 0o600), (0o770, 0o660)])
def test_import_and_pin_leave_files_to_whom_the_store_is_open(
    root: Path, tmp_path: Path, folder_mode: int, file_mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    archive, other = tmp_path / "blocks.tar", tmp_path / "other"
    run(capsys, "export", root, archive)
    other.mkdir()
    other.chmod(folder_mode)
    umask = os.umask(0o007)
    try:
        run(capsys, "import", other, archive)
        run(capsys, "pin", other)
    finally:
        os.umask(umask)
    found_modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in other.rglob("*")}
    assert found_modes == {(True, folder_mode), (False, file_mode)}


def test_it_needs_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; import kvferry.cli.cache.folder"
    subprocess.run([sys.executable, "-c", script], check=True)


# Keys.

TOKEN = "a token of the fleet's"


@pytest.fixture
def keyed(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store, with key `doc` of blocks 1 to 3 and key `long` of a thousand blocks that are not there."""
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", TOKEN)

    async def store_keys() -> None:
        store = find_store(f"file:{root}").make(LAYOUT)
        await store.open()
        notes = KeyNotes(TOKEN)
        for key, hashes in (
            ("doc", [name_of(at) for at in (1, 2, 3)]),
            ("long", [name_of(at + 9) for at in range(1000)]),
        ):
            record, pages = make_record(LAYOUT, "", hashes, 0, 4000, time.time(), 3600.0)
            for page, names in enumerate(pages, 1):
                name = notes.name("tenant", key, 0, page)
                await store.write_note(name, notes.seal_page(name, record, names), 3600.0)
            name = notes.name("tenant", key, 0)
            await store.write_note(name, notes.seal(name, record), 3600.0)
        await store.close()

    asyncio.run(store_keys())
    return root


def test_the_blocks_of_a_key(keyed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_key = ("--key", "doc", "--cache-salt", "tenant")
    code, said = run(capsys, "ls", keyed, *of_key, "--json")
    assert code == 0
    assert {row["block"] for row in json.loads(said)} == {name_of(index).hex() for index in (1, 2, 3)}
    code, said = run(capsys, "ls", keyed, *of_key)
    assert "key 'doc': 3 blocks of a prefix of 4000 tokens; expires in" in said
    assert run(capsys, "pin", keyed, *of_key) == (0, "3 blocks pinned\n")
    assert "3650 d" in run(capsys, "ls", keyed, *of_key)[1]
    left = "0 blocks removed, 3 left: they are pinned (--pinned removes them)\n"
    assert run(capsys, "rm", keyed, *of_key) == (0, left)
    assert run(capsys, "rm", keyed, *of_key, "--pinned") == (0, "3 blocks removed\n")


def test_a_key_is_removed_with_its_blocks(keyed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_key = ("--key", "doc", "--cache-salt", "tenant")
    assert run(capsys, "pin", keyed, *of_key)[0] == 0
    assert run(capsys, "unpin", keyed, *of_key) == (0, "3 blocks no longer pinned\n")
    assert "expires in 7 d" in run(capsys, "ls", keyed, *of_key)[1]
    assert run(capsys, "rm", keyed, *of_key) == (0, "3 blocks removed\n")
    assert found(keyed) == [True, False, False, False, True]
    code, said = run(capsys, "ls", keyed, *of_key)
    assert code == 2
    assert "there is no key 'doc'" in said
    of_long = ("--key", "long", "--cache-salt", "tenant")
    assert "1000 blocks" in run(capsys, "ls", keyed, *of_long)[1]
    assert run(capsys, "pin", keyed, *of_long)[0] == 0
    assert run(capsys, "rm", keyed, *of_long) == (0, "0 blocks removed\n")
    assert list((keyed / "notes").iterdir()) == []


def test_a_key_needs_its_tenant_and_token(
    keyed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in (("--key", "doc"), ("--key", "other", "--cache-salt", "tenant"), ("--key", "../doc")):
        code, said = run(capsys, "rm", keyed, *wrong)
        assert (code, "there is no key" in said) == (2, True)
    assert run(capsys, "ls", keyed, name_of(1).hex(), "--key", "doc")[0] == 2
    assert run(capsys, "rm", keyed, "--all", "--key", "doc")[0] == 2
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", "another token, as long")
    assert run(capsys, "rm", keyed, "--key", "doc", "--cache-salt", "tenant")[0] == 2
    assert found(keyed) == [True] * NUM_BLOCKS
