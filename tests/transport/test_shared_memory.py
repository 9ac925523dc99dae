import mmap
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry.core.errors import ConfigError, PeerLost
from kvferry.transport.shared_memory import SharedSegment, owned_segment_names

OWNER = """
import sys
from kvferry.transport.shared_memory import SharedSegment
segment = SharedSegment.create(4096)
segment.buffer[:2] = b"hi"
print(segment.name, flush=True)
sys.stdin.read()
"""


def start_owner() -> tuple[subprocess.Popen[str], str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_new_segment_is_zeros_and_shared() -> None:
    owner = SharedSegment.create(10_000)
    reader, writer = SharedSegment.attach(owner.name), SharedSegment.attach(owner.name, writable=True)
    assert owner.num_bytes == 10_000
    assert bytes(owner.buffer) == bytes(10_000)
    writer.buffer[3] = 7
    assert reader.buffer[3] == 7
    with pytest.raises(TypeError):
        reader.buffer[3] = 1
    for segment in (reader, writer, owner):
        segment.close()
        segment.close()
    with pytest.raises(PeerLost, match="closed it"):
        SharedSegment.attach(owner.name)


def test_a_populated_segment_is_written_to_without_page_faults() -> None:
    num_pages = 512
    segment = SharedSegment.create(num_pages * mmap.PAGESIZE, populated=True)
    view = np.frombuffer(segment.buffer, np.uint8)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    view[:: mmap.PAGESIZE] = 1
    num_faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert num_faults < num_pages // 8
    del view
    segment.close()


def test_closing_an_attached_segment_leaves_it_to_its_owner() -> None:
    owner = SharedSegment.create(4096)
    SharedSegment.attach(owner.name).close()
    assert owner.name in owned_segment_names()
    owner.close()
    assert owner.name not in owned_segment_names()


@pytest.mark.parametrize(
    "name",
    [
        "kvferry-0123456789abcdef-999999999-0",
        pytest.param(f"kvferry-0123456789abcdef-{os.getpid()}-0", id="of this process"),
        "kvferry-0123456789abcdef-1-../../x",
        "../etc/passwd",
        "",
    ],
)
def test_what_is_not_there_cannot_be_attached(name: str) -> None:
    with pytest.raises(PeerLost, match=r"segment"):
        SharedSegment.attach(name)


def test_too_little_shared_memory_is_said_at_once() -> None:
    before = owned_segment_names()
    with pytest.raises(ConfigError, match=r"shared memory.*lower --kv-cache-memory"):
        SharedSegment.create(2**50)
    assert owned_segment_names() == before


def test_a_view_outlives_the_close() -> None:
    segment = SharedSegment.create(4096)
    view = np.frombuffer(segment.buffer, np.uint8)
    segment.buffer[0] = 9
    segment.close()
    assert view[0] == 9
    assert segment.name not in owned_segment_names()


def test_nothing_is_left_of_an_owner_that_is_killed() -> None:
    killed, its_name = start_owner()
    alive, living_name = start_owner()
    before = set(Path("/dev/shm").iterdir())
    mapped = SharedSegment.attach(its_name)
    try:
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate()
        assert bytes(mapped.buffer[:2]) == b"hi", "who has it mapped still reads it"
        with pytest.raises(PeerLost, match="gone"):
            SharedSegment.attach(its_name)
        assert bytes(SharedSegment.attach(living_name).buffer[:2]) == b"hi"
    finally:
        _, stderr = alive.communicate("")
        mapped.close()
    assert stderr == "", "nothing is said about a segment that was not closed"
    assert set(Path("/dev/shm").iterdir()) <= before
    with pytest.raises(PeerLost, match="gone"):
        SharedSegment.attach(living_name)


def test_another_file_that_has_the_number_is_not_taken_for_the_segment(tmp_path: Path) -> None:
    owner, other = SharedSegment.create(4096), SharedSegment.create(4096)
    label, pid, _ = owner.name.rsplit("-", 2)
    _, _, number = other.name.rsplit("-", 2)
    with pytest.raises(PeerLost, match="gone"):
        SharedSegment.attach(f"{label}-{pid}-{number}")
    with (tmp_path / "file").open("wb") as file, pytest.raises(PeerLost, match="gone"):
        SharedSegment.attach(f"{label}-{pid}-{file.fileno()}")
    owner.close()
    other.close()


def test_the_end_of_a_forked_child_takes_nothing() -> None:
    script = """
import os, sys
from kvferry.transport.shared_memory import SharedSegment
segment = SharedSegment.create(4096)
child = os.fork()
if not child:
    sys.exit()
os.waitpid(child, 0)
SharedSegment.attach(segment.name).close()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
