"""The reason of a member's exit, in the last lines of its log.

A Python program with several processes (vLLM) ends with several tracebacks: first the process that failed logs one,
then the processes that waited for it. The reason is the last line of the first traceback.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from kvferry.core.runtime.process_exit import ERROR_PREFIX, EXIT_USER_ERROR

_PREFIX = re.compile(
    r"(?:\x1b\[[\d;]*m)*(?P<source>\([^()]* pid=\d+\) )?(?:\x1b\[[\d;]*m)*"
    r"(?:(?P<level>[A-Z]+) \d\d-\d\d [\d:.]+ \[[^\]]+\] ?)?"
)
"""The beginning of each line of vLLM's log: its process and, unless the line was printed, level, time and place."""
_BEGIN = "Traceback (most recent call last)"
_LIBRARY = re.compile(r"[EF]\d{4} [\d:.]+ +\d+ \S+:\d+\] (.+)")
"""An error of a C++ library that logs like glog, such as NIXL. The library's exceptions often have less information."""
_USAGE = re.compile(r"\S+: error: (.+)")
"""How `argparse` reports an error."""
_LOCATION = re.compile(r'  File "(.+)", line (\d+)')
_MODULE = re.compile(r"^(?:\w+\.)+(?=\w+(?::|$))")


class ExitCause:
    """Call `feed` with each line. `text`: the first cause in the lines, as one line; empty: none."""

    max_chars = 1000

    def __init__(self) -> None:
        self.text = ""
        self._open: dict[str, str] = {}
        """The place of the innermost frame of a traceback that is being read, by process."""
        self._message_of: str | None = None
        """The process whose next line may continue the message."""
        self._library = ""

    def feed(self, line: str) -> None:
        """Process the next line, unchanged."""
        prefix = _PREFIX.match(line)
        assert prefix is not None
        source, level, text = prefix["source"] or "", prefix["level"] or "", line[prefix.end() :]
        if self.text:
            self._continue(source, text)
        elif level in ("DEBUG", "INFO", "WARNING"):
            return  # errors before this line were no reason to end
        elif text.startswith(_BEGIN):
            self._open[source] = ""
        elif source in self._open and (not text or text[0] in " |+~^"):
            if location := _LOCATION.match(text):
                self._open[source] = f"{location[1]}:{location[2]}"
        elif source in self._open:
            self._end(_MODULE.sub("", text), self._open[source])
            self._message_of = source
        elif match := _LIBRARY.match(text):
            self._library = match[1]
        elif match := _USAGE.match(text):
            self.text = match[1]

    def _end(self, exception: str, location: str) -> None:
        if ":" not in exception:  # the error has no message
            exception = f"{exception} in {location}"
        self.text = (f"{self._library} ({exception})" if self._library else exception)[: self.max_chars]

    def _continue(self, source: str, text: str) -> None:
        """Messages of several lines are indented from the second one, as pydantic's are."""
        if source != self._message_of:
            return
        if text.startswith("  ") and "For further information" not in text:
            self.text = f"{self.text}: {text.strip().partition(' [type=')[0]}"[: self.max_chars]
        else:
            self._message_of = None


@dataclass(frozen=True)
class Ended:
    """The end of a member. `reason`: how it ended and, if it never served, why; `is_misconfigured`: True if its
    settings are wrong."""

    reason: str
    is_misconfigured: bool = False


class LogTail:
    """The last lines of a member's log."""

    max_lines = 20

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=self.max_lines)
        self._first_cause = ExitCause()

    def add(self, line: str, *, has_served: bool) -> None:
        """Process the next line. Once the member serves, errors belong to requests."""
        self.lines.append(line)
        if not has_served:
            self._first_cause.feed(line)

    def explain(self, code: int | None, exit_text: str, *, has_served: bool) -> Ended:
        """The reason of its end, with this exit code. `exit_text`: a description of the end, without the log."""
        if has_served:
            return Ended(exit_text)
        if code == EXIT_USER_ERROR:
            for line in reversed(self.lines):
                if line.startswith(ERROR_PREFIX):
                    return Ended(line.removeprefix(ERROR_PREFIX), is_misconfigured=True)
        cause = self._first_cause.text
        return Ended(f"{exit_text} while starting" + (f": {cause}" if cause else ""))
