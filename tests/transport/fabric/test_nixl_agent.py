"""Agents of NIXL start one at a time, whatever another process of the user does."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.transport.fabric.nixl_agent import exclusive_start
from support.libraries import require_library


class Others:
    """Processes that start agents one after the other, as long as `turns` lasts, and a clock on which each look of the
    waiting process takes 10 s. The last holder keeps its turn if it `hangs`."""

    def __init__(self, path: Path, turns: int, *, hangs: bool = False) -> None:
        self._file, self._turns, self._hangs, self._now = path.open("w+b"), turns, hangs, 0.0
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def monotonic(self) -> float:
        self._now += 10.0
        if self._now % 50.0 == 0.0:
            self._turns -= 1
            if self._turns > 0:
                os.pwrite(self._file.fileno(), self._turns.to_bytes(8, "little") * 2, 0)
            elif not self._hangs:
                self._file.close()
        return self._now

    def wall(self) -> float:
        return self._now


def test_however_many_agents_start_each_gets_its_turn(tmp_path: Path) -> None:
    others = Others(tmp_path / "lock", turns=20)
    with exclusive_start(tmp_path / "lock", 60.0, others):
        assert others.monotonic() > 900.0


def test_who_waits_for_one_that_hangs_is_told_which(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"process 1 has been starting NIXL for 60 s and holds .*lock"):
        with exclusive_start(tmp_path / "lock", 60.0, Others(tmp_path / "lock", turns=4, hangs=True)):
            pytest.fail("the turn is another's")


@pytest.mark.processes
def test_agents_that_start_at_once_and_a_plain_exit() -> None:
    """NIXL has hung when two processes made agents at the same instant, and crashed at their exit."""
    require_library("nixl")
    program = (
        "import secrets\nfrom kvferry.transport.fabric.nixl_agent import NixlAgent\n"
        "agent = NixlAgent(secrets.token_hex(4), ['UCX'], 0, serves=True)\nprint('made', flush=True)\n"
    )
    pipe = subprocess.PIPE
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=pipe, text=True) for _ in range(2)]
    for process in processes:
        assert process.communicate(timeout=90)[0] == "made\n"
        assert process.returncode == 0
