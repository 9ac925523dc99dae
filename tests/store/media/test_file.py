import errno
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_support import make_layout
from sync_store import OPEN, FileStore

from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ConfigError, StoreError
from kvferry.store import upkeep
from kvferry.store.codecs.table import make_codec
from kvferry.store.disk import Disk, _machine
from kvferry.store.record import RecordFormat
from support.examples import examples

STORES = str(Path(__file__).parents[1] / "support")
SUPPORT = str(Path(__file__).parents[2] / "transport" / "support")


def name_of(index: int) -> bytes:
    return hashlib.sha256(str(index).encode()).digest()


def block_of(layout: KVLayout, index: int) -> list[memoryview]:
    """A block's bytes, by layer, which follow from its index."""
    sizes = [layout.span_bytes(layer) for layer in range(layout.num_layers)]
    return [memoryview(hashlib.shake_128(f"{index} {layer}".encode()).digest(size)) for layer, size in enumerate(sizes)]


def empty(layout: KVLayout) -> list[memoryview]:
    return [memoryview(bytearray(layout.span_bytes(layer))) for layer in range(layout.num_layers)]


def fetch(store: FileStore, layout: KVLayout, index: int) -> list[bytes] | None:
    into = empty(layout)
    return [bytes(view) for view in into] if store.get(name_of(index), into) else None


def bytes_of(layers: Sequence[memoryview]) -> list[bytes]:
    return [bytes(layer) for layer in layers]


def file_of(root: Path, index: int) -> Path:
    [path] = root.glob(f"*/*/{name_of(index).hex()}.kv")
    return path


@pytest.fixture
def store(tmp_path: Path, layout: KVLayout) -> FileStore:
    return FileStore(tmp_path, layout)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for store in list(OPEN):
        store.close()


@pytest.mark.parametrize("fsync", [False, True])
def test_what_is_put_is_got(tmp_path: Path, layout: KVLayout, fsync: bool) -> None:
    store = FileStore(tmp_path, layout, fsync=fsync)
    for index in range(5):
        assert store.put(name_of(index), block_of(layout, index))
    for index in range(5):
        assert fetch(store, layout, index) == bytes_of(block_of(layout, index))
    assert store.statistics()["stored_blocks"] == store.statistics()["loaded_blocks"] == 5
    assert store.statistics()["kept_bytes"] == sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))


def test_layers_one_by_one(store: FileStore, layout: KVLayout) -> None:
    store.put(name_of(1), block_of(layout, 1))
    for layer in reversed(range(layout.num_layers)):
        into = memoryview(bytearray(layout.span_bytes(layer)))
        assert store.get_layer(name_of(1), layer, into)
        assert into == block_of(layout, 1)[layer]


def test_match_is_the_longest_prefix(store: FileStore, layout: KVLayout) -> None:
    hashes = [name_of(index) for index in range(6)]
    assert store.match(hashes) == 0
    for index in (0, 1, 2, 4):
        store.put(hashes[index], block_of(layout, index))
    assert store.match(hashes) == 3
    assert store.match(hashes[4:]) == 1
    assert store.match([]) == 0


def test_a_block_is_kept_once(store: FileStore, layout: KVLayout) -> None:
    assert store.put(name_of(1), block_of(layout, 1))
    assert not store.put(name_of(1), block_of(layout, 1))
    assert store.statistics()["present_blocks"] == 1


def test_delete(store: FileStore, layout: KVLayout) -> None:
    store.put(name_of(1), block_of(layout, 1))
    assert store.delete(name_of(1))
    assert not store.delete(name_of(1))
    assert fetch(store, layout, 1) is None
    assert store.statistics()["missing_blocks"] == 1


HEADER = RecordFormat(make_layout(), make_codec("none", make_layout())).header_bytes
DAMAGE = {
    "empty": lambda content: b"",
    "a few bytes": lambda content: content[:10],
    "header only": lambda content: content[:HEADER],
    "half": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "zeros": lambda content: bytes(len(content)),
    "magic": lambda content: b"x" + content[1:],
    "header bit": lambda content: flipped(content, 70),
    "checksum bit": lambda content: flipped(content, 100),
    "first payload bit": lambda content: flipped(content, HEADER),
    "last payload bit": lambda content: flipped(content, len(content) - 1),
}


