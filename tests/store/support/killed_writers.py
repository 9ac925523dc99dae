"""Writers of a store that are killed at random instants."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from support.waiting import until

WRITER = """
import asyncio, itertools, os, signal, sys
from kvferry.store.table import find_store
from kvferry.testing.stores import LAYOUT, block_of

async def main(first):
    store = find_store(sys.argv[1]).make(LAYOUT)
    await store.open()
    os.write(1, f"{os.getpid()}\\n".encode())
    for first in itertools.count(first):
        await store.put([block_of(index % 200) for index in range(first, first + 3)])
        await store.delete([block_of((first * 7) % 200).block_hash])

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if os.fork() == 0:
        asyncio.run(main(int(line)))
"""


NUM_KILLS = int(os.environ.get("KVFERRY_KILLS", "0"))


def kill_writers(url: str, num_kills: int, seed: int, look: Callable[[], None]) -> None:
    """Start writers, two at a time, and end each at a random instant."""
    draw = random.Random(seed)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WRITER, url], text=True, bufsize=1, **pipes) as parent:  # type: ignore[call-overload]
        for round_number in range(num_kills // 2):
            pids = [start_child(parent, draw.randrange(200)) for _ in range(2)]
            for pid in pids:
                time.sleep(draw.random() * 0.02)
                os.kill(pid, signal.SIGKILL)
            for pid in pids:
                until(partial(is_gone, pid), interval_s=0.001)
            if round_number % 10 == 2:
                look()
        parent.stdin.close()
    look()


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def start_child(parent: subprocess.Popen[str], first: int) -> int:
    """A writer that has opened the store."""
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(f"{first}\n")
    return int(parent.stdout.readline())
