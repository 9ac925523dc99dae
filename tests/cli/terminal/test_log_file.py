"""Log files of commands: private, bounded in size and number, and never followed through links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.cli.terminal.display import MAX_LOG_FILES, LogFile, open_log
from kvferry.core.folders.state_folder import state_folder


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_lines_are_appended_for_the_user_only(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "serve.log"
    for line in ("first", "sec\u00f6nd \ud800"):
        log = LogFile(path)
        log.write(line)
        log.close()
    assert path.read_text(encoding="utf-8").splitlines() == ["first", "sec\u00f6nd ?"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        LogFile(tmp_path / "link.log")
    assert not (tmp_path / "elsewhere").exists()


def test_a_log_is_named_after_command_and_port() -> None:
    log, drawn = open_log("serve", 8000), open_log("serve", 0)
    assert log is not None
    assert drawn is not None
    assert (log.path.name, drawn.path.name) == ("serve-8000.log", f"serve-{os.getpid()}.log")
    log.close()
    drawn.close()


def test_the_oldest_files_go() -> None:
    folder = state_folder() / "logs"
    folder.mkdir(parents=True)
    for number in range(MAX_LOG_FILES + 5):
        path = folder / f"router-{number}.log"
        path.touch()
        os.utime(path, (number, number))
    log = open_log("serve", 8000)
    assert log is not None
    log.close()
    names = {path.name for path in folder.iterdir()}
    assert len(names) == MAX_LOG_FILES
    assert "serve-8000.log" in names
    assert "router-0.log" not in names


def test_where_no_file_can_be_written_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert open_log("serve", 8000) is None
