"""Entry point of the `kvferry` script. It imports little by itself: importing the command line takes about a second, in
which Ctrl-C must end the process without a traceback."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from kvferry.core.runtime.streams import prepare_streams


def main() -> NoReturn:
    """Run the command line of this process, and end it with the exit code."""
    prepare_streams()
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:  # unless it is ignored, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvferry.core.runtime.process_exit import exit_process

    if len(sys.argv) == 1:
        from kvferry.cli.home import main as run_home  # completion needs no other command

        exit_process(run_home())
    from kvferry.fleet.backends.local.spawning import start_fork_process_early

    start_fork_process_early(sys.argv[1:])
    from kvferry.cli.main import main as run

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    exit_process(run())
