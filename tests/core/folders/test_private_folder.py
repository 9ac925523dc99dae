"""Folders that are this user's alone, where other users got there first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.folders.private_folder import private_folder


@pytest.mark.parametrize("taken", ["file", "link", "open"])
def test_the_next_place_is_used_where_the_name_is_taken(taken: str, tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own" / "deep"
    shared.mkdir()
    if taken == "file":
        (shared / "kv").touch()
    elif taken == "link":
        (shared / "kv").symlink_to(tmp_path)
    else:
        (shared / "kv").mkdir()
        (shared / "kv").chmod(0o777)
    assert private_folder("kv", [shared, own]) == own / "kv"
    assert private_folder("kv", [shared, own]) == own / "kv"
    assert (own / "kv").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match=f"this user's alone.*{re.escape(str(shared))}"):
        private_folder("kv", [shared])


def test_a_place_that_cannot_be_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert private_folder("kv", [tmp_path / "file", Path("/proc/nowhere"), tmp_path]) == tmp_path / "kv"