def flipped(content: bytes, position: int, bit: int = 0) -> bytes:
    return content[:position] + bytes([content[position] ^ (1 << bit)]) + content[position + 1 :]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_block_is_a_miss_and_is_removed(
    store: FileStore, layout: KVLayout, tmp_path: Path, damage: str
) -> None:
    store.put(name_of(1), block_of(layout, 1))
    path = file_of(tmp_path, 1)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert fetch(store, layout, 1) is None
    assert store.statistics()["corrupt_blocks"] == 1
    assert not path.exists()
    assert store.put(name_of(1), block_of(layout, 1))
    assert fetch(store, layout, 1) == bytes_of(block_of(layout, 1))


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_flipped_bit_goes_unnoticed(store: FileStore, layout: KVLayout, tmp_path: Path, data: st.DataObject) -> None:
    store.put(name_of(1), block_of(layout, 1))
    path = file_of(tmp_path, 1)
    content = path.read_bytes()
    position = data.draw(st.integers(0, len(content) - 1))
    path.write_bytes(flipped(content, position, data.draw(st.integers(0, 7))))
    assert fetch(store, layout, 1) is None


def test_damage_in_one_layer_is_found_when_that_layer_is_read(
    store: FileStore, layout: KVLayout, tmp_path: Path
) -> None:
    store.put(name_of(1), block_of(layout, 1))
    path = file_of(tmp_path, 1)
    content = path.read_bytes()
    path.write_bytes(flipped(content, len(content) - 1))
    into = empty(layout)
    assert store.get_layer(name_of(1), 0, into[0])
    assert not store.get_layer(name_of(1), layout.num_layers - 1, into[-1])
    assert not path.exists()


def test_another_block_s_file_is_not_taken_for_this_one(store: FileStore, layout: KVLayout, tmp_path: Path) -> None:
    for index in (1, 2):
        store.put(name_of(index), block_of(layout, index))
    file_of(tmp_path, 1).rename(file_of(tmp_path, 2))
    assert fetch(store, layout, 2) is None


def test_another_layout_s_file_is_not_taken(store: FileStore, layout: KVLayout, tmp_path: Path) -> None:
    """Same sizes, other model: the blocks' names would not meet by themselves, but files may be copied."""
    other_layout = make_layout(model_fingerprint="other")
    other = FileStore(tmp_path, other_layout)
    other.put(name_of(1), block_of(layout, 1))
    assert fetch(store, layout, 1) is None
    store.put(name_of(1), block_of(layout, 2))
    foreign = tmp_path / other_layout.fingerprint() / name_of(1).hex()[:2] / f"{name_of(1).hex()}.kv"
    foreign.rename(tmp_path / layout.fingerprint() / name_of(1).hex()[:2] / f"{name_of(1).hex()}.kv")
    assert fetch(store, layout, 1) is None
    assert store.statistics()["corrupt_blocks"] == 1


# Room.


class CountingDisk(Disk):
    """`scanned`: the directories that were listed; `num_vain_removals`: removals of files that did not exist."""

    def __init__(self) -> None:
        self.scanned: list[Path] = []
        self.num_vain_removals = 0

    def glob(self, folder: Path, pattern: str) -> Iterable[Path]:
        self.scanned.append(folder)
        return super().glob(folder, pattern)

    def remove(self, path: str) -> bool:
        was_present = super().remove(path)
        self.num_vain_removals += not was_present
        return was_present


def age(path: Path, seconds: float) -> None:
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_the_blocks_used_longest_ago_go_first(tmp_path: Path, layout: KVLayout) -> None:
    size = FileStore(tmp_path, layout).file_bytes
    store = FileStore(tmp_path, layout, max_bytes=10 * size)
    for index in range(10):
        store.put(name_of(index), block_of(layout, index))
        age(file_of(tmp_path, index), 1000 - index)
    assert fetch(store, layout, 0) is not None, "used now, so no longer the oldest"
    store.put(name_of(10), block_of(layout, 10))
    present = [index for index in range(11) if fetch(store, layout, index)]
    assert present == [0, *range(3, 11)]
    assert store.statistics()["evicted_blocks"] == 2
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= 10 * size


