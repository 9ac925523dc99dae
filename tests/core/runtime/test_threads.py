"""Struct types that several threads use at once."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvferry
from kvferry.core.runtime.threads import NICENESS, run_in_thread

ROOT = Path(kvferry.__file__).parent
OWNER = "core/runtime/threads.py"
PERMITTED = {
    OWNER,
    "core/runtime/process_exit.py",  # its threads run exit handlers
    "engine/executor/link.py",  # a timer that closes a socket
    "fleet/backends/ray/actor.py",  # a timer that ends the process
    "sim/machine.py",  # its threads run one at a time
    "transport/transfer_loop.py",  # a loop on a thread of the owner's class
}
STARTS = {
    "threading": {"Thread", "Timer"},
    "concurrent.futures": {"ThreadPoolExecutor"},
    "_thread": {"start_new_thread"},
    "asyncio": {"run", "Runner"},
    "uvloop": {"run", "new_event_loop"},
}
"""Names that start threads, or a loop whose `to_thread` does, by module."""

THREADS = """
import sys, threading
import msgspec
from kvferry.core.runtime.threads import Thread

sys.setswitchinterval(1e-6)
for number in range(300):
    inner = [
        msgspec.defstruct(f"Inner{number}_{index}", [(f"f{field}", int | None, None) for field in range(20)])
        for index in range(8)
    ]
    kind = msgspec.defstruct(f"Outer{number}", [(f"g{index}", field | None, None) for index, field in enumerate(inner)])
    barrier = threading.Barrier(3)

    def decode():
        barrier.wait()
        msgspec.json.decode(b'{"g0": {"f1": 1}, "g7": {"f3": 2}}', type=kind)

    threads = [Thread(decode, name="decodes") for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_decode_a_type_that_was_built() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
async def test_a_long_calculation_goes_on_at_a_low_priority() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def calculate() -> tuple[int, int]:
        before = niceness()
        deadline = time.monotonic() + 30
        while niceness() == before and time.monotonic() < deadline:
            time.sleep(0.01)
        return before, niceness()

    usual = niceness()
    before, after = await run_in_thread(calculate, name="long", normal_s=0.05)
    assert (before, after) == (usual, min(19, usual + NICENESS))
    assert await run_in_thread(niceness, name="short", normal_s=30.0) == usual == niceness()
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(lambda: 1 / 0, name="failing", normal_s=30.0)


def direct_starts(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each start of a thread or loop."""
    if not re.search(r"thread|concurrent|uvloop|asyncio\.[rR]un|from asyncio", source):
        return  # parsing all files takes seconds
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in STARTS.get(ast.unparse(value), ()):
                yield node.lineno, f"{ast.unparse(value)}.{name}"
            case ast.ImportFrom(module=str(module), names=names):
                yield from ((node.lineno, alias.name) for alias in names if alias.name in STARTS.get(module, ()))


def test_threads_start_after_the_struct_types_are_built() -> None:
    """In each process, because all of them start their threads and loops by these classes."""
    starts = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(ROOT.rglob("*.py"))
        if str(path.relative_to(ROOT)) not in PERMITTED and path.relative_to(ROOT).parts[0] != "testing"
        for line, name in direct_starts(path.read_text())
    ]
    assert starts == [], f"use the classes of {OWNER}"


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nthreading.Thread(target=print).start()",
        "from threading import Thread",
        "from concurrent.futures import Future, ThreadPoolExecutor",
        "import concurrent.futures\nconcurrent.futures.ThreadPoolExecutor()",
        "import uvloop\nuvloop.run(main())",
        "import asyncio\nwith asyncio.Runner() as runner: ...",
    ],
)
def test_a_direct_start_is_found(source: str) -> None:
    assert list(direct_starts(source))
