"""A pipe that nobody writes to, in place of each file that a flag or an argument names: the command ends, in words."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from cyclopts import App

from kvferry.cli.flag_sources import Command
from kvferry.cli.main import app
from support.warm import Program

ENDS_S = 120
"""Far more than a command waits for a pipe (10 s), as all of them start at the same time."""

SPEC = """
name = "chat"
model = "kvferry/tiny-python"
mode = "pooling"
[role.prefill]
max = 2
[role.decode]
max = 2
[scale]
ttft = "1s"
itl = "50ms"
"""
TRACE = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n'

WRITTEN = frozenset({"--write", "--chart", "--plot", "--store-folder"})
"""Where something is written, which no reader waits for."""
NAMED = frozenset({"--rules", "--key-file"})
"""Files that are only named in what is printed."""
INTERNAL = frozenset({"--group"})
"""Set by the supervisor alone."""


def leaves(group: App, path: Command = ()) -> Iterator[Command]:
    for name in group:
        if name.startswith("-"):
            continue
        if group[name].default_command is None:
            yield from leaves(group[name], (*path, name))
        else:
            yield (*path, name)


def is_path(hint: Any) -> bool:
    return hint is Path or any(map(is_path, get_args(hint)))


def files_of(command: Command) -> Iterator[str]:
    """The flags, and the positional arguments by their names, that are paths."""
    leaf = app
    for name in command:
        leaf = leaf[name]
    for argument in leaf.assemble_argument_collection(parse_docstring=False):
        if is_path(argument.hint):
            flags = [name for name in argument.names if name.startswith("--")]
            yield flags[0] if flags and not argument.field_info.is_positional_only else argument.name


BEFORE: dict[Command, list[str]] = {
    ("router",): ["--decode-url=http://127.0.0.1:9", "--port=0"],
    ("fleet", "recommend"): ["--router=http://127.0.0.1:9"],
    ("fleet", "list"): ["--router=https://127.0.0.1:9"],
    ("cache", "warm"): ["DOCUMENT", "--url=https://127.0.0.1:9"],
    ("why",): ["https://127.0.0.1:9"],
    ("cache", "import"): ["FOLDER"],
    ("simulate",): ["SPEC", "--trace=TRACE"],
    ("ask",): ["https://127.0.0.1:9", "prompt"],
    **{(name,): ["https://127.0.0.1:9"] for name in ("chat", "bench", "doctor", "status")},
    ("trace", "record"): ["https://127.0.0.1:9"],
}
"""What a command needs besides the pipe."""
INSTEAD: dict[tuple[Command, str], list[str]] = {
    (("router",), "--tls-key"): ["--decode-url=http://127.0.0.1:9", "--port=0", "--tls-cert=DOCUMENT"],
    (("doctor",), "--bundle"): ["SPEC"],
    (("simulate",), "--spec"): ["--trace=TRACE"],
    (("simulate",), "--trace"): ["SPEC"],
    (("plan",), "--times"): ["--trace=TRACE"],
    (("cache", "import"), "--store"): ["DOCUMENT"],
    (("cache", "export"), "--store"): ["NEW"],
    (("cache", "export"), "--archive"): ["FOLDER"],
    (("cache", "rm"), "--store"): ["--all"],
}
LIKE_A_ROUTER = (("serve",), ("prefill",), ("decode",), ("picker",))
"""Their flags that name files are a router's, and read by the same code."""
LIKE_A_LIST = tuple(("fleet", name) for name in ("add", "drain", "remove", "role"))


def cases() -> Iterator[tuple[Command, str]]:
    for command in leaves(app):
        if command not in (*LIKE_A_ROUTER, *LIKE_A_LIST):
            yield from ((command, file) for file in files_of(command) if file not in WRITTEN | NAMED | INTERNAL)


def test_flags_that_name_files_are_the_same_everywhere() -> None:
    known = {*files_of(("router",)), *files_of(("fleet", "list"))}
    assert not {file for command in (*LIKE_A_ROUTER, *LIKE_A_LIST) for file in files_of(command)} - known


@pytest.mark.parametrize(
    ("command", "file"), list(cases()), ids=lambda one: " ".join(one) if isinstance(one, tuple) else one
)
def test_no_command_waits_for_a_pipe(command: Command, file: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "FOLDER").mkdir()
    for name, text in (("DOCUMENT", "text"), ("SPEC", SPEC), ("TRACE", TRACE)):
        (tmp_path / name).write_text(text)
    names = re.compile(r"(^|=)(FOLDER|DOCUMENT|SPEC|TRACE|NEW)$")
    before = INSTEAD.get((command, file), BEFORE.get(command, []))
    given = [names.sub(rf"\1{tmp_path}/\2", one) for one in before]
    pipe = str(tmp_path / "pipe")
    is_argument = file in ("--spec", "--store", "--archive") or (file == "--trace" and command == ("cache", "simulate"))
    if is_argument:
        given = [*given, pipe] if file == "--archive" else [pipe, *given]
    else:
        given = [*given, f"{file}={pipe}"]
    code = f"import sys; from kvferry.cli.main import main; sys.exit(main({[*command, *given]}))"
    done = Program(code, tmp_path, KVFERRY_STATE_DIR=str(tmp_path / "state")).end(timeout=ENDS_S)
    assert done.returncode in (1, 2), done.stderr
    assert "pipe" in done.stderr or file == "--store"
    assert "Traceback" not in done.stderr
