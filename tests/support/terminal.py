"""A command on a terminal of 80 columns and 24 lines."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A command whose three standard streams are one terminal."""

    def __init__(self, process: subprocess.Popen[bytes], ours: int) -> None:
        self._process, self._ours, self._raw = process, ours, b""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    @property
    def text(self) -> str:
        """Everything that was written so far, without escape sequences; lines that were redrawn are in it again."""
        return _ESCAPES.sub("", self._raw.decode(errors="replace")).replace("\r", "")

    def send(self, text: str) -> None:
        """Type this."""
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C, for the command alone."""
        self._process.send_signal(signal.SIGINT)

    def wait(self, timeout: float = 60) -> int:
        """The exit code, once it has ended and everything was read."""
        code = self._process.wait(timeout)
        self._reading.join(timeout)
        return code

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._ours, 65536)
            except OSError:  # the other end has closed
                return
            if not chunk:
                return
            self._raw += chunk


@contextmanager
def on_terminal(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Terminal]:
    """Run the command; what is left of it is killed at the end."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    full = {**environment, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(command, env=full, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        try:
            yield Terminal(process, ours)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            os.close(ours)
