"""Where what is compiled is kept, and what is done where nothing can be."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvferry.core.compiled import SWITCH, NotCompiled, compiled, report_missing_compiler
from kvferry.core.errors import ConfigError
from kvferry.core.folders.cache_dirs import CACHE_DIR_VARIABLE, require_cache_dir

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler here")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "one.cpp"
    path.write_text('extern "C" int one() { return 1; }')
    return path


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, and a folder for temporary files, of this test's own."""
    for name in ("home", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for name in ("XDG_CACHE_HOME", CACHE_DIR_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def private(places: Path) -> Path:
    return places / "temporary" / f"kvferry-{os.getuid()}"


def test_it_is_kept_in_the_home_and_found_again(source: Path, places: Path) -> None:
    first = compiled([source], ["-O1"])
    assert first.parent == places / "home" / ".cache" / "kvferry" / "kernels"
    made = first.stat().st_mtime_ns
    assert compiled([source], ["-O1"]) == first
    assert first.stat().st_mtime_ns == made


@pytest.mark.parametrize(
    ("variable", "below"), [(CACHE_DIR_VARIABLE, "kernels"), ("XDG_CACHE_HOME", "kvferry/kernels")]
)
def test_a_place_that_is_named_comes_first(
    variable: str, below: str, source: Path, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(places / "named"))
    assert compiled([source], ["-O1"]).parent == places / "named" / below


def test_where_the_home_cannot_be_written_a_private_place_is_taken_and_told(
    source: Path, places: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", "/proc/nowhere")  # not writable, for root neither
    path = compiled([source], ["-O1"])
    assert path.parent == private(places) / "kernels"
    assert private(places).stat().st_mode & 0o777 == 0o700
    assert "/proc/nowhere/.cache/kvferry/kernels" in caplog.text
    assert CACHE_DIR_VARIABLE in caplog.text
    caplog.clear()
    assert compiled([source], ["-O1"]) == path
    assert caplog.text == ""


def test_what_is_there_is_used_though_nothing_can_be_written(source: Path, places: Path) -> None:
    """As in an image of a container that was made with it."""
    path = compiled([source], ["-O1"])
    path.parent.chmod(0o500)
    assert compiled([source], ["-O1"]) == path


@pytest.mark.parametrize("made", ["link", "open", "file"])
def test_a_private_place_that_others_could_write_is_refused(
    made: str, source: Path, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/proc/nowhere")
    place = private(places)
    if made == "link":
        (places / "elsewhere").mkdir()
        place.symlink_to(places / "elsewhere")
    elif made == "open":
        place.mkdir()
        place.chmod(0o777)
    else:
        place.write_text("")
    with pytest.raises(NotCompiled):
        compiled([source], ["-O1"])


OTHER_USER = 12345


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("whose", ["library", "folder"])
def test_what_another_user_made_is_not_executed(whose: str, source: Path, places: Path) -> None:
    """The name of a library says what was compiled, and anybody can work it out."""
    path = compiled([source], ["-O1"])
    path.write_bytes(b"code of another user")
    os.chown(path if whose == "library" else path.parent, OTHER_USER, OTHER_USER)
    found = compiled([source], ["-O1"])
    assert found.read_bytes() != b"code of another user"
    assert found.stat().st_uid == os.geteuid()
    assert (found == path) is (whose == "library")


@pytest.mark.parametrize("mode", [0o664, 0o666])
def test_what_others_could_write_is_compiled_again(mode: int, source: Path, places: Path) -> None:
    path = compiled([source], ["-O1"])
    path.write_bytes(b"code of somebody")
    path.chmod(mode)
    path.parent.chmod(0o777)
    assert compiled([source], ["-O1"]) == path
    assert path.read_bytes() != b"code of somebody"
    assert not (path.stat().st_mode | path.parent.stat().st_mode) & 0o022


def test_the_umask_lets_nobody_write_a_library(source: Path, places: Path) -> None:
    before = os.umask(0)
    try:
        path = compiled([source], ["-O1"])
    finally:
        os.umask(before)
    assert not (path.stat().st_mode | path.parent.stat().st_mode) & 0o022


def test_a_user_without_a_home(
    source: Path, places: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container that runs under a number: neither HOME nor a line in /etc/passwd."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert compiled([source], ["-O1"]).parent == private(places) / "kernels"
    assert "no home" in caplog.text


def test_no_compiler_says_what_to_do(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NotCompiled, match="install g\\+\\+"):
        compiled([source], ["-O1"])


def test_a_missing_compiler_is_reported_once_for_all_processes(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(SWITCH, "1")
    report_missing_compiler()
    report_missing_compiler()
    [record] = caplog.records
    assert "no C++ compiler on the PATH; install g++" in record.getMessage()
    with pytest.raises(NotCompiled) as reason:
        compiled([source], [])
    assert str(reason.value) == "", "this process, and those that inherit its environment, say nothing more"


@pytest.mark.parametrize("wrong", ["/proc/nowhere", "file"])
def test_a_place_that_is_named_and_cannot_be_used_is_refused(
    wrong: str, source: Path, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (places / "file").write_text("")
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(places / wrong))
    with pytest.raises(ConfigError, match=f"^{CACHE_DIR_VARIABLE}: .*; name another directory, or unset it"):
        compiled([source], ["-O1"])
    with pytest.raises(ConfigError, match=f"^{CACHE_DIR_VARIABLE}=.* cannot be used"):
        require_cache_dir()
    assert not (places / "home" / ".cache").exists(), "another place was used"


FULL = """
import logging, sys
from pathlib import Path
from kvferry.core.compiled import compiled
logging.basicConfig()
print(compiled([Path(sys.argv[1])], ["-O1"]))
"""


@pytest.mark.parametrize("named", [False, True])
def test_a_full_place_is_passed_over_unless_it_is_named(source: Path, places: Path, named: bool) -> None:
    """On a small file system of its own; needs root."""
    cache = places / "home" / ".cache" / "kvferry"
    cache.mkdir(parents=True)
    command = f"mount -t tmpfs -o size=64k none {cache} && exec {sys.executable} -c '{FULL}' {source}"
    environment = {
        **os.environ,
        "TMPDIR": str(places / "temporary"),
        **({CACHE_DIR_VARIABLE: str(cache)} if named else {}),
    }
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], env=environment, check=False, capture_output=True, text=True
    )
    if "not permitted" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("this user cannot mount")
    if named:
        assert f"{CACHE_DIR_VARIABLE}: compiled kernels need room: {cache}/kernels has" in done.stderr
    else:
        assert done.stdout.strip().startswith(str(private(places) / "kernels")), done.stderr
        assert "compiled kernels need room" in done.stderr