@pytest.mark.parametrize("eviction", ["lru", "reuse"])
def test_no_process_remembers_the_files_that_others_removed(tmp_path: Path, layout: KVLayout, eviction: str) -> None:
    """Where one process writes most and so evicts for all, another sees ever new files. It evicts none that is gone."""
    size = FileStore(tmp_path, layout).file_bytes
    disk = CountingDisk()
    writer = FileStore(tmp_path, layout, max_bytes=10 * size, eviction=eviction)
    other = FileStore(tmp_path, layout, disk, max_bytes=10 * size, eviction=eviction)
    for index in range(60):
        writer.put(name_of(index), block_of(layout, index))
        other.run(other.inner.pin([]))  # it scans the directory
    assert other.statistics().get("evicted_blocks", 0) == 0
    for index in range(60, 64):
        other.put(name_of(index), block_of(layout, index))
    assert other.statistics()["evicted_blocks"] > 0
    assert disk.num_vain_removals == 0


def test_a_put_of_what_is_there_counts_as_use(tmp_path: Path, layout: KVLayout) -> None:
    store = FileStore(tmp_path, layout)
    store.put(name_of(1), block_of(layout, 1))
    path = file_of(tmp_path, 1)
    age(path, 1000)
    before = path.stat().st_mtime
    store.put(name_of(1), block_of(layout, 1))
    assert path.stat().st_mtime > before + 900


def test_the_bound_holds_for_all_layouts_together(tmp_path: Path, layout: KVLayout) -> None:
    size = FileStore(tmp_path, layout).file_bytes
    old = FileStore(tmp_path, make_layout(model_fingerprint="old"))
    for index in range(10):
        old.put(name_of(index), block_of(layout, index))
    for path in tmp_path.rglob("*.kv"):
        age(path, 1000)
    store = FileStore(tmp_path, layout, max_bytes=5 * size)
    store.put(name_of(99), block_of(layout, 99))
    assert fetch(store, layout, 99) is not None
    assert len(list(tmp_path.rglob("*.kv"))) <= 5


def test_what_a_crash_left_is_swept_in_time(tmp_path: Path, layout: KVLayout) -> None:
    store = FileStore(tmp_path, layout)
    store.put(name_of(1), block_of(layout, 1))
    folder = file_of(tmp_path, 1).parent
    ended = subprocess.Popen(["true"])
    ended.wait()
    stale, fresh = folder / "a.kv.elsewhere.1.0.tmp", folder / "b.kv.elsewhere.1.0.tmp"
    mine, dead = folder / f"c.kv.{_machine()}.{os.getpid()}.0.tmp", folder / f"d.kv.{_machine()}.{ended.pid}.0.tmp"
    for path in (stale, fresh, mine, dead):
        path.write_bytes(b"half")
    age(stale, 10_000)
    FileStore(tmp_path, layout).put(name_of(2), block_of(layout, 2))
    assert (fresh.exists(), mine.exists()) == (True, True)
    assert (stale.exists(), dead.exists()) == (False, False)


