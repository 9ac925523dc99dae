"""Starts the process of a member, whose output and messages go to the files of its folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from kvferry.fleet.backends.local.child import ChildProcess, spawn
from kvferry.fleet.backends.local.folder import MemberFolder
from kvferry.fleet.backends.local.launcher import launch_command
from kvferry.fleet.processes.cpu import Cores
from kvferry.fleet.processes.process import ProcessSpec

Leash = Literal["none", "self", "group"]
"""The processes that end with the one that starts them: see `launcher`."""


@contextmanager
def open_streams(folder: MemberFolder) -> Iterator[tuple[int, int]]:
    """Descriptors for its log and for its messages. Raises `OSError`."""
    log = os.open(folder.log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        messages = os.open(folder.messages, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            yield log, messages
        finally:
            os.close(messages)
    finally:
        os.close(log)


def start_process(spec: ProcessSpec, cores: Cores, folder: MemberFolder, leash: Leash) -> ChildProcess:
    """A new process that runs the member's program on these cores (none: on all). Raises `OSError`."""
    with open_streams(folder) as (log, messages), spec.started_with(messages) as (command, inherits):
        return spawn(
            launch_command(command, cores, leash, str(folder.process)),
            spec.full_environment(folder.path),
            output=log,
            inherits=inherits,
        )
