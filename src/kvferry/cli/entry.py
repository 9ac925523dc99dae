"""What the `kvferry` script calls. It imports nothing of kvferry's by itself: importing the command line takes about a
second, and Ctrl-C in that second is to end the process without a traceback."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line of this process, and end it with the exit code."""
    _open_closed_streams()
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:  # and not ignored, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvferry.cli.main import main as run
    from kvferry.core.process_end import leave

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    leave(run())


def _open_closed_streams() -> None:
    """Whoever starts a process may have closed its standard streams. Python has none then, and the next file or socket
    that is opened gets their number: what is written to them would go there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, encoding="utf-8")  # noqa: SIM115 - for as long as the process runs
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8")  # noqa: SIM115
