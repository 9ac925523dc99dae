"""Last lines of a member's log, and the reason of its exit in them."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.core.errors import ConfigError, KvferryError, UnsupportedModel
from kvferry.fleet.processes.exit_cause import ExitCause

EXIT_USER_ERROR = 2
"""Exit code of a process with wrong settings; a restart would end in the same way."""
ERROR_PREFIX = "kvferry: error: "
"""How the line begins in which a process reports wrong settings."""


def exit_code_of(run: Callable[[], int]) -> int:
    """The exit code of a process that runs this, at its edge: a known error is one line on standard error."""
    try:
        return run()
    except (ConfigError, UnsupportedModel) as error:
        return report_error(str(error), EXIT_USER_ERROR)
    except KvferryError as error:
        return report_error(str(error), 1)
    except KeyboardInterrupt:
        warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that cannot be awaited any more
        return 130


def report_error(text: str, code: int) -> int:
    """Write an error as one line on standard error; returns `code`."""
    sys.stderr.write(f"{ERROR_PREFIX}{' '.join(text.split()).rstrip('.')}\n")
    return code


@dataclass(frozen=True)
class Ended:
    """A member's end. `reason`: how, and if it never served, why; `is_misconfigured`: its settings are wrong."""

    reason: str
    is_misconfigured: bool = False


class LogTail:
    """The last lines of a member's log."""

    max_lines = 20

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=self.max_lines)
        self._first_cause = ExitCause()

    def add(self, line: str, *, has_served: bool) -> None:
        """The next line. Once it serves, errors are those of requests."""
        self.lines.append(line)
        if not has_served:
            self._first_cause.feed(line)

    def explain(self, code: int | None, how: str, *, has_served: bool) -> Ended:
        """Why it has ended, with this exit code. `how`: what is known without its words."""
        if has_served:
            return Ended(how)
        if code == EXIT_USER_ERROR:
            for line in reversed(self.lines):
                if line.startswith(ERROR_PREFIX):
                    return Ended(line.removeprefix(ERROR_PREFIX), is_misconfigured=True)
        cause = self._first_cause.text
        return Ended(f"{how} while starting" + (f": {cause}" if cause else ""))
