from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.settings.files import MAX_BYTES, read_whole, require_writable


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"name")
    os.close(writer)
    try:
        assert read_whole(Path(f"/dev/fd/{reader}")) == b"name"
    finally:
        os.close(reader)


def test_a_pipe_that_nothing_writes_to_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe: nothing was written to this pipe for 0\.01 s"):
        read_whole(tmp_path / "pipe", wait_s=0.01)


def test_no_more_is_read_than_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "whole").write_bytes(b"x" * MAX_BYTES)
    assert len(read_whole(tmp_path / "whole")) == MAX_BYTES
    with pytest.raises(ConfigError, match="zero has more than 16 MiB"):
        read_whole(Path("/dev/zero"))


def test_what_a_command_reads_is_not_overwritten(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    require_writable("--write", trace, trace=tmp_path / "other", times=None)
    with pytest.raises(ConfigError, match=r"--write .*: this is --trace; write to another file"):
        require_writable("--write", tmp_path / "." / "trace.jsonl", trace=trace)
