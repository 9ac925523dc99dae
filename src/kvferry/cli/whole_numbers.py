"""Refuses fractions where a flag is a whole number. cyclopts would round them: `--prefill 1.5` would start two."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, get_args

from cyclopts import App, ArgumentCollection

from kvferry.core.errors import ConfigError


def require_whole_numbers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """The last of cyclopts' sources of flags: it checks the values from the command line, the environment and a file.
    Raises `ConfigError` that names the flag or the variable."""
    for argument in arguments:
        kinds = set(_kinds(argument.hint))
        if int not in kinds or float in kinds:
            continue
        for token in argument.tokens:
            with suppress(ValueError):  # no number at all: cyclopts says so
                if "." in token.value and not float(token.value).is_integer():
                    where = token.keyword or argument.name
                    raise ConfigError(f"{where} must be a whole number, got {token.value[:40]}")


def _kinds(hint: Any) -> list[Any]:
    """The types in an annotation."""
    parts = get_args(hint)
    return [kind for part in parts for kind in _kinds(part)] if parts else [hint]
