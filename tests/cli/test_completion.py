"""Shells complete kvferry's commands and flags with the scripts that it prints."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script for each shell, and `kvferry` in it."""
    folder = tmp_path_factory.mktemp("completion")
    for shell, name in (("bash", "kvferry.bash"), ("zsh", "_kvferry"), ("fish", "kvferry.fish")):
        command = [sys.executable, "-m", "kvferry.cli.main", "completion", shell]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        (folder / name).write_text(text)
    (folder / "kvferry").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvferry.cli.main "$@"\n')
    (folder / "kvferry").chmod(0o755)
    return folder


def completed(shell: str, script: str, folder: Path) -> str:
    """The output of a script of the shell. Skips where the shell is not installed."""
    if (path := shutil.which(shell)) is None:
        pytest.skip(f"needs {shell}")
    options = {"zsh": ["-f"], "fish": ["--no-config"], "bash": ["--norc"]}[shell]
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder), "TERM": "dumb"}
    done = subprocess.run(
        [path, *options, "-c", script], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_fish_completes_commands_and_flags(scripts: Path) -> None:
    source = f"source {scripts}/kvferry.fish; "
    assert "serve" in completed("fish", source + "complete -C 'kvferry se'", scripts)
    assert "--prefill" in completed("fish", source + "complete -C 'kvferry serve --pref'", scripts)


def test_bash_completes_commands_and_flags(scripts: Path) -> None:
    asks = f"""source {scripts}/kvferry.bash
function_of() {{ complete -p kvferry | sed -E 's/.*-F ([^ ]+).*/\\1/'; }}
words() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${{#COMP_LINE}}; $(function_of)
  printf '%s\\n' "${{COMPREPLY[@]}}"; }}
words kvferry se
words kvferry serve --pref
"""
    lines = completed("bash", asks, scripts).split()
    assert {"serve", "--prefill"} <= set(lines)


def test_zsh_completes_commands_and_flags(scripts: Path) -> None:
    """In a pseudoterminal of zsh's own, as its completion runs in the line editor only."""
    asks = f"""
zmodload zsh/zpty
zpty shell 'zsh -f'
zpty -w shell 'PS1=READY; fpath=({scripts} $fpath); autoload -Uz compinit; compinit -u -D; echo loa""ded'
zpty -r -m shell line '*loaded*'
zpty -w -n shell $'kvferry serve --pref\t'
zpty -r -m shell line '*--prefill *'
print -r -- "$line"
zpty -d shell
"""
    assert "--prefill" in completed("zsh", asks, scripts)
