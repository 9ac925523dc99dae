"""What a member is known by, and how what it writes is read."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from kvferry.fleet.backends.local.folder import FileTail, MemberFolder, MemberRecord
from kvferry.fleet.processes.start_time import started_at

ABOUT = MemberRecord(name="decode-0", role="decode", revision="r", unit="", number=3, cores=(1, 2), url="http://a:1")


@pytest.fixture
def folder(tmp_path: Path) -> MemberFolder:
    made = MemberFolder(tmp_path / "members" / "decode-0")
    made.make(ABOUT)
    return made


def test_what_is_written_is_what_is_read(folder: MemberFolder) -> None:
    assert MemberFolder(folder.path).record() == ABOUT
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.log.read_bytes() == folder.messages.read_bytes() == b""
    folder.remove()
    assert not folder.path.exists()
    folder.remove()


def test_a_folder_is_made_anew(folder: MemberFolder) -> None:
    folder.log.write_text("old")
    folder.process.write_text("1 2")
    folder.make(ABOUT)
    assert folder.log.read_text() == ""
    assert not folder.process.exists()


@pytest.mark.parametrize("text", [None, "", "{", '{"name": 3}', "[]"])
def test_what_is_not_understood_is_nothing(folder: MemberFolder, text: str | None) -> None:
    path = folder.path / "about"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    assert folder.record() is None


def test_a_process_is_named_by_its_number_and_when_it_began(folder: MemberFolder) -> None:
    assert folder.pid() is None
    with folder.log.open("ab") as log, subprocess.Popen(["sleep", "60"], stdout=log) as process:
        try:
            _require_known_by_number_and_start(folder, process.pid)
        finally:
            process.kill()


def test_a_process_that_does_not_write_to_the_log_is_no_member(folder: MemberFolder) -> None:
    """Whoever can write a file into the fleet's folder could otherwise have any process ended."""
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL) as process:
        try:
            folder.process.write_text(f"{process.pid} {started_at(process.pid)}\n")
            assert folder.pid() is None
        finally:
            process.kill()


def test_a_member_whose_log_was_removed_is_still_known(folder: MemberFolder) -> None:
    with folder.log.open("ab") as log, subprocess.Popen(["sleep", "60"], stdout=log) as process:
        try:
            folder.process.write_text(f"{process.pid} {started_at(process.pid)}\n")
            folder.log.unlink()
            assert folder.pid() == process.pid
            folder.log.touch()
            assert folder.pid() == process.pid
        finally:
            process.kill()


def _require_known_by_number_and_start(folder: MemberFolder, pid: int) -> None:
    began = started_at(pid)
    folder.process.write_text(f"{pid} {began}\n")
    assert folder.pid() == pid
    for wrong in (f"{pid} {began - 1}\n", f"{pid} {began + 1}\n", f"{pid}\n", "", "x y\n", "999999999 1\n", "1 2 3\n"):
        folder.process.write_text(wrong)
        assert folder.pid() is None, wrong


# Tails.


def test_lines_come_when_they_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    tail = FileTail(path)
    with path.open("ab", buffering=0) as writer:
        assert list(tail.lines()) == []
        writer.write(b"one\ntw")
        assert list(tail.lines()) == [b"one"]
        writer.write(b"o\n\nthr")
        assert list(tail.lines()) == [b"two", b""]
        assert list(tail.lines()) == []
        assert list(tail.lines(to_the_end=True)) == [b"thr"]
        assert list(tail.lines(to_the_end=True)) == []
    tail.close()


@pytest.mark.parametrize(
    "length", [FileTail.max_line - 1, FileTail.max_line, FileTail.max_line + 1, 5 * FileTail.max_line + 7]
)
def test_long_lines_come_in_chunks_and_whole(tmp_path: Path, length: int) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * length + b"\nnext\n")
    tail = FileTail(path)
    *chunks, last = tail.lines()
    assert last == b"next"
    assert b"".join(chunks) == b"x" * length
    assert max(map(len, chunks)) <= 2 * FileTail.max_line
    tail.close()


def test_what_was_there_may_be_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    tail = FileTail(path)
    tail.skip()
    with path.open("ab", buffering=0) as writer:
        writer.write(b"after\n")
    assert list(tail.lines()) == [b"after"]
    tail.close()


def test_a_log_is_bounded_and_no_line_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    tail, seen = FileTail(path, bounded=True), []
    tail.max_log_bytes = 100
    with path.open("ab", buffering=0) as writer:
        for number in range(100):
            writer.write(b"line %d\nand no e" % number)
            seen += tail.lines()
            writer.write(b"nd %d\n" % number)
            seen += tail.lines()
            assert path.stat().st_size <= 100 + 2 * 20
    assert seen == [line for number in range(100) for line in (b"line %d" % number, b"and no end %d" % number)]
    tail.close()


def test_messages_are_never_emptied(tmp_path: Path) -> None:
    path = tmp_path / "messages"
    path.write_bytes(b"a long message\n")
    tail = FileTail(path)
    tail.max_log_bytes = 10
    assert list(tail.chunks()) == [b"a long message\n"]
    assert path.read_bytes() == b"a long message\n"
    tail.close()
