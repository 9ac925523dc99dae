"""Whatever is in a file that a user names, the answer is its tables or one line that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.settings.files import MAX_BYTES
from kvferry.core.settings.toml_file import read_toml, to_toml


def test_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('a = 1\n[b]\nc = "ü"\n')
    assert read_toml(path) == {"a": 1, "b": {"c": "ü"}}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    tables = {
        "a": 1,
        "b": {},
        "c": {"d": {"a.b/c": 'say "ü"\n', "list": [{"x y": "z", "n": [1, 2.5]}, {}]}, "e": {}},
    }
    path.write_text(to_toml(tables))
    assert read_toml(path) == tables


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a = = 3", "is not valid TOML: Invalid value"),
        (b"a = '\xff'", "is not valid TOML: 'utf-8' codec"),
        (b"a = " + b"[" * 100_000, "is not valid TOML: its lists or tables are nested too deeply"),
        (b"a = " + b"9" * 10_000, "is not valid TOML: Exceeds the limit"),
        (b"#" * (MAX_BYTES + 1), "has more than 16 MiB"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as told:
        read_toml(path)
    assert str(told.value).startswith(str(path))


@pytest.mark.parametrize(("name", "reason"), [("none", "No such file"), (".", "Is a directory"), ("a\0b", "null byte")])
def test_what_is_no_file(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_toml(tmp_path / name)


def test_a_file_without_an_end() -> None:
    with pytest.raises(ConfigError, match="has more than 16 MiB"):
        read_toml(Path("/dev/zero"))