def test_files_of_others_are_neither_counted_nor_removed(tmp_path: Path, layout: KVLayout) -> None:
    """The directory may be somebody's home: Kivy's files end with .kv too, and are in folders of any name."""
    of_ours = tmp_path / layout.fingerprint()
    others = [
        *(tmp_path / "app" / "ui" / name for name in ("main.kv", "main.pin", "draft.tmp", "a.kv.elsewhere.1.0.tmp")),
        *(of_ours / "other" / name for name in ("main.kv", "draft.tmp")),
        *(tmp_path / "notes" / name for name in ("a", "b.tmp", "c.note")),
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0" * 10)
        age(path, 10_000)
    size = FileStore(tmp_path, layout).file_bytes
    store = FileStore(tmp_path, layout, max_bytes=4 * size)
    store.run(store.inner.write_note("n", b"note", 60.0))
    for index in range(20):
        store.put(name_of(index), block_of(layout, index))
    assert store.statistics()["kept_bytes"] <= 4 * size
    found = upkeep.verify(tmp_path)
    assert (found.num_orphans, found.removed, found.left) == (0, {}, {})
    assert upkeep.remove(tmp_path, "") == found.num_blocks > 0
    assert all(path.exists() for path in others)


def test_what_is_pinned_leaves_room_or_the_rest_is_dropped_without_a_look_each_time(
    tmp_path: Path, layout: KVLayout
) -> None:
    size = FileStore(tmp_path, layout).file_bytes
    disk = CountingDisk()
    store = FileStore(tmp_path, layout, disk, max_bytes=64 * size, pinned_share=1)
    names = [name_of(index) for index in range(100)]
    for index in range(60):
        assert store.put(names[index], block_of(layout, index))
    assert store.run(store.inner.pin(names[:60])) == 60
    for index in range(60, 80):  # little is left beside what is pinned, and what is put last is there
        assert store.put(names[index], block_of(layout, index))
        assert store.path(names[index]).exists()
    for index in range(60, 100):
        store.put(names[index], block_of(layout, index))
        store.run(store.inner.pin([names[index]]))
    num_scans = disk.scanned.count(tmp_path)
    for index in range(300, 332):
        assert not store.put(name_of(index), block_of(layout, index)), "it says that it keeps what it throws away"
        assert not store.path(name_of(index)).exists()
    assert disk.scanned.count(tmp_path) - num_scans <= 32 // 2
    assert store.statistics()["dropped_blocks"] >= 32
    assert store.run(store.inner.unpin(names)) > 0
    assert store.put(name_of(400), block_of(layout, 400)), "there is room again"
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= 64 * size


# Trouble.


def test_a_root_that_cannot_be_used_is_a_config_error(tmp_path: Path, layout: KVLayout) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ConfigError, match="cannot keep KV blocks in"):
        FileStore(tmp_path / "file", layout)


def test_what_cannot_be_written_is_counted_and_the_store_goes_on(tmp_path: Path, layout: KVLayout) -> None:
    store = FileStore(tmp_path, layout)
    blocked = tmp_path / layout.fingerprint() / name_of(1).hex()[:2]
    blocked.write_text("in the way")
    with pytest.raises(StoreError, match="cannot write"):
        store.put(name_of(1), block_of(layout, 1))
    assert store.statistics()["dropped_blocks"] == 1
    blocked.unlink()
    assert store.put(name_of(1), block_of(layout, 1))


FULL_DISK = """
import resource, sys
sys.path[:0] = [sys.argv[2], sys.argv[3]]
from pathlib import Path
from kv_support import make_layout
from kvferry.core.errors import StoreError
from sync_store import FileStore
layout = make_layout()
store = FileStore(sys.argv[1], layout)
layers = [memoryview(bytes(layout.span_bytes(layer))) for layer in range(layout.num_layers)]
limit = layout.block_bytes // 2
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
if store.put(bytes(32), layers) or store.statistics()["dropped_blocks"] != 1:
    sys.exit("the disk was not full")
assert not [path for path in Path(sys.argv[1]).rglob("*") if path.is_file()], "a half-written file was left"
"""


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL], ids=["unsupported", "invalid"])
def test_a_file_system_that_allocates_nothing_ahead_is_written_to(
    tmp_path: Path, layout: KVLayout, number: int
) -> None:
    class UnallocatingDisk(Disk):
        def allocate(self, descriptor: int, num_bytes: int) -> None:
            raise OSError(number, os.strerror(number))

    store = FileStore(tmp_path, layout, UnallocatingDisk())
    assert store.put(name_of(1), block_of(layout, 1))
    assert store.path(name_of(1)).stat().st_size == store.file_bytes


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """The operating system refuses the second half of the block."""
    subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path), SUPPORT, STORES], check=True)


# Several processes.

WRITER = """
import sys
sys.path[:0] = [sys.argv[2], sys.argv[3], sys.argv[3] + "/../media"]
from kv_support import make_layout
from test_file import block_of, name_of
from sync_store import FileStore
store = FileStore(sys.argv[1], make_layout())
for index in range(int(sys.argv[4])):
    store.put(name_of(index), block_of(make_layout(), index))
    if index == 0:
        print("begun", flush=True)
"""


