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

from kvferry.core.errors import ConfigError
from kvferry.models.checkpoint import (
    CheckpointFiles,
    DigestReader,
    checkpoint_name,
    file_digest,
    plain,
    resolved_config,
)
from kvferry.models.digest_cache import DigestCache, FileState

WEIGHTS = bytes(range(256)) * 4096
CONFIG = {"hidden_size": 64}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of digests."""
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "checkpoints.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"_name_or_path": "here"}))
    (folder / "model-1.safetensors").write_bytes(WEIGHTS)
    (folder / "model-2.safetensors").write_bytes(WEIGHTS[::-1])
    return folder


READER = DigestReader(settled_s=0.0)
"""Caches digests of files that have just changed too."""


def name_of(folder: Path, reader: DigestReader = READER) -> str:
    return checkpoint_name(folder, config=CONFIG, dtype="float32", reader=reader)


def change_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size * 2 // 3)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


class Reads:
    """A reader of digests, and the files that it has read. `settled_s`: of the reader."""

    def __init__(self, settled_s: float = 0.0) -> None:
        self.paths: list[Path] = []
        self.reader = DigestReader(settled_s=settled_s, digest=self._digest)

    def _digest(self, path: Path, on_read: Callable[[int], None]) -> str:
        self.paths.append(path)
        return file_digest(path, on_read)


def test_a_copy_has_the_same_name(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for name in HARMLESS:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("another")
    config = CONFIG | {"_name_or_path": "there", "transformers_version": "9"}
    assert checkpoint_name(copy, config=config, dtype="float32") == name_of(folder)


HARMLESS = [
    "config.json",
    "README.md",
    "LICENSE",
    "tokenizer.json",
    "generation_config.json",
    ".cache/model.safetensors",
]
COUNTING = [
    *("more.safetensors", "more.bin", "more.pt", "more.gguf", "more.tensors", "modeling.py", "sub/more.safetensors"),
    *("preprocessor_config.json", "tokenizer-checkpoint.safetensors", "model.safetensors.index.json"),
]


@pytest.mark.parametrize("name", COUNTING)
def test_one_bit_of_any_file_makes_another_name(folder: Path, name: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(WEIGHTS)
    before = name_of(folder)
    change_byte(path)
    assert name_of(folder) != before


def test_a_folder_within_itself_is_read_once(folder: Path) -> None:
    reads = Reads()
    (folder / "again").symlink_to(folder)
    name_of(folder, reads.reader)
    assert len(reads.paths) == 2


def test_the_configuration_and_how_it_is_run_are_part_of_it(folder: Path) -> None:
    names = [
        name_of(folder),
        checkpoint_name(folder, config=CONFIG, dtype="bfloat16"),
        checkpoint_name(folder, config=CONFIG, dtype="float32", changes={"quantization": "fp8"}),
        checkpoint_name(folder, config=CONFIG, dtype="float32", weights="another"),
        checkpoint_name(folder, config={"hidden_size": 128}, dtype="float32"),
        checkpoint_name(folder, config={"text_config": CONFIG}, dtype="float32"),
        checkpoint_name(folder, config=CONFIG | {"anything": None}, dtype="float32"),
    ]
    assert len(set(names)) == len(names)


def test_what_is_not_here_is_known_by_its_commit_alone(tmp_path: Path) -> None:
    def name(model: str, revision: str | None) -> str:
        return checkpoint_name(model, config=CONFIG, dtype="float32", revision=revision)

    assert len({name("nobody/one", "a" * 40), name("nobody/one", "b" * 40), name("nobody/two", "a" * 40)}) == 3
    (tmp_path / "preprocessor_config.json").touch()
    for model, revision in (("s3://bucket/one", None), ("s3://bucket/one", "v2"), (str(tmp_path), "a" * 40)):
        with pytest.raises(ConfigError, match="model_fingerprint"):
            name(model, revision)


class _Code:
    """A configuration whose class comes from another repository."""

    def __init__(self, **settings: object) -> None:
        self._settings = settings

    def to_dict(self) -> dict[str, object]:
        return self._settings


def test_code_of_another_repository_counts_by_its_commit() -> None:
    found = []
    for commit in ("one", "two"):
        code = type("_Code", (_Code,), {"__module__": f"transformers_modules.repository.{commit}.configuration"})
        found += [resolved_config(code(auto_map={"AutoConfig": "repository--configuration.Code"}))]
        found += [resolved_config(code(auto_map={"AutoConfig": "configuration.Code"}))]
    assert found[0] != found[2]
    assert found[1] == found[3]


def test_values_have_one_form() -> None:
    assert plain({1: {2, 1}, "a": (Path("x"), WEIGHTS[:2])}) == plain({"1": {1, 2}, "a": ["x", [0, 1]]})
    for value in (object(), lambda: None):
        with pytest.raises(ConfigError, match="model_fingerprint"):
            plain({"a": value})


def test_files_are_read_once(folder: Path, cache: Path) -> None:
    reads = Reads()
    before = name_of(folder, reads.reader)
    assert len(reads.paths) == 2
    assert name_of(folder, reads.reader) == before
    assert len(reads.paths) == 2
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


def test_a_file_changed_just_now_is_not_trusted_to_stay(folder: Path) -> None:
    reads = Reads(settled_s=3600.0)
    assert name_of(folder, reads.reader) == name_of(folder, reads.reader)
    assert len(reads.paths) == 4


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1}', b'{"/x": [[1, 2], "d"]}', b"\xff\x00", b'{"\xff": 1}'])
def test_a_damaged_cache_is_made_anew(folder: Path, cache: Path, content: bytes) -> None:
    reads = Reads()
    before = name_of(folder, reads.reader)
    cache.write_bytes(content)
    assert name_of(folder, reads.reader) == before
    assert name_of(folder, reads.reader) == before
    assert len(reads.paths) == 4


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
    cache.write_text(json.dumps({path: [state, sample, "0" * 32] for path, (state, sample, _) in known.items()}))
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


def test_the_cache_is_bounded(folder: Path, cache: Path) -> None:
    states = []
    for number in range(3, 7):
        path = folder / f"model-{number}.safetensors"
        path.write_bytes(WEIGHTS)
        states.append(FileState.of(path))
    for state in states:
        DigestCache(max_files=3).store({state: "digest"}, settled_s=0.0)
    assert list(json.loads(cache.read_text())) == [state.path for state in states[1:]]


def test_progress_is_told_where_reading_takes_time(folder: Path) -> None:
    """These files are read when it was told of twice, and not before."""
    go_on = threading.Event()
    reports: list[tuple[int, int]] = []

    def digest(path: Path, on_read: Callable[[int], None]) -> str:
        assert go_on.wait(20)
        return file_digest(path, on_read)

    def report(done: int, total: int) -> None:
        reports.append((done, total))
        if len(reports) == 2:
            go_on.set()

    reader = DigestReader(first_report_s=0.0, report_interval_s=0.0, digest=digest)
    checkpoint_name(folder, config=CONFIG, dtype="float32", on_progress=report, reader=reader)
    assert reports[:2] == [(0, 2 * len(WEIGHTS))] * 2


def test_several_processes_at_once(folder: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from kvferry.models.checkpoint import checkpoint_name as n;"
        " print(n(sys.argv[1], config={'hidden_size': 64}, dtype='float32'))"
    )
    command = [sys.executable, "-c", script, str(folder)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {process.communicate(timeout=60)[0].strip() for process in processes} == {name_of(folder)}


def test_it_needs_no_torch(folder: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None;"
        "from kvferry.models.checkpoint import checkpoint_name as n; n(sys.argv[1], config={}, dtype='float32')"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True, timeout=60)


def overwrite(folder: Path) -> None:
    change_byte(folder / "model-2.safetensors")


def replace(folder: Path) -> None:
    shutil.copyfile(folder / "model-1.safetensors", folder.parent / "new")
    (folder.parent / "new").rename(folder / "model-2.safetensors")


def keep_times(folder: Path) -> None:
    times = (folder / "model-2.safetensors").stat()
    change_byte(folder / "model-2.safetensors")
    os.utime(folder / "model-2.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))


def add(folder: Path) -> None:
    (folder / "model-3.safetensors").write_bytes(WEIGHTS)


def switch(folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "version-2")
    folder.rename(folder.parent / "version-1")
    folder.symlink_to(folder.parent / "version-2")


@pytest.mark.parametrize("change", [overwrite, replace, keep_times, add, switch])
def test_what_changed_since_it_was_loaded_has_no_name(folder: Path, change: Callable[[Path], None]) -> None:
    before = CheckpointFiles.of(str(folder))
    assert checkpoint_name(folder, config=CONFIG, dtype="float32", before=before) == name_of(folder)
    change(folder)
    with pytest.raises(ConfigError, match=r"changed while the model was loaded.*start again"):
        checkpoint_name(folder, config=CONFIG, dtype="float32", before=before)


def test_what_changes_while_it_is_read_has_no_name(folder: Path) -> None:
    def digest(path: Path, on_read: Callable[[int], None]) -> str:
        read = file_digest(path, on_read)
        overwrite(folder)
        return read

    with pytest.raises(ConfigError, match="changed while the model was loaded"):
        name_of(folder, DigestReader(settled_s=0.0, digest=digest))


def test_files_whose_times_an_image_gave_them_are_always_read(folder: Path, cache: Path) -> None:
    """Two images made with fixed times, one mounted after the other: path, device, inode, size and times are equal."""
    state = FileState.of(folder / "model-1.safetensors")
    of_an_image = FileState(*state[:4], modified_ns=10**18, changed_ns=10**18)
    one = DigestCache()
    one.store({of_an_image: "digest"}, settled_s=0.0)
    assert not cache.exists()
    one.store({state: "digest"}, settled_s=0.0)
    assert DigestCache().find_all([state]) == {state: "digest"}
    entries = json.loads(cache.read_bytes())
    entries[state.path][0] = list(of_an_image[1:])
    cache.write_text(json.dumps(entries))
    assert DigestCache().find_all([of_an_image]) == {}


def test_other_content_with_equal_times_is_seen_by_samples(folder: Path, cache: Path) -> None:
    path = folder / "model-1.safetensors"
    state = FileState.of(path)
    DigestCache().store({state: "digest"}, settled_s=0.0)
    path.write_bytes(bytes(len(WEIGHTS)))
    assert DigestCache().find_all([state]) == {}
