"""Names of checkpoints, and the cache of their files' digests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.models import checkpoint, digest_cache
from kvferry.models.checkpoint import checkpoint_name
from kvferry.models.digest_cache import DigestCache

WEIGHTS = bytes(range(256)) * 4096


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests are kept; of files changed just now too, as tests do not wait."""
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(digest_cache, "SETTLED_S", 0.0)
    return tmp_path / "cache" / "checkpoints.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64, "_name_or_path": "here"}))
    (folder / "model-1.safetensors").write_bytes(WEIGHTS)
    (folder / "model-2.safetensors").write_bytes(WEIGHTS[::-1])
    return folder


def name_of(folder: Path) -> str:
    return checkpoint_name(folder, dtype="float32")


def change_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size * 2 // 3)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.fixture
def num_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read."""
    read, paths = checkpoint._digest, []

    def reading(path: Path, count: Callable[[int], None]) -> str:
        paths.append(path)
        return read(path, count)

    monkeypatch.setattr(checkpoint, "_digest", reading)
    return paths


def test_a_copy_has_the_same_name(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "config.json").write_text(
        json.dumps({"_name_or_path": "there", "transformers_version": "9", "hidden_size": 64})
    )
    assert name_of(copy) == name_of(folder)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pt", ".pth", ".gguf"])
def test_one_bit_of_any_weight_makes_another_name(folder: Path, suffix: str) -> None:
    path = folder / f"more{suffix}"
    path.write_bytes(WEIGHTS)
    before = name_of(folder)
    change_byte(path)
    assert name_of(folder) != before


def test_the_configuration_and_how_it_is_run_are_part_of_it(folder: Path) -> None:
    names = {
        name_of(folder),
        checkpoint_name(folder, dtype="bfloat16"),
        checkpoint_name(folder, dtype="float32", changes={"quantization": "fp8"}),
        checkpoint_name(folder, dtype="float32", with_weights=False),
    }
    (folder / "config.json").write_text(json.dumps({"hidden_size": 128}))
    assert len(names | {name_of(folder)}) == 5


def test_what_is_not_here_is_known_by_its_name() -> None:
    names = [checkpoint_name(name, dtype="float32", revision=revision) for name, revision in _NAMED]
    assert len(set(names)) == 3


_NAMED = [("s3://bucket/one", None), ("s3://bucket/two", None), ("s3://bucket/two", "v2")]


def test_files_are_read_once(folder: Path, cache: Path, num_reads: list[Path]) -> None:
    before = name_of(folder)
    assert len(num_reads) == 2
    assert name_of(folder) == before
    assert len(num_reads) == 2
    assert cache.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("way", ["in place", "replaced", "link"])
def test_a_file_that_changed_is_read_again(folder: Path, way: str, tmp_path: Path) -> None:
    """Though its size and its time of change are what they were."""
    path = folder / "model-1.safetensors"
    if way == "link":
        target = tmp_path / "blob"
        path.rename(target)
        path.symlink_to(target)
    before, times = name_of(folder), path.stat()
    if way == "in place":
        change_byte(path)
    else:
        other = tmp_path / "other"
        other.write_bytes(WEIGHTS)
        change_byte(other)
        other.replace(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert name_of(folder) != before


def test_a_file_changed_just_now_is_not_trusted_to_stay(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_reads: list[Path]
) -> None:
    monkeypatch.setattr(digest_cache, "SETTLED_S", 3600.0)
    assert name_of(folder) == name_of(folder)
    assert len(num_reads) == 4


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1}', b'{"/x": [[1, 2], "d"]}', b"\xff\x00", b'{"\xff": 1}'])
def test_a_damaged_cache_is_made_anew(folder: Path, cache: Path, num_reads: list[Path], content: bytes) -> None:
    before = name_of(folder)
    cache.write_bytes(content)
    assert name_of(folder) == before
    assert name_of(folder) == before
    assert len(num_reads) == 4


def test_what_is_wrong_with_the_cache_is_said_by_the_supervisor_alone(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name_of(folder)
    for instance, said in (("", 1), ("decode-0", 0)):
        cache.chmod(0o666)
        caplog.clear()
        monkeypatch.setenv("KVFERRY_INSTANCE_NAME", instance)
        DigestCache()
        assert [record.levelname for record in caplog.records] == ["WARNING"] * said


def test_a_cache_that_others_may_write_is_not_believed(folder: Path, cache: Path) -> None:
    before = name_of(folder)
    known = json.loads(cache.read_text())
    cache.write_text(json.dumps({path: [state, "0" * 32] for path, (state, _) in known.items()}))
    forged = cache.read_text()
    cache.chmod(0o666)
    assert name_of(folder) == before
    assert cache.read_text() != forged
    assert cache.stat().st_mode & 0o777 == 0o600


def test_without_a_place_for_a_cache(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = name_of(folder)
    (tmp_path / "a file").touch()
    for variable in ("KVFERRY_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path / "a file"))
    assert name_of(folder) == before


def test_the_cache_is_bounded(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_cache, "MAX_FILES", 3)
    name_of(folder)
    for number in range(3, 7):
        (folder / f"model-{number}.safetensors").write_bytes(WEIGHTS)
        name_of(folder)
    assert len(json.loads(cache.read_text())) == 3


def test_progress_is_told_where_reading_takes_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These files are read when it was told of twice, and not before."""
    monkeypatch.setattr(checkpoint, "FIRST_REPORT_S", 0.0)
    monkeypatch.setattr(checkpoint, "REPORT_EVERY_S", 0.0)
    read, go_on = checkpoint._digest, threading.Event()
    told: list[tuple[int, int]] = []

    def reading(path: Path, count: Callable[[int], None]) -> str:
        assert go_on.wait(20)
        return read(path, count)

    def tell(done: int, total: int) -> None:
        told.append((done, total))
        if len(told) == 2:
            go_on.set()

    monkeypatch.setattr(checkpoint, "_digest", reading)
    checkpoint_name(folder, dtype="float32", on_progress=tell)
    assert told[:2] == [(0, 2 * len(WEIGHTS))] * 2


def test_several_processes_at_once(folder: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from kvferry.models.checkpoint import checkpoint_name as n; print(n(sys.argv[1], dtype='float32'))"
    )
    command = [sys.executable, "-c", script, str(folder)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {process.communicate(timeout=60)[0].strip() for process in processes} == {name_of(folder)}


def test_it_needs_no_torch(folder: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None;"
        "from kvferry.models.checkpoint import checkpoint_name; checkpoint_name(sys.argv[1], dtype='float32')"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True, timeout=60)