def start_writer(root: Path, num_blocks: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(root), SUPPORT, STORES, str(num_blocks)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_share_a_store(store: FileStore, layout: KVLayout, tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, 40) for _ in range(3)]
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    for index in range(40):
        assert fetch(store, layout, index) == bytes_of(block_of(layout, index))
    assert store.match([name_of(index) for index in range(41)]) == 40
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_writer_killed_in_the_middle_leaves_whole_blocks_only(
    store: FileStore, layout: KVLayout, tmp_path: Path
) -> None:
    for _ in range(3):
        writer = start_writer(tmp_path, 100_000)
        assert writer.stdout is not None
        writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
        names = {path.stem for path in tmp_path.rglob("*.kv")}
        assert names
        for index in range(len(names) + 1):
            found = fetch(store, layout, index)
            assert found is None or found == bytes_of(block_of(layout, index))
        assert store.statistics().get("corrupt_blocks", 0) == 0


# What is gone.


def test_blocks_that_are_gone_are_told_once(tmp_path: Path, layout: KVLayout) -> None:
    size = FileStore(tmp_path, layout).file_bytes
    store = FileStore(tmp_path, layout, max_bytes=10 * size)
    store.watch()
    for index in range(12):
        store.put(name_of(index), block_of(layout, index))
        os.utime(store.path(name_of(index)), (index, index))
    gone = {name_of(index) for index in range(12) if not store.path(name_of(index)).exists()}
    assert gone
    assert set(store.take_removed()) == gone
    assert store.take_removed() == []


def test_also_those_that_another_removed(tmp_path: Path, layout: KVLayout) -> None:
    size = FileStore(tmp_path, layout).file_bytes
    store = FileStore(tmp_path, layout, max_bytes=32 * size)
    store.watch()
    for index in range(3):
        store.put(name_of(index), block_of(layout, index))
    store.path(name_of(1)).unlink()
    assert store.take_removed() == []
    store.put(name_of(3), block_of(layout, 3))  # it looks at the directory, as every 1/32 of the bound
    assert store.take_removed() == [name_of(1)]


def test_a_read_for_nothing_is_told(tmp_path: Path, layout: KVLayout) -> None:
    store = FileStore(tmp_path, layout)
    assert fetch(store, layout, 1) is None
    assert store.take_removed() == [], "nobody has asked"
    store.watch()
    assert fetch(store, layout, 1) is None
    assert store.take_removed() == [name_of(1)]
    store.put(name_of(2), block_of(layout, 2))
    store.delete(name_of(2))
    store.put(name_of(2), block_of(layout, 2))
    assert store.take_removed() == [], "it is there again"


def test_a_block_that_another_user_wrote_for_themselves_alone_is_absent_and_is_replaced(layout: KVLayout) -> None:
    """Root may read all, so root becomes another user for this."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o777)
        effective = os.geteuid()
        if effective == 0:
            os.seteuid(65534)
        try:
            store = FileStore(root, layout)
            for index in (0, 1):
                store.put(name_of(index), block_of(layout, index))
            others = file_of(root, 1)
            others.chmod(0)
            if effective == 0:
                os.seteuid(0)
                os.chown(others, 0, 0)
                os.seteuid(65534)
            assert store.match([name_of(0), name_of(1)]) == 1
            assert fetch(store, layout, 1) is None
            if effective == 0:  # else it is one's own, and counts as one's own to renew
                assert store.put(name_of(1), block_of(layout, 1))
                assert store.match([name_of(0), name_of(1)]) == 2
        finally:
            os.seteuid(effective)


def test_a_fifo_in_place_of_a_file_holds_nobody(store: FileStore, tmp_path: Path, layout: KVLayout) -> None:
    """A read of it would never return."""
    store.put(name_of(0), block_of(layout, 0))
    store.run(store.inner.write_note("n", b"told", 60))
    for path in (file_of(tmp_path, 0), *tmp_path.glob("notes/*.note")):
        path.unlink()
        os.mkfifo(path)
    assert fetch(store, layout, 0) is None
    assert store.run(store.inner.read_note("n")) is None
    assert store.put(name_of(0), block_of(layout, 0))
    assert fetch(store, layout, 0) == bytes_of(block_of(layout, 0))
    store.run(store.inner.write_note("n", b"again", 60))
    assert store.run(store.inner.read_note("n")) == b"again"
