"""One child process: what it says is passed on, and nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fleet.children import child
from kvferry.fleet import launcher
from kvferry.fleet.process import Process, ProcessSpec
from kvferry.fleet.ready import MAX_LINE_BYTES, StartProgress

TALKING = """
print("one")
print("two", file=sys.stderr)
sys.stdout.write("x" * 200000 + "\\\\n" + "no end of line")
sys.stdout.flush()
os.write(ready_fd, b"nonsense\\\\n")
tell(progress=0.25, what="loading")
tell(url="http://here:1")
tell(url="http://twice:1")
sys.exit(3)
""".replace("\\\\n", "\\n")


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


async def test_what_it_says_is_passed_on() -> None:
    lines: list[str] = []
    progress: list[StartProgress] = []
    process = await Process.start(child("talker", TALKING))
    await process.watch(lines.append, progress.append)
    assert process.gone.is_set()
    assert process.returncode == 3
    assert (await process.ready).url == "http://here:1"
    assert progress == [StartProgress(0.25, "loading")]
    assert lines[:2] == ["one", "two"]
    assert "".join(lines[2:]) == "x" * 200000 + "no end of line"
    assert max(map(len, lines)) <= 2 * MAX_LINE_BYTES
    assert any("invalid start message" in line for line in process.last_lines)


async def test_nothing_is_left_open() -> None:
    before = descriptors()
    process = await Process.start(child("quick", "sys.exit(0)"))
    await process.watch(lambda line: None, lambda progress: None)
    process.terminate()
    process.kill()
    assert descriptors() - before == set()


async def test_a_program_that_is_not_there_is_told() -> None:
    lines: list[str] = []
    process = await Process.start(ProcessSpec("nobody", ("/nowhere/program",)))
    await process.watch(lines.append, lambda progress: None)
    assert process.returncode == 1
    assert lines == ["kvferry: error: cannot run /nowhere/program: No such file or directory"]


def test_a_launcher_whose_supervisor_is_gone_does_not_begin() -> None:
    somebody_else = str(os.getppid())
    command = [
        sys.executable,
        launcher.__file__,
        somebody_else,
        "-",
        "self",
        "--",
        sys.executable,
        "-c",
        "print('begun')",
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert (done.stdout, done.stderr) == ("", "kvferry: error: the supervisor ended before its child began\n")
