"""Runs `kvferry` commands where neither torch nor what instances serve with can be imported.

One interpreter has imported the command line, and is forked for each command: to start anew would cost most of a second
each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = """
import json, os, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "safetensors", "starlette", "uvicorn"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from kvferry.cli.main import main

for line in sys.stdin:
    *arguments, out, errors = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, out), (2, errors)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.exit(main(arguments))
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class TorchBlocked:
    """The interpreter that is forked."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`kvferry ARGUMENTS`, to its end."""
        out, errors = self._folder / "out", self._folder / "errors"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([*arguments, str(out), str(errors)]) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(list(arguments), status, out.read_text(), errors.read_text())


@contextmanager
def torch_blocked(folder: Path) -> Iterator[TorchBlocked]:
    """Until the end of the block; `folder` is for what commands say."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, text=True) as process:
        yield TorchBlocked(process, folder)
