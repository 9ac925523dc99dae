"""Directories of caches, in order of preference."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.folders.cache_dirs import (
    CACHE_DIR_VARIABLE,
    configured_cache_dir,
    require_cache_dir,
    user_cache_dirs,
    user_runtime_dirs,
)


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CACHE_DIR_VARIABLE, "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_by_default_it_is_below_the_home_directory(tmp_path: Path) -> None:
    assert configured_cache_dir() is None
    assert [*user_cache_dirs()] == [tmp_path / ".cache" / "kvferry"]
    require_cache_dir()


def test_the_users_own_is_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, "~/mine")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert [*user_cache_dirs()] == [tmp_path / "mine"]
    require_cache_dir()
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    require_cache_dir()


def test_xdg_comes_before_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert [*user_cache_dirs()] == [Path("/xdg/kvferry"), tmp_path / ".cache" / "kvferry"]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match=f"{CACHE_DIR_VARIABLE}=.*below cannot be used: .*name another"):
        require_cache_dir()


def test_processes_find_each_other_at_runtime_directories_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [*user_runtime_dirs()] == [Path(tempfile.gettempdir()), tmp_path / ".cache" / "kvferry"]
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert next(user_runtime_dirs()) == Path("/run/user/7")
