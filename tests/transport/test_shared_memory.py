import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from kvferry.core.errors import ConfigError, PeerLost
from kvferry.transport.shared_memory import SHM_ROOT, SharedSegment, owned_segment_names, sweep_stale_segments

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
    assert not (SHM_ROOT / owner.name).exists()


def test_closing_an_attached_segment_leaves_it_to_its_owner() -> None:
    owner = SharedSegment.create(4096)
    SharedSegment.attach(owner.name).close()
    assert owner.name in owned_segment_names()
    owner.close()
    assert owner.name not in owned_segment_names()


@pytest.mark.parametrize("name", ["kvferry-1-0123456789abcdef", "../etc/passwd", "kvferry-1-../../x", ""])
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
    assert not (SHM_ROOT / segment.name).exists()


def test_what_a_killed_owner_left_is_swept_and_nothing_else() -> None:
    killed, its_name = start_owner()
    alive, living_name = start_owner()
    try:
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate()
        assert (SHM_ROOT / its_name).exists()
        swept = sweep_stale_segments()
        assert its_name in swept
        assert living_name not in swept
        assert not (SHM_ROOT / its_name).exists()
        assert bytes(SharedSegment.attach(living_name).buffer[:2]) == b"hi"
    finally:
        _, stderr = alive.communicate("")
    assert stderr == "", "nothing is said about a segment that was not closed"
    assert not (SHM_ROOT / living_name).exists(), "an owner that ends takes its segment along"


def test_another_container_s_owner_is_not_taken_for_dead() -> None:
    """Its process id means nothing here, but it holds the lock."""
    owner = SharedSegment.create(4096)
    elsewhere = owner.name.replace(f"-{os.getpid()}-", "-999999999-")
    (SHM_ROOT / owner.name).rename(SHM_ROOT / elsewhere)
    assert elsewhere not in sweep_stale_segments()
    owner.close()
    assert elsewhere in sweep_stale_segments()


def test_the_end_of_a_forked_child_takes_nothing() -> None:
    script = """
import os, sys
from kvferry.transport.shared_memory import SHM_ROOT, SharedSegment
segment = SharedSegment.create(4096)
child = os.fork()
if not child:
    sys.exit()
os.waitpid(child, 0)
assert (SHM_ROOT / segment.name).exists()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
