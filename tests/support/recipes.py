"""Recipes of docs/cookbook.md, run as they stand there: their commands, in order, and what the page says they print.

Ports of the page are replaced by free ones, addresses of machines by 127.0.0.1, and a server runs until the recipe has
ended. In what is printed, numbers and fingerprints are not compared, as a layout's depends on the processor; `…` stands
for any text, and a line of it for any lines.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from support.ports import free_port

PAGE = Path(__file__).parents[2] / "docs" / "cookbook.md"
_SERVER = re.compile(r"^(kvferry (serve|prefill|decode|router|picker) |valkey-server|envoy )", re.MULTILINE)
_BLOCK = re.compile(r"```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PORT = re.compile(r"(?<=[: ])(80\d\d|81\d\d|90\d\d|6379|10000)\b")
_START_S, _END_S = 240.0, 30.0


class Step(NamedTuple):
    """A block of the page: a command with the lines that it prints, or a file."""

    kind: str
    text: str
    printed: list[str]


def recipes() -> dict[str, list[Step]]:
    """The steps of each recipe by its title."""
    sections = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {title: list(_steps(text)) for title, text in zip(sections[::2], sections[1::2], strict=True)}


def _steps(section: str) -> Iterator[Step]:
    blocks = _BLOCK.findall(section)
    for (kind, text), (following, printed) in zip(blocks, [*blocks[1:], ("end", "")], strict=True):
        if kind == "":
            continue
        yield Step(kind, text, printed.splitlines() if kind == "bash" and not following else [])


class Kitchen:
    """Runs the steps of one recipe in a folder."""

    def __init__(self, folder: Path, environment: Mapping[str, str], ends: ExitStack) -> None:
        self._folder, self._environment, self._ends = folder, environment, ends
        self._ports: dict[str, str] = {}

    def run(self, step: Step) -> None:
        """Run a command, or write a file whose first line is its name."""
        text = self._local(step.text)
        if step.kind != "bash":
            name = re.match(r"# (\S+)", text)
            assert name is not None, f"the file has no name: {text[:60]}"
            (self._folder / name[1]).write_text(text)
        elif _SERVER.search(text):
            self._ends.enter_context(self._serving(text, step.printed))
        else:
            command = ["bash", "-euo", "pipefail", "-c", text]
            done = subprocess.run(
                command,
                cwd=self._folder,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_START_S,
                check=False,
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}"
            missing = _missing(step.printed, done.stdout, in_order=True)
            assert not missing, f"{text}\ndoes not print {missing}, but\n{done.stdout}"

    def _local(self, text: str) -> str:
        text = re.sub(r"\b10\.0\.0\.\d\b|\b0\.0\.0\.0\b", "127.0.0.1", text)
        return _PORT.sub(lambda port: self._ports.setdefault(port[0], str(free_port())), text)

    @contextmanager
    def _serving(self, text: str, printed: list[str]) -> Iterator[None]:
        log = self._folder / f"log-{len(list(self._folder.glob('log-*')))}"
        command = ["bash", "-euc", re.sub(_SERVER, r"exec \1", text, count=1)]
        environment = {**self._environment, "KVFERRY_PORT": self._local(" 8000").strip()}
        with log.open("w") as out:
            process = subprocess.Popen(command, cwd=self._folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + _START_S
            while missing := _missing([self._local(line) for line in printed], log.read_text(), in_order=False):
                assert process.poll() is None, f"{text}\nended: {log.read_text()}"
                assert time.monotonic() < deadline, f"{text}\ndoes not print {missing}, but\n{log.read_text()}"
                time.sleep(0.1)  # between two looks at the log
            yield
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _missing(expected: list[str], printed: str, *, in_order: bool) -> list[str]:
    """The expected lines that were not printed. `in_order`: nothing else may be printed between them."""
    patterns = [_pattern(line) for line in expected]
    if in_order and expected:
        whole = "\n".join(r"(?s:.*?)" if line.strip() == "…" else _pattern(line) for line in expected)
        return [] if re.fullmatch(whole.replace("\n(?s:.*?)", r"(?s:.*?)"), _plain(printed)) else expected
    lines = _plain(printed).splitlines()
    return [
        line
        for line, pattern in zip(expected, patterns, strict=True)
        if not any(re.fullmatch(pattern, printed_line) for printed_line in lines)
    ]


def _plain(text: str) -> str:
    """The lines that are not empty, without numbers and fingerprints, and with each bar and each space as one
    character."""
    lines = (re.sub(r"\b[0-9a-f]{32}\b|\d[\d.,]*", "0", re.sub(r"[▁-█═]+", "═", line)) for line in text.splitlines())
    return "\n".join(" ".join(line.split()) for line in lines if line.strip())


def _pattern(line: str) -> str:
    return re.escape(_plain(line)).replace("…", ".*")


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Variables of the recipes' commands: `kvferry` of this Python, and a state folder of their own."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "kvferry").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvferry.cli.main "$@"\n')
    (programs / "kvferry").chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {
        "PATH": path,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KVFERRY_STATE_DIR": str(folder / "state"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
    return inherited | own | more
