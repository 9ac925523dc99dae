"""What a configuration may name, and what is said of a name that leads nowhere."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError, UnknownName
from kvferry.core.names import ExtensionPoint

POINT = ExtensionPoint("--thing", {"path": "pathlib:Path", "made": Path("/x")}, "kvferry.things")


def test_by_table_by_entry_point_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "theirs-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: theirs\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[kvferry.things]\ntheirs = pathlib:PosixPath\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert POINT.names() == ["made", "path", "theirs"]
    assert POINT.find("path", Path) is Path
    assert POINT.find("made", Path) == Path("/x")
    assert POINT.find("theirs", Path).__name__ == "PosixPath"
    assert POINT.find("pathlib:PosixPath", Path).__name__ == "PosixPath"
    with pytest.raises(UnknownName, match="did you mean 'theirs'"):
        POINT.find("their", Path)


def test_a_name_of_ours_is_found_without_a_look_at_the_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration has dozens of names, and each look reads the metadata of every installed package."""

    def looked(group: str) -> None:
        raise AssertionError(f"looked for entry points of {group}")

    monkeypatch.setattr("kvferry.core.names.entry_points", looked)
    assert POINT.find("path", Path) is Path
    POINT.require_known("made")
    POINT.require_known("else", "else")
    with pytest.raises(AssertionError, match="looked"):
        POINT.require_known("theirs")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "unknown --thing"),
        (":", "cannot import ''"),
        (":Path", "cannot import ''"),
        (".pathlib:Path", "cannot import '.pathlib'"),
        ("path lib:Path", "cannot import 'path lib'"),
        ("\0:Path", "cannot import"),
        ("pathlib:", "has no ''"),
        ("pathlib:Pth", "has no 'Pth'"),
        ("pathlib:Path:more", "has no 'Path:more'"),
        ("\ud800:x", "cannot import"),
        ("pathlib:\ud800", "has no"),
        ("os:sep", "must be a kvferry Path, got '/'"),
        ("os:PathLike", "must be a kvferry Path"),
        ("broken:Path", "cannot import 'broken'"),
    ],
)
def test_what_leads_nowhere(name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("def\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=told):
        POINT.find(name, Path)


ASIDE = """
import gc
from kvferry.core.names import without_collections

class Made:
    pass

with without_collections():
    assert not gc.isenabled()
    made = [Made() for _ in range(100)]
assert gc.isenabled()
assert not any(isinstance(one, Made) for one in gc.get_objects()), "a collection would look through them"
gc.disable()
with without_collections():
    pass
assert not gc.isenabled()
"""


def test_what_was_imported_without_collections_is_not_looked_through() -> None:
    done = subprocess.run([sys.executable, "-c", ASIDE], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
