"""A newcomer's walk: every command of README, of the pages and of `--help` is understood, and the first ones are run as
they stand there, also where there is no home, no compiler and no settings."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs_site.commands import commands as every_command
from kvferry.cli.main import HELP, app, main
from kvferry.cli.serving import instance, serve
from kvferry.fleet.processes.vllm.ports import free_ports

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = str(ROOT / "tests" / "support" / "vllm_pythons" / "on_cpu")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> Iterator[str]:
    """What stands in a page's blocks of shell commands, continued lines joined."""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
        yield re.sub(r"\\\n\s*", "", block)


def commands(page: Path) -> list[str]:
    """The commands of a page; what is quoted may go over several lines."""
    found = []
    for block in blocks(page):
        lines = iter(block.splitlines())
        for line in lines:
            while line.partition(" #")[0].count("'") % 2:
                line += "\n" + next(lines)
            if line.strip():
                found.append(line.strip())
    return found


def examples() -> Iterator[str]:
    """The commands that `--help` shows, continued lines joined."""
    for text in [HELP, *(inspect.getdoc(command.default_command) for command in every_command().values())]:
        yield from re.findall(r"^ {4}(kvferry .*)", re.sub(r"\\\n\s*", "", str(text)), re.MULTILINE)


def kvferrys() -> list[str]:
    own = (one for page in PAGES for one in commands(page) if re.match(r"(\w+=\S+ )*kvferry ", one))
    return sorted({*own, *examples()})


def test_there_are_commands_to_look_at() -> None:
    assert len(kvferrys()) > 12


@pytest.mark.parametrize("command", kvferrys())
def test_every_command_is_understood(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Read by the real command line up to the start of processes, which is left out."""
    started: list[Any] = []
    for module in (serve, instance):
        monkeypatch.setattr(module, "run_attended", lambda *what, **more: started.append(what) or 0)
        monkeypatch.setattr(module, "run_foreground", lambda *what: started.append(what) or 0)
        monkeypatch.setattr(module, "check_before_start", lambda *what, **more: None)
    monkeypatch.setattr("kvferry.router.server.run_router", lambda *what, **more: started.append(what) or 0)
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", "as the pages say")
    words = shlex.split(
        command.partition(" #")[0].partition(" | ")[0].partition(" > ")[0].replace("MODEL", "kvferry/tiny-python")
    )
    words = words[words.index("kvferry") + 1 :]
    if "vllm" in words:
        monkeypatch.setenv("KVFERRY_ENGINE_PYTHON", VLLM_PYTHON)
        words = [VLLM_PYTHON if word.endswith("/bin/python") else word for word in words]
    if (
        words[0] not in ("serve", "prefill", "decode", "router") or "--tls-cert" in words
    ):  # these do something by themselves, or need files
        assert app.parse_args(words, exit_on_error=False)
        return
    assert main(["router", "--decode-url=d:1"] if words == ["router", "…"] else words) == 0
    assert started


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_else_pages_tell_to_run_is_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(page):
        for target in re.findall(r"\bmake ([a-z][a-z-]*)", command):
            assert target in targets, command
        for script in re.findall(r"\bscripts/[\w.]+", command):
            assert (ROOT / script).is_file(), command
    extras = re.findall(r"kvferry\[(\w+)\]", page.read_text())
    assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)


# README's first commands, as they stand there.


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with `kvferry`, as an environment that was sourced has it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "kvferry"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvferry.cli.main "$@"\n')
    script.chmod(0o755)
    for name in ("sh", "curl", "cat"):
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"there is no {name}")
        (folder / name).symlink_to(found)
    return folder


def readme_serves() -> tuple[str, str]:
    """README's first command that serves, and the request to it."""
    found = commands(ROOT / "README.md")
    first = next(number for number, one in enumerate(found) if one.startswith("kvferry serve"))
    return found[first], next(one for one in found[first:] if one.startswith("curl "))


@pytest.mark.processes
@pytest.mark.full(in_every_part=True)
@pytest.mark.parametrize(
    "bare",
    [pytest.param(False, id="as usual"), pytest.param(True, id="no home, no compiler", marks=pytest.mark.full)],
)
def test_readme_serves_and_answers(bare: bool, programs: Path, tmp_path: Path) -> None:
    serves, asks = readme_serves()
    (port,) = free_ports(1)
    more = {"KVFERRY_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if bare:
        (tmp_path / "temporary").mkdir()
        environment = {**more, "PATH": str(programs), "TMPDIR": str(tmp_path / "temporary"), "HOME": "/proc/nowhere"}
    else:
        environment = {**os.environ, **more, "PATH": f"{programs}:{os.environ['PATH']}"}
    log = tmp_path / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            ["sh", "-c", f"exec {serves}"], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == f"kvferry is up: http://127.0.0.1:{port}", log.read_text()
            done = subprocess.run(
                ["sh", "-c", asks.replace("127.0.0.1:8000", f"127.0.0.1:{port}")],
                check=True,
                capture_output=True,
                text=True,
                timeout=60,
                env=environment,
            )
            answer = json.loads(done.stdout)
            assert len(answer["choices"][0]["text"]) > 10
            assert "timeline" in answer
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
        finally:
            if process.poll() is None:
                process.kill()
    said = log.read_text()
    assert "Traceback" not in said
    assert ("run in Python, which is slower" in said) == bare
