"""How processes find each other's memory when the directory for that has no room left."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.store.arena import RESERVED_BYTES, Arena

SIZE = 2**16


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_full_disk_is_told_and_takes_nothing_from_who_is_there() -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with closing(Arena("one", SIZE)) as first:
        first.buffer[RESERVED_BYTES] = 7
        before = num_descriptors()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(ConfigError, match=r"cannot use .*/one.members to share memory: No space left"):
                Arena("one", SIZE)
            with pytest.raises(ConfigError, match="No space left"):
                Arena("two", SIZE)
        assert num_descriptors() == before
        with closing(Arena("one", SIZE)) as second:
            assert second.buffer[RESERVED_BYTES] == 7


def test_who_leaves_while_the_disk_is_full_leaves_all_the_same() -> None:
    first, before = Arena("one", SIZE), num_descriptors()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *arguments: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        first.close()
    assert num_descriptors() < before
    with closing(Arena("one", SIZE)) as again:
        assert again.buffer[RESERVED_BYTES] == 0


def test_a_list_that_was_torn_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    with closing(Arena("one", SIZE)) as first:
        first.buffer[RESERVED_BYTES] = 7
        (members,) = tmp_path.rglob("one.members")
        members.write_bytes(members.read_bytes() + b"5\n18192 4 1\n" + b"9" * 5000 + b" 1\n\0\n")
        with closing(Arena("one", SIZE)) as second:
            assert second.buffer[RESERVED_BYTES] == 7
