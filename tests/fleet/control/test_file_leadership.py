"""One controller acts; who hangs is found by its silence, and ended; nobody else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.fleet.control.file_leadership import FileLeadership, LeaderRecord, holder, is_held, lock_file
from kvferry.fleet.processes.start_time import started_at

HOLDS = """
import sys, time
from pathlib import Path
from kvferry.fleet.control.file_leadership import FileLeadership
lease = FileLeadership(Path(sys.argv[1]))
lease.try_lock()
print(lease.is_held, flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "f" / "controller.lock"


@contextmanager
def another_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "True\n"
            yield process
        finally:
            process.kill()


def test_who_has_it_says_who_it_is(path: Path) -> None:
    lease = FileLeadership(path)
    assert lease.try_lock()
    found = holder(path)
    assert found is not None
    assert (found.pid, found.start_ticks) == (os.getpid(), started_at(os.getpid()))
    assert not found.hangs
    before = path.read_bytes()
    lease.write()
    later = holder(path)
    assert later is not None
    assert later.last_heartbeat_s >= found.last_heartbeat_s
    assert len(path.read_bytes()) == len(before)
    lease.close()
    assert holder(path) is None
    lease.close()  # twice is once
    lease.write()


def test_who_looks_takes_nothing_away(path: Path) -> None:
    """Several commands look at the same time, and none takes another for a controller."""
    lease = FileLeadership(path)
    assert lease.try_lock()
    lease.close()
    with ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(lambda _: is_held(path), range(400)))


def test_who_looks_makes_nothing(path: Path) -> None:
    assert not is_held(path)
    assert holder(path) is None
    assert not path.parent.exists()


def test_the_end_of_a_process_is_the_end_of_its_right(path: Path) -> None:
    with another_process(path) as process:
        assert not FileLeadership(path).try_lock()
        process.kill()
        process.wait()
        lease = FileLeadership(path)
        assert lease.try_lock()
    lease.close()


def test_a_process_that_hangs_is_ended(path: Path) -> None:
    with another_process(path) as process:
        process.send_signal(signal.SIGSTOP)
        found = holder(path)
        assert found is not None
        assert found.pid == process.pid
        silent = msgspec.structs.replace(found, last_heartbeat_s=SYSTEM_CLOCK.monotonic() - LeaderRecord.hung_s - 1)
        assert silent.hangs
        silent.kill()
        assert process.wait(30) == -signal.SIGKILL
        assert not is_held(path)


def test_a_process_that_has_its_number_by_now_is_left_alone(path: Path) -> None:
    with another_process(path) as process:
        LeaderRecord(process.pid, started_at(process.pid) - 1, last_heartbeat_s=0.0).kill()
        LeaderRecord(2**22 + 1, 1, last_heartbeat_s=0.0).kill()  # there is none
        assert process.poll() is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"pid": "x"}', b"\xff" * 300])
def test_a_file_that_says_nothing(path: Path, content: bytes) -> None:
    lease = FileLeadership(path)
    assert lease.try_lock()
    path.write_bytes(content)
    assert holder(path) is None
    assert is_held(path)
    lease.write()
    assert (holder(path) is None) == (len(content) > 128)
    lease.close()


def test_a_file_that_was_removed_is_locked_for_nobody(path: Path) -> None:
    first = lock_file(path)
    assert first is not None
    path.unlink()
    second = lock_file(path)
    assert second is not None
    assert lock_file(path) is None
    os.close(first)
    assert lock_file(path) is None
    os.close(second)
