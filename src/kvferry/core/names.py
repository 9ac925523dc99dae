"""Objects by name: `package.module:attribute`, resolved on use, so that nothing is imported before it is needed."""

from __future__ import annotations

import importlib
from typing import Any

from kvferry.core.errors import ConfigError


def resolve(path: str) -> Any:
    """The object at `package.module:attribute`; `ConfigError` when it is not there."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"cannot import {module_name!r}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(f"module {module_name!r} has no {attribute!r}") from error
