"""A process of kvferry's that a supervisor has started.

python -m kvferry.fleet.processes.member_main TITLE… --settings-fd N --ready-fd N

TITLE describes the process in a list of processes, and is not read. The first descriptor has the settings
(`process_settings`), and the second takes the start messages (`ready`).
"""

from __future__ import annotations

import sys

from kvferry.core.runtime.process_exit import exit_code_of, exit_process
from kvferry.core.runtime.streams import prepare_streams
from kvferry.fleet.processes.process_settings import JoiningRankProcess, ProcessSettings, RouterProcess, receive
from kvferry.fleet.processes.ready import ReadyWriter
from kvferry.fleet.processes.running import run_process
from kvferry.observe.logs import LogConfig, set_up_logging


def run_member(settings: ProcessSettings, ready: int) -> int:
    """Run the process of these settings. It reports its start to the descriptor `ready`. Returns the exit code."""
    match settings:
        case RouterProcess():
            name = "router"
        case JoiningRankProcess():
            name = "rank"
        case _:
            name = "engine" if settings.role == "both" else settings.role
    set_up_logging(settings.log, name)
    return run_process(settings, ReadyWriter(ready))


def main(arguments: list[str]) -> int:
    """Run the process that these arguments describe. Returns the exit code. Errors are one line on standard error."""
    set_up_logging(LogConfig())
    numbers = dict(zip(arguments[-4::2], arguments[-3::2], strict=True))
    settings, ready = int(numbers["--settings-fd"]), int(numbers["--ready-fd"])
    return exit_code_of(lambda: run_member(receive(settings), ready))


if __name__ == "__main__":
    prepare_streams()
    exit_process(main(sys.argv[1:]))
