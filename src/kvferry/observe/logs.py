"""The logging of every kvferry process: level, format, time, instance and request.

    2026-01-31 12:00:00.123 INFO kvferry.router.instances.health: prefill instance http://… is back       text
    {"time":"2026-01-31T12:00:00.123Z","level":"info","instance":"router","logger":"…","message":"…"}   json

Lines go to standard error; times are UTC. The request id of a line comes from the context (`name_request`).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextvars import ContextVar
from typing import Annotated, Any, Literal

import msgspec

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.settings import environment
from kvferry.core.settings.model import COMMON, Settings

INSTANCE_VARIABLE = environment.INSTANCE_NAME
"""Set by a supervisor for its children: their names in the fleet."""

_HELPER_VARIABLE, _HELPER_FORMAT_VARIABLE = "KVFERRY_HELPER_NAME", "KVFERRY_HELPER_LOG_FORMAT"

_request_id: ContextVar[str] = ContextVar("kvferry_request_id", default="")
_QUIET = (
    *("uvicorn", "asyncio", "httpx", "httpcore", "filelock", "urllib3", "huggingface_hub", "transformers"),
    *("matplotlib", "fontTools", "PIL"),
)
"""Loggers of other packages; only their warnings and errors are logged."""


class LogConfig(Settings, frozen=True, kw_only=True):
    """Level and format of the log."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is logged."""

    log_format: Literal["text", "json"] = "text"
    """Format of the log on standard error: text for people, or json, one object per line, for log collectors."""

    verbose: Annotated[bool, COMMON] = False
    """Write log lines to standard error instead of a file. So it is with --log-format json, in a container and under
    systemd, too."""


TEXT = LogConfig()
"""The default: text, from level info on."""


def set_up_logging(config: LogConfig, instance: str = "", handler: logging.Handler | None = None) -> None:
    """Log to standard error, or to `handler`; a second call replaces the first. `instance` is used if no supervisor has
    named this process."""
    helper = os.environ.get(_HELPER_VARIABLE, "")
    name = f"{os.environ.get(INSTANCE_VARIABLE) or instance} {helper}".strip()
    if handler is None:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter(name) if config.log_format == "json" else TextFormatter(helper))
    level = config.log_level.upper()
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for other in _QUIET:
        logging.getLogger(other).setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level]))


def helper_environment(name: str) -> dict[str, str]:
    """Environment variables for a helper process, such as a rank, in which `follow_parent` reads them."""
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
    return {_HELPER_VARIABLE: name, _HELPER_FORMAT_VARIABLE: "json" if is_json else "text"}


def log_format_of_parent() -> Literal["text", "json"]:
    """The parent's log format, for a helper process."""
    return "json" if os.environ.get(_HELPER_FORMAT_VARIABLE) == "json" else "text"


def follow_parent() -> None:
    """Log in a helper process as its parent does, but only warnings and errors: the parent logs the rest."""
    set_up_logging(LogConfig(log_level="warning", log_format=log_format_of_parent()))


name_request = _request_id.set
"""Set the request id for further log lines of this task; empty: none."""


def json_line(instance: str, message: str, level: str = "info", timestamp: float | None = None, **more: Any) -> str:
    """One line of the JSON format; `timestamp`: seconds since the epoch, by default now."""
    head = {
        "time": _stamp(SYSTEM_CLOCK.wall() if timestamp is None else timestamp, "T") + "Z",
        "level": level,
        "instance": instance,
    }
    return msgspec.json.encode({**head, **more, "message": message}).decode()


class TextFormatter(logging.Formatter):
    """One line for each record, plus its traceback. The instance's name is added by the process that merges several
    logs; a helper process's name is added here."""

    def __init__(self, helper: str = "") -> None:
        super().__init__()
        self._helper = f"{helper} " if helper else ""

    def format(self, record: logging.LogRecord) -> str:
        request = _request_of(record)
        message = f"{record.getMessage()} [{request}]" if request else record.getMessage()
        line = f"{_stamp(record.created)} {record.levelname} {self._helper}{record.name}: {message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object for each record, with its traceback and its `fields` (`extra`)."""

    def __init__(self, instance: str) -> None:
        super().__init__()
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {"logger": record.name, **getattr(record, "fields", {})}
        if request := _request_of(record):
            fields["request_id"] = request
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json_line(self._instance, record.getMessage(), record.levelname.lower(), record.created, **fields)


def _request_of(record: logging.LogRecord) -> str:
    """The record's own request id (`extra={"request_id": …}`, from threads that serve many requests), or the
    context's."""
    return str(getattr(record, "request_id", "") or _request_id.get())


def _stamp(timestamp: float, separator: str = " ") -> str:
    """The time in UTC, to the millisecond."""
    return (
        time.strftime(f"%Y-%m-%d{separator}%H:%M:%S", time.gmtime(timestamp)) + f".{int(timestamp * 1000) % 1000:03d}"
    )
